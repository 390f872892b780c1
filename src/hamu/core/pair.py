"""Two backward passes, one combine: the loop-level interface.

In:  a model, a method, and the user's own losses and optimizer.
Out: after `combine`, `.grad` holds the equivalent gradient g* = a_i·g_r,i + b_i·g_f,i, which any optimizer may step on.

The first side's gradients are kept by pointer, and the combine writes into the retain side's own memory, unless a
stash, `keep` or split pairing asks otherwise. `combine` reads from the device once: the decision, the 2·L weights and a
loss scaler's scale come in a single transfer. (A second time only if large tensors turn out to be nearly collinear, or
their values to be very small or large, and have to be measured more exactly.)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hamu.core.blocks import Blocks, group_blocks, trainable_parameters
from hamu.core.combine import combined, combined_with_waiting
from hamu.core.distributed.layout import Layout, Replicated, drained, is_flattened, is_sharded
from hamu.core.gram import SIDES, PairGram, check_max_norm, combine_dtype
from hamu.core.gram_meter import GramMeter
from hamu.core.methods.base import Method, Weights
from hamu.core.methods.stopping import StoppingMemory
from hamu.core.offload import GradOffload
from hamu.core.pair_step import Cause, Decision, PairStep
from hamu.core.saved_settings import check_same_settings, plain_settings, short_digest
from hamu.errors import HamuError

_OF_CONSTRAINT = (
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
    """What a step is decided by, on the host.

    Attributes:
        finite: whether all values of both gradients are.
        unscale: what removes a scaler's scale, 1 without.
        losses_finite: what the caller says of the losses, True if nothing.
        constraint: figures of the method's constraint by name, empty for methods without.
        retain_weights, forget_weights: of the gradients before clipping, [L].
        precision: of the sums, if they were in float32; see `GramMeter.precision_figures`.
    """

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
        model: any module; its parameters that require a gradient now are the ones that take part.
        method: how to combine, e.g. `HamuQ()`; or any name's `build_method(name)`.
        blocks: what a block is: "tensor" (each parameter), "module" (the parameters of one module), "model" (all), or
            a function from a parameter's name to a key, equal keys making one block.
        stash: where one side's gradient waits while the other's is collected: "none", where it is; "cpu", in the
            host's memory; "bf16", where it is, in half the memory. Whenever it is put away each of its
            entries is then rounded by at most 2⁻⁸ of itself: once if each side is collected at a stretch, and
            g_r·g_f is off by at most 2⁻⁸ Σ|g_r,i g_f,i|; once a turn if the sides take turns. The step keeps its
            promise for the gradients so rounded.
        max_grad_norm: each side is clipped to this global norm before it is weighed (the paper: 1); None for no
            clipping. Leave other clipping off.

    Raises:
        HamuError: if the method is not a `Method`, blocks or stash is unknown, or max_grad_norm is not positive; if no
            parameter requires a gradient, or one that does is on the meta device or complex; if the model is wrapped in
            FSDP1, sharded in any other way than by fully_shard on one mesh, or sharded while a stash is asked for.
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
                f"{method!r} is not a Method; pass an instance, such as HamuQ() or build_method(name)"
            )
        if is_flattened(model):
            raise HamuError(
                "the model is wrapped in FullyShardedDataParallel, where each process sees its own piece alone; "
                "shard it with fully_shard (FSDP2)"
            )
        sharded = is_sharded(model)  # asked first: after it, no parameter is a gathered copy
        named = trainable_parameters(model)
        away = next((name for name, p in named if p.is_meta), None)
        if away is not None:
            raise HamuError(
                f"{away} is on the meta device (offloaded or never loaded); trainable parameters must be on a real "
                f"device"
            )
        imaginary = next((name for name, p in named if p.is_complex()), None)
        if imaginary is not None:
            raise HamuError(
                f"{imaginary} is complex; keep its real and imaginary part as two parameters, or freeze it"
            )
        check_max_norm(max_grad_norm)
        self.method = method
        self.max_grad_norm = max_grad_norm
        self.offload_grads = GradOffload(offload_grads)
        self.names = [name for name, _ in named]
        self.parameters = [p for _, p in named]
        self._outside = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
        self.block_names, self.block_of = group_blocks(self.names, blocks)
        if sharded:
            from hamu.core.distributed.layout_sharded import (
                Sharded,
            )  # loads what only sharded models need

            self.use(Sharded(self.parameters, self.block_of))
        else:
            self.use(Replicated(self.parameters, self.block_of))
        self._memory = StoppingMemory(method.stopping_rule)
        self._grads: dict[str, list[Tensor | None]] = {}
        self._versions: list[int] = []
        self._inside: str | None = None

    def use(self, layout: Layout) -> None:
        """Choose who holds which gradient, before the first step; without it, this process holds everything."""
        if self.offload_grads.is_used and not layout.is_whole:
            raise HamuError(
                f"stash {self.stash.name!r} needs both whole gradients in each process; leave it at none"
            )
        self.layout = layout
        self._meter = GramMeter(layout.parts, layout.block_of, len(self.block_names))
        self._largest = min(torch.finfo(combine_dtype(p)).max for p in layout.parts)

    @property
    def can_keep(self) -> bool:
        """Whether `combine` can keep gradients: both are here, as they were collected."""
        return self.layout.is_whole and not self.offload_grads.is_used

    @contextmanager
    def retain(self) -> Iterator[None]:
        """Collect the gradient of the retain loss: call backward inside, once or several times."""
        with self._collect("retain"):
            yield

    @contextmanager
    def forget(self) -> Iterator[None]:
        """Collect the gradient of the forget loss (the loss itself, not its negative); see `retain`."""
        with self._collect("forget"):
            yield

    @contextmanager
    def _collect(self, side: str) -> Iterator[None]:
        if self._inside:
            raise HamuError(
                f"{side}() was entered inside {self._inside}(); close the one before opening the other"
            )
        versions = [p._version for p in self.parameters]
        if not self._grads:
            self._versions = versions
        elif versions != self._versions:
            self._raise_stale()
        for other in self._grads.keys() - {side}:
            self._grads[other] = self.offload_grads.put(self._grads[other])
        kept = self.offload_grads.take(
            self._grads.pop(side, [None] * len(self.parameters)), self.parameters
        )
        for parameter, grad in zip(self.parameters, kept, strict=True):
            parameter.grad = grad
        self._inside = side
        try:
            yield
        except BaseException:
            self.discard()
            raise
        finally:
            self._inside = None
        collected = [p.grad for p in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        if all(grad is None for grad in collected):
            self.discard()
            raise HamuError(
                f"no gradient reached any trainable parameter inside {side}(); call backward() inside the context, on "
                f"a loss that depends on them"
            )
        self._grads[side] = collected

    def discard(self) -> None:
        """Forget what was collected since the last combine."""
        self._grads = {}
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def abandon(self, scaler: torch.amp.GradScaler | None = None) -> None:
        """Give up the step whose gradients were collected: an optimizer's step will change nothing.

        Args:
            scaler: the `GradScaler` that scaled the losses; see `combine`.
        """
        none: list[Tensor | None] = [None] * len(self.parameters)
        retain, forget = (self._grads.get(side, none) for side in SIDES)
        self.discard()
        if scaler is not None and scaler.is_enabled():
            self._spoil(_either(retain, forget))

    def _spoil(self, grads: list[Tensor | None]) -> None:
        """Leave NaN in `.grad`, at which a scaler passes over the step."""
        for parameter, grad in zip(self.parameters, grads, strict=True):
            parameter.grad = (
                None if grad is None else grad.to(parameter.device, parameter.dtype).fill_(math.nan)
            )

    @torch.no_grad()
    def combine(
        self,
        scaler: torch.amp.GradScaler | None = None,
        *,
        keep: Collection[str] = (),
        losses_finite: Tensor | bool | None = None,
    ) -> PairStep:
        """Weigh the two gradients and leave g* in `.grad`; both sides are used up.

        If the step must not be taken (a non-finite gradient or loss, an infeasible constraint, the stopping criterion),
        every `.grad` is None instead, so that an optimizer's step changes nothing, neither weights nor its state.

        Args:
            scaler: the `GradScaler` that scaled both losses. g* keeps its scale, for `scaler.step` to remove; a step
                that must not be taken leaves NaN instead of None, at which the scaler passes over the step. Leave out
                both `scaler.step` and `scaler.update` where the step is not taken though it is `finite`: the scale is
                not to blame for it, but would be lowered.
            keep: sides ("retain", "forget") whose gradients must survive, in `PairStep.kept`. One side costs no
                memory beyond its own; to keep both, g* takes memory of its own.
            losses_finite: 0-dim tensor or bool, whether the step's losses are; where not, the step is skipped. The
                gradients do not tell: that of an infinite cross-entropy can be finite. A tensor is read together with
                the decision. With several processes it has to be of the losses of all of them, the same in each.

        Returns:
            The `PairStep`.

        Raises:
            HamuError: if a side that the method needs is missing, was collected before the weights changed, or was
                overwritten by the other; if a parameter that does not take part has a gradient; or if the method gives
                weights that are not finite, or not one to a block. That weights changed is known by torch's count of a
                tensor's versions, which fused optimizers and writes to `.data` do not raise.
        """
        if self._inside:
            raise HamuError(
                f"combine() was called inside {self._inside}(); close the context first"
            )
        if isinstance(keep, str) or not set(keep) <= set(SIDES):
            raise HamuError(f"keep {keep!r} must be a collection of sides, such as ('retain',)")
        if keep and not self.can_keep:
            raise HamuError(
                "gradients can only be kept where each process has both of them whole; leave keep out"
            )
        self._check_outside()
        grads = self._take()
        self.offload_grads.wait()
        retain, forget = self.layout.take(grads)
        _check_apart(retain, forget)
        scaled = scaler is not None and scaler.is_enabled()
        exact = not self.layout.is_whole  # all processes must decide alike
        raw = self.layout.total(self._meter.measure(retain, forget, exact=exact))
        # a scaler's `get_scale` would read from the device
        unscale = (
            scaler.scale(raw.dot.new_ones(())).reciprocal()
            if scaler is not None and scaled
            else None
        )
        while True:
            gram = raw if unscale is None else raw.scaled(unscale, unscale)
            clip = gram.clip_factors(self.max_grad_norm)
            gram = gram.scaled(*clip)
            weights = self.method.weigh(gram)
            self._check_shapes(weights, gram)
            read = self._read(gram, weights, clip, unscale, losses_finite, None if exact else raw)
            imprecise = self._meter.blocks_to_refine(read.precision, retain, forget, read.finite)
            if not imprecise:
                break
            raw, exact = (
                self.layout.total(self._meter.refined(raw, imprecise, retain, forget)),
                True,
            )
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
        """What a resumed run needs: the stopping rule's memory, and the settings it belongs to."""
        return {"settings": self._settings(), "stopping": self._memory.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            HamuError: if it was saved with other settings; the message names them.
        """
        check_same_settings(self._settings(), state["settings"])
        self._memory.load_state_dict(state["stopping"])

    def _settings(self) -> dict[str, Any]:
        method = self.method
        own: dict[str, Any] = plain_settings(method) if is_dataclass(method) else {}
        return own | {
            "method": method.name,
            "stopping": asdict(method.stopping_rule),
            "max_grad_norm": self.max_grad_norm,
            "blocks": f"{len(self.block_names)} ({short_digest((self.block_names, self.block_of))})",
        }

    def _check_outside(self) -> None:
        """What was frozen when the pair was made belongs to neither side; it would be stepped on the sum of both."""
        for name, parameter in self._outside:
            if parameter.grad is not None and parameter.requires_grad:
                raise HamuError(
                    f"{name} was frozen when PairedGradients was made, but has a gradient now: the sum of both sides; "
                    f"make the pair anew, or freeze it again and set its grad to None"
                )

    def _take(self) -> dict[str, list[Tensor | None]]:
        uses = {"retain": self.method.uses_retain, "forget": self.method.uses_forget}
        needed = {side: used and side in self.layout.sides for side, used in uses.items()}
        missing = [side for side, used in needed.items() if used and side not in self._grads]
        if missing:
            raise HamuError(
                f"{self.method.name} needs a {' and a '.join(missing)} gradient for this step; run backward inside "
                f"{' and '.join(f'pair.{side}()' for side in missing)} before combine()"
            )
        if [p._version for p in self.parameters] != self._versions:
            self._raise_stale()
        none: list[Tensor | None] = [None] * len(self.parameters)
        grads = {side: self._grads.get(side, none) for side in needed}
        self.discard()
        for grad in (*grads["retain"], *grads["forget"]):
            if grad is not None and grad.is_sparse:
                raise HamuError(
                    "sparse gradients cannot be combined; build the embedding with sparse=False"
                )
        return grads

    def _raise_stale(self) -> None:
        sides = " and ".join(self._grads)
        self.discard()
        raise HamuError(
            f"the weights changed after the {sides} gradient was collected, so it is stale; call combine() before "
            f"optimizer.step(), or discard() to start the pair anew"
        )

    def _check_shapes(self, weights: Weights, gram: PairGram) -> None:
        """A weight that stands for several blocks would be read as that of the first."""
        shapes = [tuple(getattr(side, "shape", ())) for side in (weights.retain, weights.forget)]
        if any(shape != tuple(gram.dot.shape) for shape in shapes):
            raise HamuError(
                f"{self.method.name} gave weights of shape {shapes[0]} and {shapes[1]}, not one for each of "
                f"{len(gram.dot)} blocks; a weight of the whole model is weight.expand_as(gram.dot)"
            )

    def _read(
        self,
        gram: PairGram,
        weights: Weights,
        clip: tuple[Tensor, Tensor],
        unscale: Tensor | None,
        losses_finite: Tensor | bool | None,
        coarse: PairGram | None,
    ) -> _Read:
        """The one transfer of a step."""
        one = gram.dot.new_ones(())
        asked = (one if t is None else torch.as_tensor(t).to(one) for t in (unscale, losses_finite))
        told = [gram.is_finite(), *asked]
        constraint = weights.constraint
        figures = (
            [] if constraint is None else [getattr(constraint, name) for name in _OF_CONSTRAINT]
        )
        blocks = len(self.block_names)
        parts = [
            torch.stack([*told, *figures]),
            weights.retain * clip[0],
            weights.forget * clip[1],
            *([] if coarse is None else self._meter.precision_figures(coarse, gram.sin)),
        ]
        values = torch.cat(parts).tolist()
        finite, scale, losses = values[: len(told)]
        a = len(told) + len(figures)
        b, rest = a + blocks, a + 2 * blocks
        found = dict(zip(_OF_CONSTRAINT, values[len(told) : a], strict=False))
        return _Read(
            finite == 1.0, scale, losses == 1.0, found, values[a:b], values[b:rest], values[rest:]
        )

    def _decide(self, read: _Read) -> tuple[Decision, Cause, str]:
        """What to do, and if that is not the step why, as a word and in words."""
        if not read.finite:
            return "skip", "not finite", "a gradient is not finite"
        if not read.losses_finite:
            return "skip", "not finite", "a loss is not finite"
        multiples = [*read.retain_weights, *read.forget_weights]
        if not all(map(math.isfinite, multiples)):
            raise HamuError(
                f"{self.method.name} gave a weight that is not finite, for gradients that are; mend its weigh"
            )
        found = read.constraint
        if found and not found["feasible"] and self.method.on_infeasible != "clamp":
            return (
                self.method.on_infeasible,
                "infeasible",
                _why_infeasible(found["demand"], found["max_demand"]),
            )
        largest = max(map(abs, multiples))
        if largest > self._largest:
            why = f"a gradient would be multiplied by {largest:.4g}, which is beyond the range of float32"
            return "skip", "out of range", why
        if not found:
            return "step", "", ""
        clipped_demand, free_limit = found["clipped_demand"], found["free_limit"]
        if self._memory.update(
            free_limit / clipped_demand if clipped_demand > 0 else math.inf, bool(found["conflict"])
        ):
            is_free = bool(found["some_demand_is_free"])
            explained = self._memory.explain(found["demand"], clipped_demand, free_limit, is_free)
            return "stop", "criterion", f"the stopping criterion is met: {explained}"
        return "step", "", ""

    def _write(
        self,
        retain: list[Tensor | None],
        forget: list[Tensor | None],
        a: list[float],
        b: list[float],
        keep: Collection[str],
    ) -> None:
        """Leave g* in `.grad`. Both lists are emptied on the way, so that what is used up is freed."""
        if (
            "retain" in keep and "forget" not in keep
        ):  # g* is written into the memory of the side that comes first
            retain, forget, a, b = forget, retain, b, a
        if keep:  # where there is none, it takes the other's
            forget = [
                f.clone() if r is None and f is not None else f
                for r, f in zip(retain, forget, strict=True)
            ]
        if len(keep) > 1:
            retain = [None if r is None else r.clone() for r in retain]
        sides = zip(
            self.layout.parts, self.layout.block_of, drained(retain), drained(forget), strict=True
        )
        combine = combined_with_waiting if self.offload_grads.is_used else combined
        written = [combine(r, f, a[block], b[block], part) for part, block, r, f in sides]
        for parameter, grad in zip(self.parameters, self.layout.give(written), strict=True):
            parameter.grad = grad


def _why_infeasible(demand: float, max_demand: float) -> str:
    if not max_demand > 0:
        return (
            "the constraint cannot be met: the gradients allow no change at all of the loss that it is demanded of; "
            "one of them is zero where something is demanded"
        )
    return (
        f"the constraint {demand:.4g} cannot be met: the gradients allow at most {max_demand:.4g}; lower it or use "
        f'constraint_mode="relative"'
    )


def _check_apart(retain: list[Tensor | None], forget: list[Tensor | None]) -> None:
    """Gradients are kept by pointer, so what writes both sides into the same memory leaves only the second."""
    for r, f in zip(retain, forget, strict=True):
        if r is not None and f is not None and r.data_ptr() == f.data_ptr() != 0:
            raise HamuError(
                "the second side's gradient overwrote the first one's, as both lie in the same memory; with "
                "DistributedDataParallel leave gradient_as_bucket_view at False"
            )


def _either(retain: list[Tensor | None], forget: list[Tensor | None]) -> list[Tensor | None]:
    return [r if r is not None else f for r, f in zip(retain, forget, strict=True)]
