"""Two counts of the bytes that are alive, and of the most there were in a phase.

    with AllocationMeter() as meter:
        model = ...
        with meter.phase("backward"):
            ...
    meter.phases["backward"].peak

Either counts from its start; memory from before does not count, nor does freeing it. Names of phases do not repeat.
"""

from __future__ import annotations

import json
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Phase:
    """Live bytes at a phase's start, at its peak and at its end."""

    start: int
    peak: int
    end: int


class AllocationMeter:
    """Memory that torch's CPU allocator gives out in this thread, as the profiler records it.

    Also what an operator takes for itself. Memory that another thread frees counts for ever. `phases` is there once the
    meter has been left.
    """

    def __init__(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._names: list[str] = []
        self.phases: dict[str, Phase] = {}

    def __enter__(self) -> AllocationMeter:
        self._profile.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._profile.__exit__(*exception)
        if exception[0] is None:
            self._read()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name the part of the measurement that happens inside."""
        self._names.append(name)
        with record_function(name):
            yield

    def _read(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        spans = {
            e["name"]: (e["ts"], e["ts"] + e["dur"])
            for e in events
            if e.get("cat") == "user_annotation"
        }
        levels = list(_levels(e for e in events if e["name"] == "[memory]"))
        for name in self._names:
            begin, end = spans[name]
            start = [level for time, level in levels if time < begin][-1:] or [0]
            inside = start + [level for time, level in levels if begin <= time <= end]
            self.phases[name] = Phase(inside[0], max(inside), inside[-1])


def _levels(events: Iterable[dict[str, Any]]) -> Iterator[tuple[float, int]]:
    """(time, live bytes) after each of the allocator's events."""
    live: dict[int, int] = {}
    total = 0
    for event in sorted(events, key=lambda e: e["ts"]):
        size, address = event["args"]["Bytes"], event["args"]["Addr"]
        total -= live.pop(address, 0)
        if size > 0:
            live[address] = size
            total += size
        yield event["ts"], total


class TensorMeter(TorchDispatchMode):
    """Memory of the tensors that torch's operators return, in backward passes too.

    A storage counts once, whichever tensors share it, until it is freed, whoever held it last, in whichever thread.
    What an operator takes for itself is not seen, such as a backend's own copies.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phases: dict[str, Phase] = {}
        self._live = self._peak = 0
        self._known: set[int] = set()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name the part of the measurement that happens inside; phases are not nested."""
        start = self._peak = self._live
        yield
        self.phases[name] = Phase(start, self._peak, self._live)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # of a tensor made from numbers only the last step is dispatched, which gets what it returns
        old = () if func is torch.ops.aten.lift_fresh.default else tree_leaves((args, kwargs))
        given = {id(t.untyped_storage()) for t in old if isinstance(t, Tensor)}
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if (
                isinstance(tensor, Tensor)
                and id(tensor.untyped_storage()) not in given | self._known
            ):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: UntypedStorage) -> None:
        self._known.add(id(storage))
        self._live += storage.nbytes()
        self._peak = max(self._peak, self._live)
        weakref.finalize(storage, self._freed, id(storage), storage.nbytes())

    def _freed(self, storage: int, nbytes: int) -> None:
        self._known.remove(storage)
        self._live -= nbytes
