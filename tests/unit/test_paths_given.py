"""Paths by flags and by files of settings: ~ is the home of a user, whatever the command."""

import pytest

from experiments import reproduce
from hamu import HamuError
from hamu.cli.options import PATHS, DataOptions, ResumeOptions, RunOptions
from hamu.cli.parsing import parse
from hamu.unlearning.trainer import UnlearnConfig


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_flags_and_files_name_homes_alike(home):
    (home / "run.yaml").write_text("model: ~/lm\ndata_dir: ~/data\nforget_filter: name~Ada\n")
    words = [
        "--config=~/run.yaml",
        "--forget_rows=~/rows.txt",
        "--output_dir=~/out",
        "--answer_prefix=~",
    ]
    parsed = parse("unlearn", "", words, DataOptions, RunOptions, UnlearnConfig)
    data, run, args = (parsed.of(kind) for kind in (DataOptions, RunOptions, UnlearnConfig))
    assert (run.model, data.data_dir, data.forget_rows) == (
        f"{home}/lm",
        f"{home}/data",
        f"{home}/rows.txt",
    )
    assert (args.output_dir, parsed.given["model"]) == (f"{home}/out", f"{home}/lm")
    assert (data.forget_filter, data.answer_prefix) == ("name~Ada", "~"), "what is no path stays"
    assert (
        reproduce._parser().parse_args(["--work_dir=~/work", "--output_dir=~/out"]).work_dir
        == f"{home}/work"
    )


def test_a_run_in_a_home_is_resumed_by_its_name(home):
    with pytest.raises(
        HamuError, match=f"there is no run to resume in {home}/out: it has no config.yaml"
    ):
        parse(
            "unlearn",
            "",
            ["--resume", "--output_dir=~/out"],
            DataOptions,
            RunOptions,
            ResumeOptions,
            UnlearnConfig,
        )


@pytest.mark.parametrize(
    "name", sorted(PATHS & {*DataOptions.__annotations__, *RunOptions.__annotations__, "config"})
)
def test_a_path_that_is_empty_is_named(name, tmp_path):
    with pytest.raises(HamuError, match=f"^{name} is empty; is a shell variable unset"):
        parse("unlearn", "", [f"--{name}", ""], DataOptions, RunOptions, UnlearnConfig)
    if name != "config":
        (tmp_path / "run.yaml").write_text(f'{name}: ""\n')
        with pytest.raises(HamuError, match=f"^{name} is empty"):
            parse(
                "unlearn",
                "",
                ["--config", str(tmp_path / "run.yaml")],
                DataOptions,
                RunOptions,
                UnlearnConfig,
            )
