"""`_counted.py`'s names for an NVIDIA GPU: what the profiler and CUDA's own warnings count there."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from _counted import Count
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

NAME = "cuda"


@contextmanager
def present() -> Iterator[torch.device]:
    """The first GPU."""
    yield torch.device(NAME, 0)


@contextmanager
def counting() -> Iterator[Count]:
    """Count kernels and copies that the GPU is given, and operations that keep the host waiting; no bytes."""
    count = Count()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    with (
        warnings.catch_warnings(record=True) as seen,
        profile(activities=[ProfilerActivity.CUDA]) as found,
    ):
        warnings.simplefilter("always")
        try:
            yield count
        finally:
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
    waits = [one for one in seen if "called a synchronizing" in str(one.message)]
    count.reads += [f"{one.filename}:{one.lineno}" for one in waits]
    for event in found.events():
        if event.device_type == DeviceType.CUDA:
            count.launches[event.name] += 1
