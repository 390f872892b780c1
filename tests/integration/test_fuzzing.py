"""Random inputs end in a result or in one line; benchmarks/fuzz.py tries as many as one likes."""

import contextlib
import os
import socket
import sys
import warnings
from pathlib import Path

import fuzzing.world
import pytest
from fuzzing import INPUTS, Input, World
from hypothesis import HealthCheck, Phase, given, settings


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("world"))


@settings(max_examples=60, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(tried=INPUTS)
def test_whatever_the_input_is_it_ends_in_a_result_or_in_one_line_and_nothing_else_is_touched(
    world, tried
):
    outcome = world.run(tried)
    assert not outcome.wrong, tried
    assert outcome.name != "refused, not foreseen", (outcome.said, tried)


def raises(argv):
    raise IndexError("out of range")


def says_two_lines(argv):
    print("hamu unlearn: no\nreally", file=sys.stderr)
    return 2


def says_nothing(argv):
    return 2


def writes_beside(argv):
    Path("../beside").write_text("")
    return 0


def writes_and_clears(argv):
    Path("../beside").write_text("")
    os.remove("../beside")
    return 0


def refuses_too_late(argv):
    Path("out").mkdir()
    print("hamu unlearn: no", file=sys.stderr)
    return 2


def reaches_out(argv):
    with contextlib.suppress(OSError), socket.socket() as made:
        made.settimeout(0.01)
        made.connect(("127.0.0.1", 9))
    return 0


def warns(argv):
    warnings.warn("noise", stacklevel=1)
    return 0


def leaves(argv):
    sys.exit(0)


@pytest.mark.parametrize(("command", "seen"), [
    (raises, "escaped: builtins.IndexError"), (says_two_lines, "not one line"), (says_nothing, "not one line"),
    (writes_beside, "around/beside is new"), (writes_and_clears, "wrote"), (refuses_too_late, "written although"),
    (reaches_out, "network: socket.connect"), (warns, "noise"), (leaves, "escaped: builtins.SystemExit"),
    (lambda argv: 7, "exit code 7"),
])  # fmt: skip
def test_what_must_not_be_is_seen(world, monkeypatch, command, seen):
    monkeypatch.setattr(fuzzing.world, "main", command)
    outcome = world.run(Input("flags", ("unlearn",)))
    assert outcome.name == "violation"
    assert any(seen in wrong for wrong in outcome.wrong), outcome.wrong
