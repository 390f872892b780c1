"""Names of data sets and models, and paths by flags and files of settings, with ~ for a home."""

from pathlib import Path

import pytest

from experiments import reproduce
from hamu import HamuError
from hamu.files import DIGITS, MINIATURE, is_local, located
from hamu.unlearning.jobs.options import PATHS, TYPES, DataOptions, RunOptions
from hamu.unlearning.jobs.settings import parser_of, settings_of
from hamu.unlearning.record.inputs import with_settings
from hamu.unlearning.run_folder import RunFolder
from hamu.unlearning.trainer import UnlearnConfig


def test_a_path_alone_is_relative_to_the_folder_of_the_data():
    assert located("rows.jsonl", "data") == "data/rows.jsonl"
    for source in ("rows.jsonl", "hub:owner/name", MINIATURE, DIGITS):
        assert is_local(source) == (located(source, "data") != source)
        assert located(source, None) == source


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_flags_and_files_name_homes_alike(home):
    (home / "run.yaml").write_text("model: ~/lm\ndata_dir: ~/data\nforget_filter: name~Ada\n")
    options = {"config": "~/run.yaml", "forget_rows": "~/rows.txt"}
    options |= {"output_dir": "~/out", "answer_prefix": "~"}
    parsed = settings_of("unlearn", options)
    data, run, args = (parsed.of(kind) for kind in (DataOptions, RunOptions, UnlearnConfig))
    found = (run.model, data.data_dir, data.forget_rows)
    assert found == tuple(f"{home}/{name}" for name in ("lm", "data", "rows.txt"))
    assert (args.output_dir, parsed.given["model"]) == (f"{home}/out", f"{home}/lm")
    assert (data.forget_filter, data.answer_prefix) == ("name~Ada", "~"), "what is no path stays"
    asked = reproduce._parser().parse_args(["--work_dir=~/work", "--output_dir=~/out"])
    assert asked.work_dir == f"{home}/work"


@pytest.mark.parametrize("command", TYPES)
def test_each_command_has_its_section_in_a_file_over_which_a_flag_wins(tmp_path, command):
    (tmp_path / "run.yaml").write_text(f"seed: 1\n{command}:\n  seed: 7\n")
    asked = {"config": tmp_path / "run.yaml"}
    assert settings_of(command, asked).given["seed"] == 7
    assert settings_of(command, asked | {"seed": 9}).given["seed"] == 9


def test_a_flag_wins_over_a_list_in_a_file(tmp_path):
    lists = "constraints: [0.25, 0.5]\nmethods: ft, ga\nseeds: [1, 2]\n"
    (tmp_path / "run.yaml").write_text(lists)
    own = {"constraint": 0.3, "seed": 7}
    parsed = settings_of("compare", {"config": tmp_path / "run.yaml", **own})
    assert parsed.given == {**own, "methods": ["ft", "ga"]}
    assert parsed.value("constraints") is parsed.value("seeds") is None


def test_several_values_have_blanks_or_commas_between_them():
    listed = ["--methods", "ft,ga", "kl", "--seeds=1,2", "--learning_rates", "0.1,", "0.2"]
    found = parser_of("compare").parse_args([*listed, "--data", "a,b"])
    assert (found.methods, found.data) == (["ft", "ga", "kl"], "a,b")
    assert (found.seeds, found.learning_rates) == ([1, 2], [0.1, 0.2])


def test_a_run_in_a_home_is_resumed_by_its_name(home):
    message = f"there is no run to resume in {home}/out: it has no config.yaml"
    with pytest.raises(HamuError, match=message):
        settings_of("unlearn", {"resume": True, "output_dir": "~/out"})


def test_a_path_that_is_empty_is_named(tmp_path):
    options = {*DataOptions.__annotations__, *RunOptions.__annotations__, "config"}
    for name in PATHS & options:
        given = [{name: ""}]
        if name != "config":
            (tmp_path / f"{name}.yaml").write_text(f'{name}: ""\n')
            given.append({"config": tmp_path / f"{name}.yaml"})
        for each in given:
            with pytest.raises(HamuError, match=f"^{name} is empty; is a shell variable unset"):
                settings_of("unlearn", each)


def test_a_run_that_was_moved_to_the_usual_place_is_resumed_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = {"seed": 1, "output_dir": "runs/before"}
    RunFolder("runs/before").begin(settings, with_settings({}, settings))
    Path("runs/before").rename("runs/unlearn")
    assert settings_of("unlearn", {"resume": True}).value("output_dir") == "runs/unlearn"


def test_a_setting_of_a_run_by_hand_makes_it_one():
    given = {"method": "gdiff", "learning_rate": 0.01, "constraint": 0.3, "stopping": "off"}
    given |= {"constraint_mode": "relative", "forget_objective": "npo"}
    assert settings_of("unlearn", {"seed": 7}).of(UnlearnConfig).auto
    for name, value in given.items():
        assert not settings_of("unlearn", {name: value}).of(UnlearnConfig).auto, name
