"""`counted`, a device for tests and benchmarks: a GPU's rules on the host's memory, every launch counted.

PyTorch's key for devices of others (PrivateUse1) gets a backend in Python. A tensor of the device wraps one on the
host; an operation unwraps, runs, wraps. As on a GPU, a tensor of the host among its arguments is an error, except
scalars, index lists and copies.

`counted:0` has the host's memory, `counted:1` none: its tensors may have any size and have no values. They exist, as far
as `torch.accelerator` can tell, inside `present()` alone, so that other tests in the process find no accelerator.
"""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

NAME = "counted"
SENT = "from the host"
aten = torch.ops.aten
_COPIES = (aten.copy_.default, aten._to_copy.default)
_READS = (aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default)
_MAKES_NO_KERNEL = ("empty", "new_empty", "resize_", "set_")


@dataclass
class Count:
    """Work of the device.

    Attributes:
        launches: kernels, by the operation's name.
        reads: operations for whose result the host waits, `SENT` for a copy to the device.
        moved: bytes that kernels read and write.
    """

    launches: Counter[str] = field(default_factory=Counter)
    reads: list[str] = field(default_factory=list)
    moved: int = 0

    @property
    def total(self) -> int:
        """Kernels of all kinds."""
        return self.launches.total()


_counts: list[Count] = []
_is_present = False
_memory = torch.device("cpu")


class DeviceTensor(Tensor):
    """A tensor of the device, around one on the host."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, host: Tensor) -> "DeviceTensor":
        return torch.Tensor._make_wrapper_subclass(
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=torch.device(NAME, int(host.is_meta)),
        )

    def __init__(self, host: Tensor) -> None:
        self.host = host

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype}, {self.device})"

    def tolist(self) -> Any:
        """The values; subclasses have no `tolist` of their own."""
        return self.cpu().tolist()

    @property
    def data(self) -> Any:
        """The tensor without its history; setting it swaps the memory."""
        return DeviceTensor(self.host)

    @data.setter
    def data(self, value: Any) -> None:
        self.host = value.host

    def __deepcopy__(self, memo: Any) -> Any:
        """A copy, of a parameter too; storages of subclasses cannot be copied."""
        found = self.detach().clone()
        if isinstance(self, torch.nn.Parameter):
            found = torch.nn.Parameter(found, self.requires_grad)
        memo[id(self)] = found
        return found

    def data_ptr(self) -> int:
        """Address of the first element."""
        return self.host.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _run(func, *args, **(kwargs or {}))


def _run(func: Any, *args: Any, **kwargs: Any) -> Any:
    """One operation of the device."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if func in _COPIES:
        return _copy(func, *args, **kwargs)
    _check_place(func, tensors)
    inner_args, inner_kwargs = tree_map(_inner, (args, kwargs))
    inner_kwargs.pop("pin_memory", None)
    found = func(*inner_args, **inner_kwargs)
    _note(func, inner_args, inner_kwargs, found)
    wrapped = {id(t.host): t for t in tensors if isinstance(t, DeviceTensor)}  # written in place

    def wrap(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return wrapped[id(value)] if id(value) in wrapped else DeviceTensor(value)

    return tree_map(wrap, found)


def _copy(func: Any, *args: Any, **kwargs: Any) -> Any:
    """A copy on the device, to it, or from it."""
    into = args[0] if func is aten.copy_.default else None
    source = args[1] if func is aten.copy_.default else args[0]
    device = (
        torch.device(kwargs.pop("device", None) or source.device) if into is None else into.device
    )
    waits = not kwargs.pop("non_blocking", len(args) > 2 and args[2])
    kwargs.pop("pin_memory", None)
    inner = _inner(source)
    if into is None and device.type == NAME:
        kwargs["device"] = _memory
    found = func(inner, **kwargs) if into is None else _inner(into).copy_(inner)
    is_here = isinstance(source, DeviceTensor)
    if device.type == NAME:
        _note(func, [_inner(source)], {}, found)
    if waits and is_here != (device.type == NAME):  # a GPU keeps the host waiting either way
        for count in _counts:
            count.reads.append(str(func) if is_here else SENT)
    if into is not None:
        return into
    return DeviceTensor(found) if device.type == NAME else found


def _inner(value: Any) -> Any:
    """The host's part of an argument."""
    if isinstance(value, DeviceTensor):
        return value.host
    return _memory if isinstance(value, torch.device) else value


def _check_place(func: Any, tensors: list[Tensor]) -> None:
    """Refuse tensors of the host beside those of the device."""
    if any(isinstance(t, DeviceTensor) for t in tensors):
        indexed = func.overloadpacket in (aten.index, aten.index_put_, aten._index_put_impl_)
        for t in tensors:
            if not isinstance(t, DeviceTensor) and t.dim() and not indexed:
                raise RuntimeError(f"{func} on {NAME} takes a tensor {list(t.shape)} of the host")


def _bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's elements; those of a dimension that only repeats count once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size if stride else 1 for size, stride in sizes) * tensor.element_size()


def _note(func: Any, args: Any, kwargs: Any, found: Any) -> None:
    """Count an operation, unless it only looks at its arguments otherwise."""
    returns = func._schema.returns
    is_view = bool(returns) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in returns
    )
    name = func.overloadpacket.__name__
    if is_view or name == "detach" or name.startswith(_MAKES_NO_KERNEL):
        return
    tensors = [leaf for leaf in tree_leaves((args, kwargs, found)) if isinstance(leaf, Tensor)]
    written = [
        value
        for argument, value in zip(func._schema.arguments, args, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    touched = [*{id(t): t for t in tensors}.values(), *tree_leaves(written)]  # read and written
    size = sum(_bytes(t) for t in touched)
    for count in _counts:
        count.launches[name] += 1
        count.moved += size
        if func in _READS:
            count.reads.append(str(func))


@contextmanager
def counting() -> Iterator[Count]:
    """Count what the device does inside."""
    count = Count()
    _counts.append(count)
    try:
        yield count
    finally:
        _counts.remove(count)


@contextmanager
def present(memory: str = "cpu") -> Iterator[torch.device]:
    """Let programs find the device; modules keep their parameters when they move, as to a GPU.

    With memory="meta" tensors of any size cost nothing and have no values, which cannot be read.
    """
    global _is_present, _memory
    _register()
    _memory = torch.device(memory)
    before = torch.__future__.get_swap_module_params_on_conversion()
    _is_present = True
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield torch.device(NAME, int(memory == "meta"))
    finally:
        _is_present, _memory = False, torch.device("cpu")
        torch.__future__.set_swap_module_params_on_conversion(before)


class _Module(backend_registration._DummyBackendModule):
    """`torch.counted`."""

    def is_available(self) -> bool:
        return _is_present

    def device_count(self) -> int:
        return 1 if _is_present else 0

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


class _Hooks(backend_registration._DummyPrivateUse1Hook):
    def is_available(self) -> bool:
        return _is_present


@cache
def _register() -> tuple[torch.library.Library, ...]:
    """Make the device known to PyTorch, for good; its kernels live as long as what this returns.

    Before the first backward pass of a process, which starts the threads of all devices that it knows; after it the
    process cannot be forked to take gradients.
    """
    backend_registration._setup_privateuseone_for_python_backend(NAME, _Module(), _Hooks())
    every, own = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    every.fallback(_run, "PrivateUse1")
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    own.impl("copy_", lambda *args: _run(aten.copy_.default, *args), "PrivateUse1")  # torch.tensor
    return every, own
