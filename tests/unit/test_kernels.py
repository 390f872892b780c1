"""The GPU's kernels: interpreted where there is Triton, and what happens where they cannot be compiled."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from hamu.core.gram_meter import kernels_on

TESTS = Path(__file__).parents[1]
IN_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="no Triton here")


@IN_TRITON
@pytest.mark.parametrize("interpreted", [True, False])
def test_kernels_are_plain_sums(interpreted):
    if not interpreted and not torch.cuda.is_available():
        pytest.skip("no GPU here")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "in_triton.py"],
        cwd=TESTS,
        env=os.environ | ({"TRITON_INTERPRET": "1"} if interpreted else {}),
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]


@IN_TRITON
@pytest.mark.skipif(torch.cuda.is_available(), reason="they can be compiled here")
def test_where_they_cannot_be_compiled_torch_does_it_and_a_warning_says_why():
    with pytest.warns(UserWarning, match=r"Triton cannot compile a kernel \(.+\); gradients are"):
        assert kernels_on(torch.device("cuda", 0)) is None
    assert kernels_on(torch.device("cpu")) is None
