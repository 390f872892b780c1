"""Installed packages add classes; a broken one is named, and stops only what asks for it."""

import json
import re
import sys

import pytest
import torch
from doc_blocks import install

from hamu import HamuError, HamuQ, build_method
from hamu.cli import main, run_experiments
from hamu.core import plugins
from hamu.core.methods import method_rows
from hamu.core.objectives import build_objective
from hamu.evaluation.reports import build_metrics, further_figures

METRICS = """
import torch
from hamu.core.methods.base import Method

class Good:
    name = "good"
    def measure(self, predictions, reference):
        return torch.tensor(0.5)

class Nothing(Good):
    name = "nothing"
    def measure(self, predictions, reference):
        return None

class Failing(Good):
    name = "failing"
    def measure(self, predictions, reference):
        raise KeyError("a line of the data")

class Text(Good):
    name = "text"
    def measure(self, predictions, reference):
        return "much"

class Slashed(Good):
    name = "my/2"

class Usurper(Good):
    name = "hamu-q"
    stopping_rule = None  # as a Method has it

class Demanding(Good):
    name = "demanding"
    stopping_rule = needs_original = None  # as a Method and an Objective have them
    def __init__(self, something):
        pass

class NoPass(Method):
    name = "no-pass"
    retain_objective = forget_objective = None
    weigh = None

class WrongMean(Method):
    name = "wrong-mean"
    retain_decay = 2.0
    weigh = None

nameless = 3
"""
FLAGS = ["--data", "digits", "--forget_class", "3", "--model", "nowhere"]
BROKEN, GONE, NAMELESS = "their_broken:Method", "their_metrics:Gone", "their_metrics:nameless"


@pytest.fixture
def package(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins._warn.cache_clear()
    (tmp_path / "their_metrics.py").write_text(METRICS)
    (tmp_path / "their_broken.py").write_text("import a_package_that_is_not_there")
    named = lambda groups: {f"hamu.{name}": of for name, of in groups.items()}  # noqa: E731
    yield lambda **groups: install(tmp_path, "their-package", "1.2", named(groups))
    plugins.points_of.cache_clear()
    for name in ("their_metrics", "their_broken"):
        sys.modules.pop(name, None)


ASKS = {"method": build_method, "objective": build_objective}
ASKS["metric"] = lambda name: build_metrics()


@pytest.mark.parametrize("kind", ASKS)
@pytest.mark.parametrize(
    ("value", "why"),
    [
        (BROKEN, "cannot be loaded: ModuleNotFoundError: No module named 'a_package_that_is"),
        (NAMELESS, "is not a class with a name; repair the package, or uninstall it"),
        ("their_metrics:Demanding", "demanding of their_metrics cannot be made: TypeError: "),
    ],
)
def test_a_class_that_is_asked_for_and_cannot_be_had_is_named(package, kind, value, why):
    name = "demanding" if value.endswith("Demanding") else "theirs"
    package(**{f"{kind}s": {name: value}})
    whose = "" if name == "demanding" else f"theirs ({value}) of their-package 1.2 "
    with pytest.raises(HamuError, match=re.escape(f"the {kind} {whose}{why}")):
        ASKS[kind](name)


@pytest.mark.parametrize(("name", "message"), [
    ("no-pass", "^no-pass has neither a retain nor a forget objective"),
    ("wrong-mean", r"^wrong-mean has retain_decay 2\.0; it must be in \[0, 1\)"),
    ("slashed", "has the name 'my/2', which a folder cannot have; rename"),
    ("usurper", "'hamu-q' of their_metrics:Usurper has a name that is taken"),
    ("good", r"1\.2 does not inherit from hamu's Method; "),
])  # fmt: skip
def test_a_method_that_is_none_is_refused(package, name, message):
    package(methods={name: f"their_metrics:{name.title().replace('-', '')}"})
    with pytest.raises(HamuError, match=message):
        build_method(name)


def test_what_is_no_method_may_be_another_class_or_is_passed_over(package):
    good = {"good": "their_metrics:Good"}
    package(methods=good, objectives=good, metrics={"slashed": "their_metrics:Slashed"})
    assert list(build_metrics()) == ["my/2"], "a name of no folder"
    assert "good" not in [row.name for row in method_rows()]
    with pytest.raises(HamuError, match=r"1\.2 does not inherit from hamu's Objective; "):
        build_objective("good")


def test_a_wrong_setting_of_a_method_of_hamu_is_named_and_no_package():
    with pytest.raises(
        HamuError, match="method gdiff cannot be made with forget_weight 'a': "
    ) as at:
        build_method("gdiff", forget_weight="a")
    assert "uninstall" not in str(at.value)


def test_a_broken_class_that_is_not_asked_for_is_passed_over_with_one_warning(package, caplog):
    package(methods={"theirs": BROKEN})
    for _ in range(2):
        assert build_method("hamu-q").name == "hamu-q"
        with pytest.raises(HamuError, match="method 'other' is unknown; choose one of hamu-q, "):
            build_method("other")
    [record] = caplog.records
    start = f"warning: the method theirs ({BROKEN}) of their-package 1.2 cannot"
    assert record.getMessage().startswith(start)
    assert record.getMessage().endswith("; it is skipped")


def test_a_broken_class_stops_a_command_that_needs_it(package, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    package(methods={"theirs": GONE}, metrics={"demanding": "their_metrics:Demanding"})
    assert main(["methods"]) == 0
    assert " hamu-q " in capsys.readouterr().out
    metric = "the metric demanding of their_metrics cannot be made: TypeError: "
    for line, message in (
        (["unlearn", "--method", "theirs"], f"the method theirs ({GONE}) of their-package 1.2 can"),
        *(([command], metric) for command in ("unlearn", "evaluate", "compare")),
    ):
        assert main([*line, *FLAGS]) == 2
        assert capsys.readouterr().err.split("\n")[-2].startswith(f"hamu {line[0]}: {message}")


def test_what_a_foreign_class_raises_is_raised_with_its_name(capsys):
    called = type("Theirs", (), {"name": "theirs", "__module__": "their_methods"})()
    for one, note in ((called, ", in the method theirs of their_methods"), (HamuQ(), "")):

        def run(argv, screen, one=one):
            with plugins.naming("method", one):
                raise KeyError("a block")

        assert run_experiments([], run) == 2
        assert f": KeyError: 'a block'{note} (--debug shows where)" in capsys.readouterr().err


def test_a_metric_that_fails_is_not_measured_and_the_others_are_numbers(package, caplog):
    names = ("Good", "Nothing", "Failing", "Text")
    package(metrics={name.lower(): f"their_metrics:{name}" for name in names})
    assert plugins.providers() == {"their-package": "1.2"}
    found = further_figures({}, None)
    assert found == {"good": 0.5, "nothing": None, "failing": None, "text": None}
    assert not isinstance(found["good"], torch.Tensor)
    assert json.loads(json.dumps(found)) == found
    assert [record.getMessage() for record in caplog.records] == [
        "warning: the metric failing is not measured: it ended in KeyError",
        "warning: the metric text is not measured: it ended in ValueError",
    ]
    assert "good" not in further_figures({}, None, {"good": 0.1}), "of the report's own name"
    assert "warning: the metric good has the name of another; rename it" in caplog.text
