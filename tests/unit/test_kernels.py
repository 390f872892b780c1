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
ON_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
IN_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="no Triton here")


@IN_TRITON
@pytest.mark.parametrize("interpreted", [True, pytest.param(False, marks=ON_A_GPU)])
def test_kernels_are_plain_sums(interpreted):
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
@pytest.mark.parametrize("capability", [75, 80, 90, 120])
def test_kernels_can_be_compiled_for_a_gpu_that_is_not_here(capability, monkeypatch, tmp_path):
    """And load 16 bytes at a time, where both gradients lie on such a border."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from hamu.core import kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    bf16, wide = (kernels._TYPES[of] for of in (torch.bfloat16, torch.float32))
    sizes = {"IS_ALIGNED": True, "CHUNK": kernels._CHUNK, "BLOCK": kernels._BLOCK}
    table = dict.fromkeys(["addresses", "tensors", "indices", "sizes"], "*i64") | {"count": "i32"}
    sums, weights = {"out": "*fp64"}, {"weights": "*fp64"}
    for function, of, constants in (
        (kernels._gram_kernel, table | sums, {"OF_RETAIN": bf16, "OF_FORGET": bf16} | sizes),
        (kernels._combine_kernel, table | weights, {"TYPE": bf16, "WIDE": wide} | sizes),
        (kernels._sum_kernel, {"of_chunks": "*fp64", "starts": "*i64"} | sums, {"ROWS": 256}),
    ):
        given = of | dict.fromkeys(constants, "constexpr")
        given = {name: given[name] for name in function.arg_names}
        source = ASTSource(fn=function, signature=given, constexprs=constants)
        code = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]
        assert ("v4.b32" in code) == ("IS_ALIGNED" in constants)


@IN_TRITON
@pytest.mark.skipif(torch.cuda.is_available(), reason="they can be compiled here")
def test_where_they_cannot_be_compiled_torch_does_it_and_a_warning_says_why():
    with pytest.warns(UserWarning, match=r"Triton cannot compile a kernel \(.+\); gradients are"):
        assert kernels_on(torch.device("cuda", 0)) is None
    assert kernels_on(torch.device("cpu")) is None
