"""`PairedGradients`: two backward passes, one combine, in the user's own loop.

After `combine`, `.grad` holds the equivalent gradient g* = a_i·g_r,i + b_i·g_f,i for any optimizer.
Gradients are kept by pointer, and the combine writes into the retain side's memory, unless offload,
`keep` or split pairing asks otherwise. `combine` reads from the device once (twice if
near-collinear or extreme gradients of large tensors need sums in float64).
"""

import hashlib
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hamu.core.combine import back, combine_all, offloaded
from hamu.core.distributed import (
    DataParallelLayout,
    Grads,
    Layout,
    drained,
    is_sharded,
    world_size,
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
from hamu.core.methods.base import ConstraintStatus, Method, StoppingMemory, Weights
from hamu.core.plugins import naming
from hamu.core.population import Population, PopulationStatus, judged
from hamu.errors import HamuError, unknown

Decision = Literal["step", "skip", "stop"]
Cause = Literal["", "not finite", "infeasible", "out of range", "criterion"]
_OF_A_STOP = ("demand", "clipped_demand", "free_limit", "some_demand_is_free")
_OF_MEANS = ("half_life", "steps_per_pass")  # settings of the running means
_LARGEST_GAP = 1e-3  # between processes that have rounded otherwise, or lack a sum
OFFLOADS = ("none", "bf16", "cpu")


@dataclass(frozen=True)
class PairStep:
    """Result of one combine. Tensors are on the host, in float64, but for the kept gradients.

    A method with a `retain_decay` weighs its mean of retain gradients: that is the g_r of all but
    `kept`.

    Attributes:
        gram: Gram of the clipped gradients, [L].
        weights: the method's weights for the clipped gradients, [L], with its constraint's status.
        clip: 0-dim clipping factors of the retain and the forget gradient.
        decision: "step" if `.grad` holds g*; "skip" or "stop" if `.grad` is None, so that no
            optimizer moves, or with a `GradScaler` NaN, which its `step` leaves out.
        reason: for a skip or a stop, as a sentence; else empty.
        kept: by side, the gradients that `combine` kept, as collected: scaled by a `GradScaler`,
            not clipped.
        unscale: factor that removes that scale.
        finite: whether both gradients were finite; a `GradScaler` must hear of it if not.
        cause: the reason as a keyword.
        population: latest standing of the constraint for the expected gradients, by which the
            stopping criterion judges; None without `half_life`, and in the first steps.
        losses: [2], those given to `combine`; None without.
    """

    gram: PairGram
    weights: Weights
    clip: tuple[Tensor, Tensor]
    decision: Decision
    reason: str = ""
    kept: dict[str, list[Tensor | None]] = field(default_factory=dict)
    unscale: float = 1.0
    finite: bool = True
    cause: Cause = ""
    population: PopulationStatus | None = None
    losses: Tensor | None = None

    def __repr__(self) -> str:
        """Decision, gradients with weights, predicted changes, in three lines; nothing clipped."""
        a, b = self.weights.retain, self.weights.forget
        changes = (one / clip for one, clip in zip(self._changes, self.clip, strict=True))
        figures = (*self.gradient_norms, self.cos, a.min(), a.max(), b.min(), b.max(), *changes)
        retain, forget, cos, a0, a1, b0, b1, of_retain, of_forget = torch.stack(figures).tolist()
        return (
            f"PairStep: {self.decision}{self.reason and f', {self.reason}'}\n"
            f"  ‖g_r‖ {retain:.4g}, ‖g_f‖ {forget:.4g}, cosθ {cos:+.4f}; "
            f"weights in {len(a):,} blocks: retain {a0:.4g} to {a1:.4g}, forget {b0:.4g} "
            f"to {b1:.4g}\n"
            f"  predicted per unit of learning rate: retain loss {of_retain:+.4g}, "
            f"forget loss {of_forget:+.4g}"
        )

    @property
    def should_stop(self) -> bool:
        """True if the run should end before this step."""
        return self.decision == "stop"

    @cached_property
    def _whole(self) -> PairGram:
        return self.gram.total()

    @cached_property
    def _changes(self) -> tuple[Tensor, Tensor]:
        return self.gram.changes(self.weights.retain, self.weights.forget)

    @property
    def kappa(self) -> Tensor:
        """κ = g_r·g_f over the whole model, 0-dim (Theorem 4.1)."""
        return self._whole.dot[0]

    @property
    def cos(self) -> Tensor:
        """cosθ between the whole model's gradients, 0-dim."""
        return self._whole.cos[0]

    @property
    def gradient_norms(self) -> tuple[Tensor, Tensor]:
        """‖g_r‖ and ‖g_f‖ of the whole model before clipping, 0-dim."""
        whole = self._whole
        return whole.retain_norm[0] / self.clip[0], whole.forget_norm[0] / self.clip[1]

    @property
    def combined_sq(self) -> Tensor:
        """‖g*_i‖² of each block, [L]: from the Gram, without a pass over the gradients."""
        gram, a, b = self.gram, self.weights.retain, self.weights.forget
        return (a * a * gram.retain_sq + 2 * a * b * gram.dot + b * b * gram.forget_sq).clamp(min=0)

    @property
    def promised_retain_change(self) -> Tensor:
        """First-order change of the clipped retain objective, g_r·Δw/η = F_r*/η, 0-dim."""
        return self._changes[0]

    @property
    def promised_forget_change(self) -> Tensor:
        """First-order change of the clipped forget objective, g_f·Δw/η, 0-dim."""
        return self._changes[1]

    @property
    def direct_share(self) -> Tensor | None:
        """Share of blocks on the direct branch, 0-dim; None for methods without branches."""
        constraint = self.weights.constraint
        return None if constraint is None else constraint.direct.double().mean()

    @property
    def regime(self) -> Tensor | None:
        """Whole model's regime (Fig. 1), 0-dim, see `regime_at`; None without a constraint."""
        constraint = self.weights.constraint
        return None if constraint is None else constraint.regime


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
        model: any module; the parameters that require a gradient now take part. The others'
            `.grad`, of training before, is cleared: an optimizer would step on it.
        method: the rule of combination, such as `HamuQ()` or `build_method(name)`.
        blocks: "tensor" (one block per parameter), "module" (per module), "model" (one), or a
            function from a parameter's name to a key; parameters with equal keys form one block.
        offload_grads: place of one side's gradient during the other's pass: "none", unchanged;
            "cpu", in host memory; "bf16", on the device in half the memory. Each turn of a side
            then rounds the other's entries by at most 2⁻⁸ of themselves; the step keeps its promise
            for the rounded gradients.
        max_grad_norm: global norm to which each side is clipped before weighing (the paper: 1);
            None for no clipping. Leave other clipping off.
        half_life: steps after which a step counts half in the running means of the stopping
            criterion, such as 2,560 over the number of records in a batch; None to judge each step
            by its own batches, whose noise enlarges the headroom. Without a criterion it has no
            effect.
        steps_per_pass: for these means, the full steps in which the retain and the forget side are
            read once, such as records over batch size of loaders that shuffle; None if batches are
            drawn independently of each other.

    Raises:
        HamuError: if an argument is out of range; if no parameter requires a gradient, or one that
            does is on the meta device or complex; if the model is wrapped by FSDP1, or by
            DistributedDataParallel with gradient_as_bucket_view, sharded otherwise than by
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
        half_life: float | None = None,
        steps_per_pass: tuple[float, float] | None = None,
    ) -> None:
        if half_life is not None and not 1 <= half_life < math.inf:
            raise HamuError(f"half_life {half_life} must be a number of steps from 1 on, or None")
        passes = steps_per_pass or (math.inf, math.inf)
        is_pair = isinstance(passes, Sequence) and len(passes) == 2
        if not (is_pair and all(steps >= 1 for steps in passes)):
            raise HamuError(f"steps_per_pass {passes} must be two numbers from 1 on, or None")
        if offload_grads not in OFFLOADS:
            raise unknown("offload_grads", offload_grads, OFFLOADS)
        _check_fit(model, method)
        sharded = is_sharded(model)  # gathers nothing; must precede named_parameters
        named = trainable_parameters(model)
        for name, parameter in named:
            if parameter.is_meta or parameter.is_complex():
                raise HamuError(
                    f"{name} is complex or on the meta device (offloaded or never loaded); freeze "
                    f"it, or make it real numbers on a real device"
                )
        check_max_norm(max_grad_norm)
        self.method, self._model = method, model
        self.half_life = None if method.stopping_rule.criterion == "off" else half_life
        self.max_grad_norm, self.offload_grads = max_grad_norm, offload_grads
        self.steps_per_pass = list(passes)
        self.names, self.parameters = [name for name, _ in named], [p for _, p in named]
        for frozen in (p for p in model.parameters() if not p.requires_grad):
            frozen.grad = None
        self.block_names, self.block_of = group_blocks(self.names, blocks)
        layout: Callable[..., Layout] = Layout
        if sharded:
            from hamu.core.distributed.sharded import Sharded as layout  # noqa: N813 loads FSDP2
        elif world_size() > 1 and any(one.process_group.size() > 1 for one in _wrappers(model)):
            layout = DataParallelLayout
        self.use(layout(self.parameters, self.block_of))
        self.layout.is_checked = True
        self._grads: dict[str, Grads] = {}
        self._versions: list[int] = []
        self._inside: str | None = None

    def use(self, layout: Layout) -> None:
        """Choose the layout of both gradients, before a run's first step: no memory is kept."""
        is_offloaded = self.offload_grads != "none"
        if self.method.retain_decay and (is_offloaded or not layout.is_whole):
            raise HamuError(
                f"{self.method.name} keeps a third gradient and needs both others whole in each "
                f"process; leave out offload_grads, sharding and split pairing"
            )
        for name, given in (("half_life", self.half_life), ("offload_grads", is_offloaded)):
            if given and not layout.is_whole:
                raise HamuError(f"{name} needs both whole gradients in each process; leave it out")
        self.layout = layout
        self._memory = StoppingMemory(self.method.stopping_rule)
        self._numbers = torch.tensor(self.method.first_memory)  # memory of the method
        self._mean = self._no_grads()  # of the retain gradient, for a method with a `retain_decay`
        self._population: Population | None = None
        if self.half_life is not None:
            sizes = len(self.block_names), self.half_life, self.steps_per_pass
            self._population = Population(layout.parts, layout.block_of, *sizes)
        self._measure_here()

    def _measure_here(self) -> None:
        layout = self.layout
        self._meter = GramMeter(layout.parts, layout.block_of, len(self.block_names))
        self._largest = min(torch.finfo(combine_dtype(p)).max for p in layout.parts)
        self._mean = back(self._mean, self.parameters)
        if self._population is not None:
            self._population.to(self._meter.device)

    @property
    def can_keep(self) -> bool:
        """True if `combine` can keep gradients: both are here, whole."""
        return self.layout.is_whole and self.offload_grads == "none"

    def retain(self) -> AbstractContextManager[None]:
        """Collect the gradient of the retain loss: call backward inside, once or several times."""
        return self._collect("retain")

    def forget(self) -> AbstractContextManager[None]:
        """Collect the gradient of the forget loss (the loss itself, not its negative)."""
        return self._collect("forget")

    @contextmanager
    def _collect(self, side: str) -> Iterator[None]:
        if self._inside:
            raise HamuError(f"{side}() was entered inside {self._inside}(); close that one first")
        if not self._grads:
            self._versions = [p._version for p in self.parameters]
        self._check_stale()
        kept = self._grads.pop(side, self._no_grads())
        if self.offload_grads != "none":
            for other, grads in self._grads.items():
                self._grads[other] = offloaded(grads, self.offload_grads)
        self._set_grads(back(kept, self.parameters))
        self._inside = side
        try:
            yield
        except BaseException:
            self.discard()
            raise
        finally:
            self._inside = None
        collected = [p.grad for p in self.parameters]
        self._set_grads()
        if all(grad is None for grad in collected):
            self.discard()
            raise HamuError(
                f"no gradient reached any trainable parameter inside {side}(); call backward() "
                f"inside the context, on a loss that depends on them (as they were when the pair "
                f"was made), and with fully_shard leave its synchronisation on for the last "
                f"backward() of each context"
            )
        self._grads[side] = collected

    def discard(self) -> None:
        """Drop both gradients collected since the last combine."""
        self._grads = {}
        self._set_grads()

    @torch.no_grad()
    def abandon(self, scaler: torch.amp.GradScaler | None = None) -> None:
        """Give up the collected step: the optimizer's step will change nothing, as after a skip."""
        sides = [self._grads.get(side, self._no_grads()) for side in SIDES]
        self.discard()
        if scaler is not None and scaler.is_enabled():
            self._spoil(_either(*sides))

    @torch.no_grad()
    def combine(
        self,
        scaler: torch.amp.GradScaler | None = None,
        *,
        keep: Collection[str] = (),
        losses: Tensor | None = None,
        share: float = 1.0,
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
            losses: [2], retain and forget loss of the step. Where one is not finite, the step is
                skipped: gradients do not show it, as that of an infinite cross-entropy can be
                finite. Read together with the decision. With several processes they must cover the
                losses of all, equal on each.
            share: records of this step over those of a full one, for the running means.

        Raises:
            HamuError: if a side that the method needs is missing, stale (detected through
                `Tensor._version`, which fused optimizers and writes to `.data` do not raise) or
                overwritten by the other; if a frozen parameter has a gradient; or if the method's
                weights are not finite, or not one per block.
        """
        if self._inside:
            raise HamuError(f"combine() was called inside {self._inside}(); close it first")
        if isinstance(keep, str) or not set(keep) <= set(SIDES):
            raise HamuError(f"keep {keep!r} must be a collection of sides, such as ('retain',)")
        if keep and not self.can_keep:
            raise HamuError(
                "keep, as for a StepGuard, needs both whole gradients in each process; leave out "
                "the guard, or offload_grads, sharding and split pairing"
            )
        is_scaled = scaler is not None and scaler.is_enabled()
        self._check_given(losses, is_scaled)
        grads = self._take()
        if not self._meter.fits(self.layout.parts):  # the model has moved
            self._measure_here()
        retain, forget = self.layout.take(grads)
        _set_apart(retain, forget)
        kept: dict[str, Grads] = {side: list(grads[side]) for side in keep}
        if self.method.retain_decay:
            if "retain" in keep:
                kept["retain"] = [None if g is None else g.clone() for g in retain]
            keep = {*keep} - {"retain"}
            self._average(retain)
        unscale = None
        if scaler is not None and is_scaled:  # its `get_scale` would read from the device
            one = torch.ones((), dtype=torch.float64, device=self._meter.device)
            unscale = scaler.scale(one).reciprocal()
        gram, weights, clip, read = self._weighed(retain, forget, unscale, losses, share)
        # of the gradients before clipping
        a, b = (weights.retain * clip[0]).tolist(), (weights.forget * clip[1]).tolist()
        decision, cause, reason = self._decide(gram, weights.constraint, [*a, *b], read)
        if decision == "step":
            if weights.memory is not None:
                self._numbers = weights.memory
            if self.method.retain_decay:
                both = zip(retain, drained(self._mean), strict=True)
                self._mean = [mean if g is None else g.clone() for g, mean in both]
            self._write(retain, forget, a, b, keep)
        elif unscale is not None:
            self._spoil(self.layout.give(_either(retain, forget)))
        kept = kept if decision == "step" else {}
        told = (decision, reason, kept, read["unscale"].item(), bool(gram.is_finite()), cause)
        population = None if self._population is None else self._population.status
        return PairStep(gram, weights, clip, *told, population, read.get("losses"))

    def state_dict(self) -> dict[str, Any]:
        """Memory of the stopping rule and of the method, and the settings they belong to.

        Plain numbers, but for tensors by name: "population" with a `half_life`, "mean" of a method
        with a `retain_decay`.
        """
        state: dict[str, Any] = {"settings": self._settings()}
        state["stopping"] = self._memory.state_dict()
        if self.method.first_memory:
            state["memory"] = self._numbers.tolist()
        if self.method.retain_decay:
            both = zip(self.names, self._mean, strict=True)
            state["mean"] = {name: mean for name, mean in both if mean is not None}
        if self._population is not None:
            state["population"] = self._population.state_dict()
            state |= {name: getattr(self, name) for name in _OF_MEANS}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`; a HamuError names settings in which it differs.

        Running means begin anew from a state without, and end in a pair without a `half_life`.
        """
        if "settings" not in state:
            keys = ", ".join(map(str, [*state][:5])) or "nothing"
            raise HamuError(f"the state has {keys}; give what a pair's state_dict() returned")
        ours, theirs = self._settings(), {**state["settings"]}
        population = self._population if state.get("population") else None  # else another layout
        if population is not None:
            ours |= {name: getattr(self, name) for name in _OF_MEANS}
            theirs |= {name: state.get(name) for name in _OF_MEANS}
        changes = [
            f"{key} {theirs.get(key)} (now {ours.get(key)})"
            for key in sorted(ours.keys() | theirs.keys())
            if ours.get(key) != theirs.get(key)
        ]
        if changes:
            raise HamuError(f"the state was saved with other settings: {', '.join(changes)}")
        self._memory.load_state_dict(state["stopping"])
        if "memory" in state:
            self._numbers = torch.tensor(state["memory"], dtype=torch.float64)
        if population is not None:
            population.load_state_dict(state["population"])
        mean, both = state.get("mean", {}), zip(self.names, self.parameters, strict=True)
        self._mean = [mean[n].to(p.device, copy=True) if n in mean else None for n, p in both]

    def _settings(self) -> dict[str, Any]:
        method = self.method
        own: Any = fields(method) if is_dataclass(method) else ()
        shapes = [tuple(p.shape) for p in self.parameters]
        parts = self.names, shapes, self.block_names, self.block_of
        digest = hashlib.sha256(repr(parts).encode()).hexdigest()
        settings = {one.name: getattr(method, one.name) for one in own} | {
            "method": method.name,
            "stopping": method.stopping_rule,
            "max_grad_norm": self.max_grad_norm,
            "blocks": f"{len(self.block_names)} ({digest[:8]})",
        }
        return {key: _as_text(value) for key, value in settings.items()}

    def _no_grads(self) -> Grads:
        return [None] * len(self.parameters)

    def _set_grads(self, grads: Grads | None = None) -> None:
        for parameter, grad in zip(self.parameters, grads or self._no_grads(), strict=True):
            parameter.grad = grad

    def _spoil(self, grads: Grads) -> None:
        """Leave NaN in `.grad`, which a scaler skips."""
        for p, grad in zip(self.parameters, grads, strict=True):
            p.grad = None if grad is None else grad.to(p.device, p.dtype).fill_(math.nan)

    def _check_given(self, losses: Tensor | None, is_scaled: bool) -> None:
        """Check what a step is given, while both gradients are still there."""
        method = self.method
        if losses is None and method.first_memory:
            raise HamuError(f"{method.name} needs the losses of the step; give combine(losses=...)")
        if losses is not None and (not isinstance(losses, Tensor) or losses.shape != (2,)):
            raise HamuError(
                f"losses {losses} must be a tensor of two, the retain and the forget loss"
            )
        if is_scaled and method.retain_decay:
            raise HamuError(
                f"{method.name} averages gradients, which a GradScaler rescales; leave the scaler "
                f"out, as bfloat16 needs none"
            )

    def _take(self) -> dict[str, Grads]:
        uses = {"retain": self.method.uses_retain, "forget": self.method.uses_forget}
        missing = [s for s in self.layout.sides if uses[s] and s not in self._grads]
        if missing:
            raise HamuError(
                f"{self.method.name} needs a {' and a '.join(missing)} gradient for this step; run "
                f"backward inside {' and '.join(f'pair.{side}()' for side in missing)} before "
                f"combine()"
            )
        self._check_stale()
        grads: dict[str, Grads] = {s: self._grads.get(s, self._no_grads()) for s in SIDES}
        self._check_others()
        self.discard()
        if any(g is not None and g.is_sparse for side in SIDES for g in grads[side]):
            raise HamuError("a gradient is sparse; build the embedding with sparse=False")
        return grads

    def _check_others(self) -> None:
        """Check that the optimizer finds no other gradient: it would be the sum of both sides."""
        known = set(map(id, self.parameters))
        for name, parameter in self._model.named_parameters():
            is_other = id(parameter) not in known  # frozen before, replaced or added since
            if is_other and parameter.grad is not None and parameter.requires_grad:
                raise HamuError(
                    f"{name} was frozen or not in the model when PairedGradients was made, but has "
                    f"a gradient now; make the pair anew, or freeze it and set its grad to None"
                )

    def _check_stale(self) -> None:
        if [p._version for p in self.parameters] == self._versions:
            return
        sides = " and ".join(self._grads)
        self.discard()
        raise HamuError(
            f"the weights changed after the {sides} gradient was collected, so it is stale; call "
            f"combine() before optimizer.step(), or discard() to start the pair anew; a layer that "
            f"writes its weight in its forward pass, as Embedding(max_norm=...), must be frozen"
        )

    def _weighed(
        self,
        retain: Grads,
        forget: Grads,
        unscale: Tensor | None,
        losses: Tensor | None,
        share: float,
    ) -> tuple[PairGram, Weights, tuple[Tensor, Tensor], dict[str, Tensor]]:
        """Clipped Gram, weights and clipping factors, and what the host has read."""
        # Several processes must ask alike for the second read; Triton can fail on one alone.
        exact = not self.layout.is_whole or (self._meter.device.type == "cuda" and world_size() > 1)
        raw = self.layout.total(self._meter.measure(retain, forget, exact=exact))
        sent: dict[str, Tensor | None] = {**raw.sums(), "unscale": unscale, "losses": losses}
        sent["gap"] = self.layout.gap
        if self._population is not None:
            if self.offload_grads == "cpu":  # it reads there what may yet be under way
                for device in {p.device for p in self.parameters if p.device.type != "cpu"}:
                    torch.accelerator.current_stream(device).synchronize()
            self._population.add(retain, forget, raw, unscale, share)
            if self._population.is_due:
                sent |= self._population.sums(self.layout.agree)
        found = on_host(sent)
        if found.get("gap", 0.0) > _LARGEST_GAP:
            raise HamuError(
                "the processes have different gradients, as DistributedDataParallel sums up one "
                "backward pass after each forward pass; call the model and backward() for one side "
                "before the model is called for the other"
            )
        gram = raw.like(found)
        if not self._meter.is_exact and (doubtful := self._meter.doubtful(gram, retain, forget)):
            raw = self.layout.total(self._meter.refined(raw, doubtful, retain, forget))
            gram = raw.like(on_host(raw.sums()))
        if self.method.first_memory:
            memory = self._numbers.to(gram.dot)
            gram = replace(gram, losses=found.get("losses"), memory=memory)
        scale = found.setdefault("unscale", gram.dot.new_ones(()))
        gram = gram if unscale is None else gram.scaled(scale, scale)
        clip = gram.clip_factors(self.max_grad_norm)
        gram = gram.scaled(*clip)
        with naming("method", self.method):
            weights = self.method.weigh(gram)
        sides = (getattr(weights, side, None) for side in SIDES)
        shapes = {getattr(side, "shape", None) for side in sides}
        if shapes != {gram.dot.shape}:
            raise HamuError(
                f"{self.method.name} gave no Weights with one for each of {len(gram.dot)} blocks; "
                f"a weight of the whole model is weight.expand_as(gram.dot)"
            )
        of_kind = {"constraint": self.method.constrained, "memory": self.method.first_memory}
        for name, is_due in of_kind.items():
            if is_due and getattr(weights, name) is None:
                raise HamuError(f"{self.method.name} gave Weights without {name}; let weigh set it")
        return gram, weights, clip, found

    def _average(self, retain: Grads) -> None:
        """Put the running mean of the retain gradient in its place, not yet in memory."""
        decay = self.method.retain_decay
        for number, (grad, mean) in enumerate(zip(retain, self._mean, strict=True)):
            if grad is not None:
                grad.mul_(1.0 - decay)
                if mean is not None:
                    grad.add_(mean, alpha=decay)
            elif mean is not None:
                retain[number] = mean * decay

    def _decide(
        self,
        gram: PairGram,
        status: ConstraintStatus | None,
        multiples: list[float],
        read: dict[str, Tensor],
    ) -> tuple[Decision, Cause, str]:
        if not gram.is_finite():
            return "skip", "not finite", "a gradient is not finite"
        if "losses" in read and not read["losses"].isfinite().all():
            return "skip", "not finite", "a loss is not finite"
        if not all(map(math.isfinite, multiples)):
            raise HamuError(f"{self.method.name} gave a weight that is not finite; mend its weigh")
        if status is not None and not status.feasible and self.method.on_infeasible != "clamp":
            demand, most = status.demand.item(), status.max_demand.item()
            why = (
                f"the constraint {demand:.4g} cannot be met: the gradients allow at most "
                f"{most:.4g}; lower it or use constraint_mode relative"
                if most > 0
                else "the constraint cannot be met: a gradient it needs is zero in each block, or "
                "in one with a share of the demand"
            )
            return self.method.on_infeasible, "infeasible", why
        largest = max(map(abs, multiples))
        if largest > self._largest:
            why = f"a gradient would be multiplied by {largest:.4g}, beyond the range of float32"
            return "skip", "out of range", why
        if status is not None and (explained := self._criterion(status, read)):
            return "stop", "criterion", f"the stopping criterion is met: {explained}"
        return "step", "", ""

    def _criterion(self, status: ConstraintStatus, read: dict[str, Tensor]) -> str:
        """Explanation of a stop by the criterion; empty if it is not met."""
        if (rule := self.method.stopping_rule) != self._memory.rule:  # of a method set since
            self._memory = StoppingMemory(rule)
        if self._population is None:
            if not self._memory.update(status.headroom, bool(status.conflict)):
                return ""
            return self._memory.explain(*(getattr(status, name).item() for name in _OF_A_STOP))
        memory = status.gram.memory
        found = self._population.judge(read, self.method, self.max_grad_norm, memory)
        if found is None:  # no new estimate
            return ""
        if not self._memory.update(judged(found.headroom, found.error), found.conflict):
            return ""
        explained = self._memory.explain(*(getattr(found, name) for name in _OF_A_STOP))
        sure = found.confidence(self._memory.rule.margin)
        lost = ", whose angle is lost in noise" * math.isnan(found.cos)
        return f"{explained}; confidence {sure:.0%} by this estimate alone{lost}"

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
        blocks, parts = self.layout.block_of, self.layout.parts
        weights = [a[block] for block in blocks], [b[block] for block in blocks]
        tables = self._meter.tables
        written = combine_all(retain, forget, *weights, parts, is_kept=bool(keep), tables=tables)
        self._set_grads(self.layout.give(written))


def _check_fit(model: nn.Module, method: Method) -> None:
    if not isinstance(model, nn.Module):
        raise HamuError(f"a {type(model).__name__} is no module; pass the model itself")
    if not isinstance(method, Method):
        raise HamuError(f"{method!r} is not a Method; pass an instance, such as HamuQ()")
    if not isinstance(getattr(method, "name", None), str):
        raise HamuError(f"the class {type(method).__name__} has no name; give it one")
    if any(getattr(p, "_fsdp_flattened", False) for p in model.parameters()):
        raise HamuError(
            "the model is wrapped in FullyShardedDataParallel; use fully_shard (FSDP2) instead"
        )
    has_both = method.uses_retain and method.uses_forget
    if has_both and any(one.gradient_as_bucket_view for one in _wrappers(model)):
        raise HamuError(
            "both gradients would lie in the buckets of DistributedDataParallel, where the second "
            "overwrites the first; leave gradient_as_bucket_view at False"
        )


def _wrappers(model: nn.Module) -> list[DistributedDataParallel]:
    return [one for one in model.modules() if isinstance(one, DistributedDataParallel)]


def _as_text(setting: Any) -> str:
    """A setting as a state holds it; equal numbers alike, such as 1 and 1.0."""
    is_number = isinstance(setting, Real) and not isinstance(setting, bool)
    return re.sub(" at 0x[0-9a-f]+", "", repr(float(setting) if is_number else setting))


def on_host(figures: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Those that are there, in float64, in one transfer."""
    there = {name: t for name, t in figures.items() if t is not None}
    device = next(iter(there.values())).device
    flat = [t.detach().to(device, torch.float64).reshape(-1) for t in there.values()]
    parts = torch.split(torch.cat(flat).cpu(), [len(one) for one in flat])
    return {name: part.view(t.shape) for (name, t), part in zip(there.items(), parts, strict=True)}


def _set_apart(retain: Grads, forget: Grads) -> None:
    """Give each gradient memory of its own, for g* is written there; refuse one of both sides.

    torch.compile lets parameters of different shapes that are added up share one gradient's.
    """
    sides: tuple[list[Any], list[Any]] = retain, forget
    addresses = [[0 if g is None else g.data_ptr() for g in side] for side in sides]
    if any(r == f != 0 for r, f in zip(*addresses, strict=True)):
        raise HamuError(
            "the second side's gradient overwrote the first one's, as both lie in the same "
            "memory; with DistributedDataParallel leave gradient_as_bucket_view at False"
        )
    for grads, own in zip(sides, addresses, strict=True):
        if len({*own} - {0}) < len(own) - own.count(0):
            last = {address: number for number, address in enumerate(own)}
            for number in [n for n, address in enumerate(own) if address and last[address] != n]:
                grads[number] = grads[number].clone()


def _either(retain: Grads, forget: Grads) -> Grads:
    return [r if r is not None else f for r, f in zip(retain, forget, strict=True)]
