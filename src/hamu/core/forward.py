"""Forward passes: calling a model, evaluation mode, precision, and the model before unlearning."""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from hamu.core.distributed import is_sharded
from hamu.errors import HamuError


def predict_logits(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """Logits of a batch, [B, K] or [B, T, K]; the model gets no labels.

    A Hugging Face model is called by keyword, any other module with the pixel values as its one
    argument. Its output is the logits, or has them as `.logits`.
    """
    positional, named = _arguments(model, inputs)
    return logits_of(model(*positional, **named))


def logits_of(output: Any) -> Tensor:
    """Logits of a model's output."""
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise HamuError(
            f"the model returned {type(output).__name__}; expected logits, or an output with "
            f".logits"
        )
    return logits


def _arguments(
    model: nn.Module, inputs: Mapping[str, Tensor]
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    features = {key: value for key, value in inputs.items() if key != "labels"}
    wrapped = isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel)
    inner = model.module if wrapped else model
    if hasattr(inner, "main_input_name") or "pixel_values" not in features:
        return (), features
    return (features["pixel_values"],), {}


class OriginalModel:
    """Model before unlearning: the same module with its original trainable tensors swapped in.

    Frozen parameters are shared, so the cost is a copy of the trainable ones (with an adapter, the
    adapter) and of the floating-point buffers in the state dict, such as running statistics.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._is_sharded = is_sharded(model)
        self._original = _copies(model)

    @torch.no_grad()
    def logits(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Predictions of the original, in evaluation mode (no dropout, no batch statistics)."""
        with evaluating(self._model):
            if self._is_sharded:  # gathers its own parameters for a pass
                from hamu.core.distributed.sharded import swapped  # loads FSDP2

                with swapped(self._model, self._original):
                    return predict_logits(self._model, inputs)
            called = _arguments(self._model, inputs)
            return logits_of(
                torch.func.functional_call(self._model, self._original, *called, tie_weights=False)
            )


def _copies(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the tensors that training moves: one per tensor, a name per module that holds it.

    A module registered twice gets one name: `functional_call` restores a tensor once per name, the
    last time with the copy.
    """
    moving: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or name in module._non_persistent_buffers_set:
                continue
            is_buffer = name in module._buffers
            if tensor.is_floating_point() if is_buffer else tensor.requires_grad:
                moving[f"{prefix}.{name}".lstrip(".")] = tensor
    copies = {id(tensor): tensor.detach().clone() for tensor in moving.values()}
    return {name: copies[id(tensor)] for name, tensor in moving.items()}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for all modules; each gets its own mode back, even one that was in it before.

    Restores the CPU's random state too, which data loaders draw from: training after an evaluation
    must not depend on it.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def seeded(model: nn.Module, seed: int | None) -> Iterator[None]:
    """Seed the host and the model's GPUs, if there is a seed; restore their random states."""
    with torch.random.fork_rng({p.device for p in model.parameters() if p.is_cuda}):
        if seed is not None:
            torch.manual_seed(seed)
        yield


@contextmanager
def restored(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Put back the values of tensors, such as buffers that a pass in training mode moves."""
    kept = [(tensor, tensor.clone()) for tensor in tensors]
    try:
        yield
    finally:
        for tensor, value in kept:
            tensor.copy_(value)


@contextmanager
def without_autocast(model: nn.Module) -> Iterator[None]:
    """The model's own precision: without the autocast that accelerate puts around its forward."""
    wrapped: Any = vars(model).get("forward")
    original = vars(model).get("_original_forward")
    if wrapped is None or original is None:
        yield
        return
    model.forward = original
    try:
        yield
    finally:
        model.forward = wrapped


def rounds_to_tf32(model: nn.Module) -> bool:
    """True if a GPU rounds some of the model's float32 products to TF32 (10 bits of mantissa).

    By default it does so in convolutions and recurrent layers, with `--tf32` in all products.
    """
    if not any(p.is_cuda and p.dtype == torch.float32 for p in model.parameters()):
        return False
    if torch.cuda.get_device_capability()[0] < 8:
        return False
    kinds = (nn.modules.conv._ConvNd, nn.RNNBase)
    uses_cudnn = any(isinstance(module, kinds) for module in model.modules())
    used = _backends() if uses_cudnn else _backends()[:1]
    return any(backend.fp32_precision == "tf32" for backend in used)


@contextmanager
def without_tf32() -> Iterator[None]:
    """Float32 products in float32: TF32 would hide the effect of a small step on a loss.

    There are two interfaces, and one refuses to be read after the other was written alone; both are
    turned off here, and restored as far as they could be read.
    """
    switches: list[tuple[Any, str, Any]] = []
    if torch.cuda.is_available():
        older = (torch.backends.cuda.matmul, torch.backends.cudnn)
        switches += [(one, "allow_tf32", False) for one in older]
        switches += [(one, "fp32_precision", "ieee") for one in _backends()]
    before = []
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that there are two
        for one, name, _ in switches:
            with suppress(RuntimeError):  # of the older one, where the newer contradicts it
                before.append((one, name, getattr(one, name)))
        for switch in switches:
            setattr(*switch)
    try:
        yield
    finally:
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            for switch in before:
                setattr(*switch)


def _backends() -> list[Any]:
    """Backends that may round: matrix products, cuDNN's convolutions and recurrent layers."""
    cudnn: Any = torch.backends.cudnn
    return [torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn]
