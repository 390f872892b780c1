"""What of a run's settings its record may hold, and what its statement says of what was not measured."""

import json

import pytest

from hamu import UnlearnConfig
from hamu.unlearning.jobs.options import DataOptions, RunOptions
from hamu.unlearning.jobs.settings import Settings, recorded_settings
from hamu.unlearning.record import write_model_card
from hamu.unlearning.record.inputs import edited, text_digest, with_settings
from hamu.unlearning.record.record import statement


@pytest.fixture
def settings(tmp_path):
    data = DataOptions(
        data="/home/jane/secret/people.jsonl", forget_filter="author=Jane Doe", data_dir="hub:o/n"
    )
    run = RunOptions(model="hub:owner/model", retain_model="../models/retrained/")
    args = UnlearnConfig(output_dir=str(tmp_path / "jane"), optim="adamw_torch", hub_token="hf_secret",
                         run_name="for jane", adam_beta1=0.8, max_retain_loss=2.0)  # fmt: skip
    given = dict.fromkeys(["optim", "hub_token", "run_name", "adam_beta1", "output_dir"])
    return recorded_settings(Settings((data, run, args), given))


def test_a_setting_without_the_digest_that_it_began_with_counts_as_edited(tmp_path):
    began = {"seed": 1, "method": "ga"}
    (tmp_path / "inputs.json").write_text(json.dumps(with_settings({}, began)))
    assert edited(tmp_path, began) == set()
    assert edited(tmp_path, {"seed": 2, "rho": 0.5}) == {"seed", "method", "rho"}
    (tmp_path / "inputs.json").write_text("{}")
    assert edited(tmp_path, began) == {"seed", "method"}


def test_places_and_people_are_not(settings):
    assert settings["data"] == "people.jsonl"
    assert settings["retain_model"] == "retrained"
    assert settings["model"] == "hub:owner/model"
    assert settings["forget_filter"] == {"sha256": text_digest("author=Jane Doe")}
    for secret in ("jane", "home", "hf_secret", "Jane"):
        assert secret not in json.dumps(settings)


def test_the_statement_says_what_was_not_measured():
    def said(**measured):
        after = {"membership_inference": None, "against_retain_model": None} | measured
        forget = {"records": 9, "cut": None}
        record = {
            "method": "ga",
            "steps": {"in_model": 7},
            "goal": None,
            "forget_set": forget,
            "figures": {"after": after},
        }
        return " ".join(statement(record))

    assert "by 7 gradient updates of the method ga" in said()
    assert "no certificate" in said()
    assert "No membership inference was measured" in said()
    assert "no model that had been retrained" in said()
    measured = said(membership_inference={"auc": 0.5}, against_retain_model={"forget": {"kl": 0.1}})
    assert "Membership inference is one kind of attack" in measured
    assert "No membership inference" not in measured
    assert "no model that had been retrained" not in measured


def test_a_model_card_names_counts_and_figures_but_no_place(tmp_path):
    reports = {"after": {"forget": {"loss": 9.5, "accuracy": 0.0}}}
    path = write_model_card(
        tmp_path, base="/home/jane/original", method="ga", forget_records=7, reports=reports
    )
    card = path.read_text()
    for said in ("machine-unlearning", "7 records", "`original`", "`ga`", "9.5", "no certificate"):
        assert said.replace("no certificate", "without a certificate") in card
    assert "jane" not in card
