"""Peak memory in Table 1 is that of the device of the run, also where a GPU is not used."""

import sys

import pytest
import torch

from experiments.paper import cost


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3_000_000_000)


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is told on Linux")
@pytest.mark.parametrize("use_cpu", [True, False])
def test_table_1_measures_the_memory_of_its_device(monkeypatch, use_cpu):
    monkeypatch.setattr(cost, "METHODS", ("gdiff",))
    monkeypatch.setattr(cost, "_problem", lambda settings: None)
    monkeypatch.setattr(cost, "_epoch", lambda method, settings, problem: 1.0)
    resets = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: resets.append(True))
    scale = type("Scale", (), {"epochs": 1})()
    held = cost.Cost().measure({"use_cpu": True} if use_cpu else {}, scale)["memory"]["gdiff"]
    assert bool(resets) is not use_cpu
    assert (held == (3_000_000_000) / 1e9) is not use_cpu
    assert held > 0
