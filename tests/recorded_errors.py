"""A plugin of pytest: after a complete session, every error in the source has been produced by a test.

Each process notes where the errors that it makes come from, a line for each, in one file that the environment names:
pytest's own processes, those forked from them, and programs that call `record`.
"""

import os
import sys
import tempfile
from functools import wraps
from pathlib import Path

import pytest
from error_templates import SOURCE, raised_errors

from hamu.errors import HamuError, Interrupted

# by their template, why no test can produce them on an ordinary machine
NOT_PRODUCED: dict[str, str] = {}

_ENVIRONMENT = "HAMU_RECORDED_ERRORS"
_NARROWING = ("keyword", "markexpr", "deselect", "ignore", "ignore_glob", "lf", "stepwise", "collectonly")
_MISSING = pytest.StashKey[list[str]]()


def record():
    """Note all errors that this process makes from now on, if the environment names a file for it."""
    if _ENVIRONMENT not in os.environ:
        return
    # open for good: a forked process may have another environment, and watched code opens nothing unseen
    notes = os.open(os.environ[_ENVIRONMENT], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for error in (HamuError, Interrupted):
        error.__init__ = _noted(error.__init__, notes)


def _noted(init, notes):
    @wraps(init)
    def noted(self, *args):
        place = sys._getframe(1)
        file = Path(place.f_code.co_filename)
        if file.is_relative_to(SOURCE):
            os.write(notes, f"{file.relative_to(SOURCE)}:{place.f_lineno}\n".encode())
        init(self, *args)

    return noted


def not_produced(places):
    """The templates that no error at one of these places, "file:line", has, except those listed."""
    raised = raised_errors()
    produced = {
        one.template for one in raised if any(f"{one.file}:{n}" in places for n in range(one.first, one.last + 1))
    }
    return sorted({one.template for one in raised} - produced - NOT_PRODUCED.keys())


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        with tempfile.NamedTemporaryFile(prefix="hamu-errors-", delete=False) as notes:
            os.environ[_ENVIRONMENT] = notes.name
    record()


def pytest_sessionfinish(session, exitstatus):
    if hasattr(session.config, "workerinput"):
        return
    notes = Path(os.environ.pop(_ENVIRONMENT))
    places = set(notes.read_text().splitlines())
    notes.unlink()
    if exitstatus == pytest.ExitCode.OK and is_complete(session.config):
        missing = session.config.stash[_MISSING] = not_produced(places)
        if missing:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    missing = config.stash.get(_MISSING, [])
    if missing:
        terminalreporter.section("errors that no test has produced", red=True)
    for template in missing:
        terminalreporter.line(template)


def is_complete(config):
    """Whether all tests were asked for."""
    asked = [Path(config.invocation_params.dir, arg).resolve() for arg in config.args]
    return asked == [Path(__file__).parent.resolve()] and not any(config.getoption(name, None) for name in _NARROWING)
