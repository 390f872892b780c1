"""Settings that a record may hold, its form, and the card of a model."""

import json
from importlib import resources

import pytest
from report_examples import goal

from hamu import UnlearnConfig
from hamu.unlearning.jobs.options import DataOptions, RunOptions
from hamu.unlearning.jobs.settings import Settings, recorded_settings
from hamu.unlearning.record import schema, statement, violations, write_model_card
from hamu.unlearning.record.inputs import text_digest


def test_places_and_people_are_not_among_the_recorded_settings(tmp_path):
    named = {"forget_filter": "author=Jane Doe", "data_dir": "hub:o/n"}
    named |= {name: f"/home/jane/{name}.jsonl" for name in ("test_data", "forget_data")}
    data = DataOptions(data="/home/jane/secret/people.jsonl", **named)
    of_texts = {name: f"/home/jane/{name}" for name in ("base_model", "tokenizer")}
    run = RunOptions(model="hub:owner/model", retain_model="../models/retrained/", **of_texts)
    options = {"optim": "adamw_torch", "hub_token": "hf_secret", "run_name": "for jane"}
    args = UnlearnConfig(output_dir=str(tmp_path / "jane"), adam_beta1=0.8, **options)
    given = ["optim", "hub_token", "run_name", "adam_beta1", "output_dir"]
    settings = recorded_settings(Settings((data, run, args), dict.fromkeys(given)))
    assert settings["data"] == "people.jsonl"
    assert settings["retain_model"] == "retrained"
    assert settings["model"] == "hub:owner/model"
    assert settings["forget_filter"] == {"sha256": text_digest("author=Jane Doe")}
    for secret in ("jane", "home", "hf_secret", "Jane"):
        assert secret not in json.dumps(settings)


@pytest.mark.parametrize(("part", "good", "bad"), [
    ({"type": "integer"}, [3, -1], [3.5, True, "3", None]),
    ({"type": "number"}, [3, 0.5], [True, "3"]),
    ({"type": ["string", "null"]}, ["", None], [0, []]),
    ({"type": "boolean"}, [True], [1, 0]),
    ({"enum": ["a", 1]}, ["a", 1], ["b", 2]),
    ({"type": "string", "pattern": "^[0-9]{2}$"}, ["12"], ["123", "a1"]),
    ({"type": "integer", "minimum": 2}, [2, 3], [1]),
    ({"type": "array", "items": {"type": "integer"}}, [[], [1, 2]], [[1, "2"], {}]),
    ({"required": ["a"]}, [{"a": None}], [{}, {"b": 1}]),
    ({"properties": {"a": {"type": "null"}}}, [{"a": None}, {"b": 1}], [{"a": 1}]),
    ({"properties": {"a": {}}, "additionalProperties": False}, [{"a": 1}, {}], [{"a": 1, "b": 1}]),
    ({"type": "object", "additionalProperties": {"type": "string"}}, [{"a": "b"}], [{"a": 1}]),
    ({"type": "object", "$ref": "#/$defs/d"}, [{"a": 1}], [{}, None]),
])  # fmt: skip
def test_each_keyword_of_a_schema_means_what_json_schema_says(part, good, bad):
    whole = part | {"$defs": {"d": {"type": ["object", "null"], "required": ["a"]}}}
    assert [value for value in good if list(violations(value, whole))] == []
    assert [value for value in bad if not list(violations(value, whole))] == []


KEYWORDS = {
    "$ref", "type", "enum", "required", "properties", "additionalProperties", "items", "pattern",
    "minimum", "$schema", "$defs", "title", "description",
}  # fmt: skip


def parts_of(part):
    yield part
    inner = [*part.get("properties", {}).values(), *part.get("$defs", {}).values()]
    for one in (*inner, part.get("items"), part.get("additionalProperties")):
        if isinstance(one, dict):
            yield from parts_of(one)


def test_the_schemas_use_no_other_keyword_and_the_record_is_described_to_its_end():
    shapes = json.loads(resources.files("hamu.report").joinpath("shapes.json").read_text())
    assert all(part.keys() <= KEYWORDS for part in (*parts_of(schema()), *parts_of(shapes)))
    closed = [part["additionalProperties"] for part in parts_of(schema()) if "properties" in part]
    assert not any(closed)


def test_a_model_card_names_counts_and_figures_but_no_place(tmp_path):
    forget = {"loss": 9.5, "accuracy": 0.0, "samples": 5}
    reports = {"after": {"forget": forget, "membership_inference": {"loss": 0.48, "min_k": 0.034}}}
    reports["before"] = {"membership_inference": {"loss": 0.99, "min_k": 0.9}}
    reports["retrained"] = {"membership_inference": None}
    given = {"method": "ga", "forget_records": 7, "reports": reports}
    write_model_card(tmp_path, base="/home/jane/original", **given)
    card = (tmp_path / "README.md").read_text()
    for said in ("machine-unlearning", "7 records", "`original`", "`ga`", "| forget | 5 | 9.5 | 0 |",
                 "without a certificate", "by min_k, of 2 attacks the one that tells most, AUC: 0.03 after, 0.90 before. At 0.5"):  # fmt: skip
        assert said in card
    assert "jane" not in card
    theirs = {"membership_inference": {"loss": 0.9, "min_k": 0.05}}
    write_model_card(
        tmp_path,
        base="m",
        **given | {"reports": {"after": reports["after"] | {"retain_model": theirs}}},
    )
    said = (
        "by min_k, of 2 attacks the one that tells most, AUC: 0.03 after, 0.05 of the retain model."
    )
    assert said in (tmp_path / "README.md").read_text()
    reports["after"]["membership_inference"] = {"auc": 0.6, "accuracy": 0.5}  # of images
    write_model_card(tmp_path, base="m", **given)
    assert "inference by losses, AUC: 0.60 after. At 0.5" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize(("count", "said"), [
    (None, "to unlearn 8 records: no goal defines a forgotten record."),
    (0, "to unlearn 8 records: 0 of 8 records are forgotten by the goal unseen."),
])  # fmt: skip
def test_a_model_card_opens_with_what_was_done_and_its_outcome(tmp_path, count, said):
    after = {"forgotten": count, "records": 8, "too_high": 0}
    goal = None if count is None else {"kind": "unseen", "loss": None, "after": after}
    write_model_card(tmp_path, base="m", method="ga", forget_records=8, goal=goal)
    opening = (tmp_path / "README.md").read_text().split("# Unlearned model")[1].split("\n")[2]
    assert opening == f"Made from `m` by the method `ga`, {said}"


@pytest.mark.parametrize(("lasting", "reached", "said"), [
    (False, True, "that lasts was not tested"), (True, True, "in rehearsal, and enough stayed"),
    (True, False, "ended before fine-tuning in rehearsal had shown that this lasts"),
])  # fmt: skip
def test_a_record_says_what_is_known_of_how_long_it_lasts(lasting, reached, said):
    after = {"membership_inference": None, "against_retain_model": None}
    record = {"steps": {"in_model": 9}, "figures": {"after": after}, "promise": None}
    record |= {"forget_set": {"cut": None, "records": 20}, "method": "hamu-q", "settings": {}}
    record["goal"] = goal(1, 20, reached=reached) | {"lasting": lasting, "doubts": []}
    of_goals = ("that lasts was", "in rehearsal, and", "had shown that")
    text = " ".join(statement(record, ["retain", "forget"]))
    assert said in text
    assert sum(one in text for one in of_goals) == 1
