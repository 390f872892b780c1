"""All of HAMU on a device of our own, in a process of its own."""

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_hamu_runs_on_a_device_whose_tensors_may_not_meet_the_hosts():
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "on_a_device.py"]
    found = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout
    assert " passed" in found.stdout
    assert " skipped" not in found.stdout
