"""`PairedGradients`: two backward passes, one combine, in the user's own loop.

After `combine`, `.grad` holds the equivalent gradient g* = a_i·g_r,i + b_i·g_f,i for any optimizer.
Gradients are kept by pointer, and the combine writes into the retain side's memory, unless offload,
`keep` or split pairing asks otherwise. `combine` reads from the device once: decision, 2·L weights
and loss scale. (Twice if sums of large tensors need float64: near-collinear or extreme gradients.)
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hamu.core.combine import GradOffload, combined, combined_with_offloaded
from hamu.core.distributed.layout import (
    Grads,
    Layout,
    Replicated,
    drained,
    is_flattened,
    is_sharded,
)
from hamu.core.gram import (
    SIDES,
    Blocks,
    PairGram,
    check_max_norm,
    combine_dtype,
    group_blocks,
    trainable_parameters,
)
from hamu.core.gram_meter import GramMeter
from hamu.core.methods.base import Method, StoppingMemory, Weights
from hamu.core.pair_step import Cause, Decision, PairStep
from hamu.errors import HamuError

_FIGURES = (  # of a constraint, read with the decision
    "feasible",
    "demand",
    "max_demand",
    "clipped_demand",
    "free_limit",
    "conflict",
    "some_demand_is_free",
)


@dataclass(frozen=True)
class _Read:
    """Figures of a step on the host; weights are those of the gradients before clipping, [L]."""

    finite: bool
    unscale: float
    losses_finite: bool
    constraint: dict[str, float]
    retain_weights: list[float]
    forget_weights: list[float]
    precision: list[float]


class PairedGradients:
    """Collects the retain and the forget gradient of a model and combines them by a method.

        pair = PairedGradients(model, HamuQ(constraint=0.5))
        with pair.retain():
            retain_loss.backward()
        with pair.forget():
            forget_loss.backward()
        step = pair.combine()
        if not step.should_stop:
            optimizer.step()

    Args:
        model: any module; the parameters that require a gradient now take part.
        method: the rule of combination, such as `HamuQ()` or `build_method(name)`.
        blocks: "tensor" (one block per parameter), "module" (per module), "model" (one), or a
            function from a parameter's name to a key; parameters with equal keys form one block.
        offload_grads: place of one side's gradient during the other's pass: "none", unchanged;
            "cpu", in host memory; "bf16", on the device in half the memory. Each offload to bf16
            rounds every entry by at most 2⁻⁸ of itself: once if each side is collected in one
            stretch, and g_r·g_f is off by at most 2⁻⁸ Σ|g_r,i g_f,i|; once a turn if the sides
            alternate. The step keeps its promise for the rounded gradients.
        max_grad_norm: global norm to which each side is clipped before weighing (the paper: 1);
            None for no clipping. Leave other clipping off.

    Raises:
        HamuError: if the method is not a `Method`, blocks or offload_grads is unknown, or
            max_grad_norm is not positive; if no parameter requires a gradient, or one that does is
            on the meta device or complex; if FSDP1 wraps the model, it is sharded otherwise than by
            fully_shard on one mesh, or sharded with offload.
    """

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        *,
        blocks: Blocks = "tensor",
        max_grad_norm: float | None = 1.0,
        offload_grads: str = "none",
    ) -> None:
        if not isinstance(method, Method):
            raise HamuError(
                f"{method!r} is not a Method; pass an instance, such as HamuQ() or "
                f"build_method(name)"
            )
        if is_flattened(model):
            raise HamuError(
                "the model is wrapped in FullyShardedDataParallel, where each process sees its own "
                "piece alone; shard it with fully_shard (FSDP2)"
            )
        sharded = is_sharded(model)  # gathers nothing; must precede named_parameters
        named = trainable_parameters(model)
        for name, parameter in named:
            if parameter.is_meta:
                raise HamuError(
                    f"{name} is on the meta device (offloaded or never loaded); trainable "
                    f"parameters must be on a real device"
                )
            if parameter.is_complex():
                raise HamuError(
                    f"{name} is complex; keep its real and imaginary part as two parameters, or "
                    f"freeze it"
                )
        check_max_norm(max_grad_norm)
        self.method = method
        self.max_grad_norm = max_grad_norm
        self.offload_grads = GradOffload(offload_grads)
        self.names = [name for name, _ in named]
        self.parameters = [p for _, p in named]
        self._frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
        self.block_names, self.block_of = group_blocks(self.names, blocks)
        layout: Callable[..., Layout] = Replicated
        if sharded:
            from hamu.core.distributed.sharded import Sharded as layout  # noqa: N813 loads FSDP2
        self.use(layout(self.parameters, self.block_of))
        self._memory = StoppingMemory(method.stopping_rule)
        self._grads: dict[str, Grads] = {}
        self._versions: list[int] = []
        self._inside: str | None = None

    def use(self, layout: Layout) -> None:
        """Choose the layout of both gradients, before the first step."""
        if self.offload_grads.is_used and not layout.is_whole:
            raise HamuError(
                f"offload_grads {self.offload_grads.name!r} needs both whole gradients in each "
                f"process; leave it at none"
            )
        self.layout = layout
        self._meter = GramMeter(layout.parts, layout.block_of, len(self.block_names))
        self._largest = min(torch.finfo(combine_dtype(p)).max for p in layout.parts)

    @property
    def can_keep(self) -> bool:
        """True if `combine` can keep gradients: both are here, as collected."""
        return self.layout.is_whole and not self.offload_grads.is_used

    @contextmanager
    def retain(self) -> Iterator[None]:
        """Collect the gradient of the retain loss: call backward inside, once or several times."""
        with self._collect("retain"):
            yield

    @contextmanager
    def forget(self) -> Iterator[None]:
        """Collect the gradient of the forget loss (the loss itself, not its negative)."""
        with self._collect("forget"):
            yield

    @contextmanager
    def _collect(self, side: str) -> Iterator[None]:
        if self._inside:
            raise HamuError(
                f"{side}() was entered inside {self._inside}(); close the one before opening the "
                f"other"
            )
        if not self._grads:
            self._versions = [p._version for p in self.parameters]
        self._check_stale()
        for other in self._grads.keys() - {side}:
            self._grads[other] = self.offload_grads.put(self._grads[other])
        kept = self._grads.pop(side, self._no_grads())
        self._set_grads(self.offload_grads.take(kept, self.parameters))
        self._inside = side
        try:
            yield
        except BaseException:
            self.discard()
            raise
        finally:
            self._inside = None
        collected = [p.grad for p in self.parameters]
        self._set_grads(self._no_grads())
        if all(grad is None for grad in collected):
            self.discard()
            raise HamuError(
                f"no gradient reached any trainable parameter inside {side}(); call backward() "
                f"inside the context, on a loss that depends on them"
            )
        self._grads[side] = collected

    def discard(self) -> None:
        """Drop both gradients collected since the last combine."""
        self._grads = {}
        self._set_grads(self._no_grads())

    @torch.no_grad()
    def abandon(self, scaler: torch.amp.GradScaler | None = None) -> None:
        """Give up the collected step: the optimizer's step will change nothing.

        Args:
            scaler: the `GradScaler` of both losses; see `combine`.
        """
        retain, forget = (self._grads.get(side, self._no_grads()) for side in SIDES)
        self.discard()
        if scaler is not None and scaler.is_enabled():
            self._spoil(_either(retain, forget))

    @torch.no_grad()
    def combine(
        self,
        scaler: torch.amp.GradScaler | None = None,
        *,
        keep: Collection[str] = (),
        losses_finite: Tensor | bool | None = None,
    ) -> PairStep:
        """Weigh the two gradients and leave g* in `.grad`; uses both sides up.

        On a skip or stop (a non-finite gradient or loss, an infeasible constraint, the stopping
        criterion) every `.grad` is None, so that an optimizer's step changes neither weights nor
        state.

        Args:
            scaler: the `GradScaler` that scaled both losses. g* keeps its scale, for `scaler.step`
                to remove; a step not taken leaves NaN instead of None, which the scaler skips. Call
                neither `scaler.step` nor `scaler.update` on a step that is `finite` but not taken;
                otherwise the scaler lowers its scale needlessly.
            keep: sides ("retain", "forget") whose gradients `PairStep.kept` holds. One side costs
                no memory beyond its own; with both, g* takes memory of its own.
            losses_finite: 0-dim tensor or bool; where false, the step is skipped. Gradients do not
                show it: that of an infinite cross-entropy can be finite. A tensor is read together
                with the decision. With several processes it must cover the losses of all, equal on
                each.

        Returns:
            The `PairStep`.

        Raises:
            HamuError: if a side that the method needs is missing, stale (detected through
                `Tensor._version`, which fused optimizers and writes to `.data` do not raise) or
                overwritten by the other; if a frozen parameter has a gradient; or if the method's
                weights are not finite, or not one per block.
        """
        if self._inside:
            raise HamuError(
                f"combine() was called inside {self._inside}(); close the context first"
            )
        if isinstance(keep, str) or not set(keep) <= set(SIDES):
            raise HamuError(f"keep {keep!r} must be a collection of sides, such as ('retain',)")
        if keep and not self.can_keep:
            raise HamuError(
                "gradients can only be kept where each process has both of them whole; leave "
                "keep out"
            )
        grads = self._take()
        self.offload_grads.wait()
        retain, forget = self.layout.take(grads)
        _check_apart(retain, forget)
        scaled = scaler is not None and scaler.is_enabled()
        exact = not self.layout.is_whole  # all processes must decide alike
        raw = self.layout.total(self._meter.measure(retain, forget, exact=exact))
        unscale = None
        if scaler is not None and scaled:  # its `get_scale` would read from the device
            unscale = scaler.scale(raw.dot.new_ones(())).reciprocal()
        while True:
            gram = raw if unscale is None else raw.scaled(unscale, unscale)
            clip = gram.clip_factors(self.max_grad_norm)
            gram = gram.scaled(*clip)
            weights = self._weigh(gram)
            coarse = None if exact else raw
            read = self._read(gram, weights, clip, unscale, losses_finite, coarse)
            imprecise = self._meter.blocks_to_refine(read.precision, retain, forget, read.finite)
            if not imprecise:
                break
            exact = True
            raw = self.layout.total(self._meter.refined(raw, imprecise, retain, forget))
        decision, cause, reason = self._decide(read)
        kept = {side: list(grads[side]) for side in keep} if decision == "step" else {}
        if decision == "step":
            self._write(retain, forget, read.retain_weights, read.forget_weights, keep)
        elif scaled:
            self._spoil(self.layout.give(_either(retain, forget)))
        return PairStep(
            gram, weights, clip, decision, reason, kept, read.unscale, read.finite, cause
        )

    def state_dict(self) -> dict[str, Any]:
        """Memory of the stopping rule, and the settings it belongs to."""
        return {"settings": self._settings(), "stopping": self._memory.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`.

        Raises:
            HamuError: if it has other settings; the message names them.
        """
        ours, theirs = self._settings(), state["settings"]
        changes = [
            f"{key} {theirs.get(key)!r} (now {ours.get(key)!r})"
            for key in sorted(ours.keys() | theirs.keys())
            if ours.get(key) != theirs.get(key)
        ]
        if changes:
            raise HamuError(
                f"the state was saved with other settings: {', '.join(changes)}; resume with the "
                f"same"
            )
        self._memory.load_state_dict(state["stopping"])

    def _settings(self) -> dict[str, Any]:
        method = self.method
        own: dict[str, Any] = _plain(method) if is_dataclass(method) else {}
        digest = hashlib.sha256(repr((self.block_names, self.block_of)).encode()).hexdigest()
        return own | {
            "method": method.name,
            "stopping": asdict(method.stopping_rule),
            "max_grad_norm": self.max_grad_norm,
            "blocks": f"{len(self.block_names)} ({digest[:8]})",
        }

    def _no_grads(self) -> Grads:
        return [None] * len(self.parameters)

    def _set_grads(self, grads: Grads) -> None:
        for parameter, grad in zip(self.parameters, grads, strict=True):
            parameter.grad = grad

    def _spoil(self, grads: Grads) -> None:
        """Leave NaN in `.grad`, which a scaler skips."""
        for p, grad in zip(self.parameters, grads, strict=True):
            p.grad = None if grad is None else grad.to(p.device, p.dtype).fill_(math.nan)

    def _take(self) -> dict[str, Grads]:
        for name, parameter in self._frozen:  # would be stepped on the sum of both sides
            if parameter.grad is not None and parameter.requires_grad:
                raise HamuError(
                    f"{name} was frozen when PairedGradients was made, but has a gradient now: the "
                    f"sum of both sides; make the pair anew, or freeze it again and set its "
                    f"grad to None"
                )
        uses = {"retain": self.method.uses_retain, "forget": self.method.uses_forget}
        needed = {side for side, used in uses.items() if used and side in self.layout.sides}
        missing = [side for side in SIDES if side in needed - self._grads.keys()]
        if missing:
            raise HamuError(
                f"{self.method.name} needs a {' and a '.join(missing)} gradient for this step; run "
                f"backward inside {' and '.join(f'pair.{side}()' for side in missing)} before "
                f"combine()"
            )
        self._check_stale()
        grads: dict[str, Grads] = {s: self._grads.get(s, self._no_grads()) for s in SIDES}
        self.discard()
        if any(g is not None and g.is_sparse for side in SIDES for g in grads[side]):
            raise HamuError(
                "sparse gradients cannot be combined; build the embedding with sparse=False"
            )
        return grads

    def _check_stale(self) -> None:
        if [p._version for p in self.parameters] == self._versions:
            return
        sides = " and ".join(self._grads)
        self.discard()
        raise HamuError(
            f"the weights changed after the {sides} gradient was collected, so it is stale; call "
            f"combine() before optimizer.step(), or discard() to start the pair anew"
        )

    def _weigh(self, gram: PairGram) -> Weights:
        weights = self.method.weigh(gram)
        shapes = [tuple(getattr(side, "shape", ())) for side in (weights.retain, weights.forget)]
        if any(shape != tuple(gram.dot.shape) for shape in shapes):
            raise HamuError(
                f"{self.method.name} gave weights of shape {shapes[0]} and {shapes[1]}, not one "
                f"for each of {len(gram.dot)} blocks; a weight of the whole model is "
                f"weight.expand_as(gram.dot)"
            )
        return weights

    def _read(
        self,
        gram: PairGram,
        weights: Weights,
        clip: tuple[Tensor, Tensor],
        unscale: Tensor | None,
        losses_finite: Tensor | bool | None,
        coarse: PairGram | None,
    ) -> _Read:
        """Read everything in the one transfer of a step."""
        one = gram.dot.new_ones(())
        given = (one if t is None else torch.as_tensor(t).to(one) for t in (unscale, losses_finite))
        constraint, names = weights.constraint, _FIGURES if weights.constraint is not None else ()
        figures = [getattr(constraint, name) for name in names]
        parts = [
            torch.stack([gram.is_finite(), *given, *figures]),
            weights.retain * clip[0],
            weights.forget * clip[1],
            *([] if coarse is None else self._meter.precision_figures(coarse, gram.sin)),
        ]
        finite, scale, losses, *values = torch.cat(parts).tolist()
        a, blocks = len(figures), len(self.block_names)
        b, rest = a + blocks, a + 2 * blocks
        found = dict(zip(names, values[:a], strict=True))
        return _Read(
            finite == 1.0, scale, losses == 1.0, found, values[a:b], values[b:rest], values[rest:]
        )

    def _decide(self, read: _Read) -> tuple[Decision, Cause, str]:
        if not read.finite:
            return "skip", "not finite", "a gradient is not finite"
        if not read.losses_finite:
            return "skip", "not finite", "a loss is not finite"
        multiples = [*read.retain_weights, *read.forget_weights]
        if not all(map(math.isfinite, multiples)):
            raise HamuError(
                f"{self.method.name} gave a weight that is not finite, for gradients that are; "
                f"mend its weigh"
            )
        found = read.constraint
        if found and not found["feasible"] and self.method.on_infeasible != "clamp":
            why = _why_infeasible(found["demand"], found["max_demand"])
            return self.method.on_infeasible, "infeasible", why
        largest = max(map(abs, multiples))
        if largest > self._largest:
            why = f"a gradient would be multiplied by {largest:.4g}, beyond the range of float32"
            return "skip", "out of range", why
        if not found:
            return "step", "", ""
        clipped_demand, free_limit = found["clipped_demand"], found["free_limit"]
        headroom = free_limit / clipped_demand if clipped_demand > 0 else math.inf
        if self._memory.update(headroom, bool(found["conflict"])):
            is_free = bool(found["some_demand_is_free"])
            explained = self._memory.explain(found["demand"], clipped_demand, free_limit, is_free)
            return "stop", "criterion", f"the stopping criterion is met: {explained}"
        return "step", "", ""

    def _write(
        self, retain: Grads, forget: Grads, a: list[float], b: list[float], keep: Collection[str]
    ) -> None:
        """Leave g* in `.grad`; empties both lists on the way, so that used gradients are freed."""
        if "retain" in keep and "forget" not in keep:  # g* overwrites the side that comes first
            retain, forget, a, b = forget, retain, b, a
        if keep:  # where the first is None, g* takes the other's memory
            both = zip(retain, forget, strict=True)
            forget = [f.clone() if r is None and f is not None else f for r, f in both]
        if len(keep) > 1:
            retain = [None if r is None else r.clone() for r in retain]
        parts, blocks = self.layout.parts, self.layout.block_of
        sides = zip(parts, blocks, drained(retain), drained(forget), strict=True)
        combine = combined_with_offloaded if self.offload_grads.is_used else combined
        written = [combine(r, f, a[block], b[block], part) for part, block, r, f in sides]
        self._set_grads(self.layout.give(written))


def _plain(value: Any) -> Any:
    """Setting as JSON returns it; other objects as their name, or their repr without an address."""
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: _plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return getattr(value, "__qualname__", None) or re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def _why_infeasible(demand: float, max_demand: float) -> str:
    if not max_demand > 0:
        return (
            "the constraint cannot be met: the gradients allow no change at all of the constrained "
            "loss; one of them is zero where something is demanded"
        )
    return (
        f"the constraint {demand:.4g} cannot be met: the gradients allow at most {max_demand:.4g}; "
        f'lower it or use constraint_mode="relative"'
    )


def _check_apart(retain: Grads, forget: Grads) -> None:
    for r, f in zip(retain, forget, strict=True):
        if r is not None and f is not None and r.data_ptr() == f.data_ptr() != 0:
            raise HamuError(
                "the second side's gradient overwrote the first one's, as both lie in the same "
                "memory; with DistributedDataParallel leave gradient_as_bucket_view at False"
            )


def _either(retain: Grads, forget: Grads) -> Grads:
    return [r if r is not None else f for r, f in zip(retain, forget, strict=True)]
