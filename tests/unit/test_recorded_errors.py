"""What records the errors that tests produce: seen in every process, demanded after a complete session alone."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from error_templates import raised_errors
from recorded_errors import is_complete, not_produced

TESTS = Path(__file__).parents[1]
ONE_ERROR = """
import pytest
from hamu import HamuError, build_method

def test_an_unknown_method():
    with pytest.raises(HamuError):
        build_method("magic")
"""


def test_a_template_is_produced_at_any_line_of_any_of_its_places():
    raised = raised_errors()
    assert not_produced({f"{one.file}:{one.last}" for one in raised}) == []
    left_out = next(one for one in raised if one.file == "objectives.py")
    assert not_produced({f"{one.file}:{one.first}" for one in raised if one != left_out}) == [left_out.template]


def test_a_complete_session_fails_for_what_no_test_has_produced(tmp_path):
    tests = tmp_path / "tests"
    tests.mkdir()
    for name in ("recorded_errors.py", "error_templates.py"):
        shutil.copy(TESTS / name, tests)
    (tests / "test_one.py").write_text(ONE_ERROR)
    command = [sys.executable, "-m", "pytest", "-p", "recorded_errors", "tests"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tests), *sys.path])}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "errors that no test has produced" in done.stdout
    assert "\n<> <> must be 0 to <>\n" in done.stdout
    assert "method <> is unknown" not in done.stdout


@pytest.mark.parametrize(("args", "options", "complete"), [
    (["tests"], {"keyword": "", "deselect": None}, True),
    (["."], {}, False),
    (["tests/unit"], {}, False),
    (["tests", "tests/unit/test_errors_page.py"], {}, False),
    (["tests"], {"keyword": "trainer"}, False),
    (["tests"], {"deselect": ["tests/unit/test_errors_page.py"]}, False),
    (["tests"], {"lf": True}, False),
])  # fmt: skip
def test_a_session_is_complete_if_all_tests_were_asked_for(args, options, complete):
    config = SimpleNamespace(args=args, invocation_params=SimpleNamespace(dir=TESTS.parent), getoption=options.get)
    assert is_complete(config) is complete
