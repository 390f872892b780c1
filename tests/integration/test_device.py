"""All of HAMU on another device, in a process of its own: one of our own, and a GPU if there is one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[1]
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@pytest.mark.parametrize("device", ["counted", pytest.param("cuda", marks=NO_GPU)])
def test_hamu_runs_on_a_device_whose_tensors_may_not_meet_the_hosts(device):
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "on_a_device.py"]
    environment = os.environ | {"HAMU_TEST_DEVICE": device}
    if device == "counted":  # the only one that programs are to find
        environment["CUDA_VISIBLE_DEVICES"] = ""
    found = subprocess.run(
        command, cwd=TESTS, capture_output=True, text=True, check=False, env=environment
    )
    assert found.returncode == 0, found.stdout
    assert " passed" in found.stdout
    assert (" skipped" in found.stdout) == (device == "cuda")
