"""Settings of every test: one thread, and the same random examples on every machine."""

import gc
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for helpers.py, from every folder
os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = (
    "1"  # scipy's solvers crawl when cores are shared
)

import torch
from hypothesis import settings

torch.set_num_threads(1)
if torch.cuda.is_available():  # else two runs on a GPU differ in their last digits
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.allow_tf32 = False  # as on the host, with which results are compared
settings.register_profile("hamu", deadline=None, derandomize=True, database=None)
settings.load_profile("hamu")


def pytest_collection_finish():
    """Exempt what is loaded from garbage collection: every trainer begins with one, which takes up to a second."""
    gc.collect()
    gc.freeze()
