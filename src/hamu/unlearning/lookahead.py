"""Look ahead: the weights to which fine-tuning would lead from where the model is.

A point runs ahead of the model's weights w on a path of ordinary fine-tuning (Adam) that starts at
w: on retain records, and every other time on retain records with some forgotten ones among them.
With each step of the model the point takes one or two steps of its own, and it moves along with w.
After `depth` steps it starts again at w. Lasting unlearning takes the forget gradient there: what
counts is not what the model has lost, but what it does not find again.

To first order (Nichol et al. 2018): the gradient that is found ahead is applied at w.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hamu.core.forward import evaluating, restored
from hamu.errors import HamuError

Batch = Mapping[str, Tensor]
_TWO_STEPS_FROM = 64  # records in a retain batch, from where on it is worth two steps ahead
_FEW = 0.2  # forgotten records in a step ahead, as a share of its retain records


class Lookahead:
    """The point ahead of a model's weights, for the parameters that are trained.

    Args:
        loss: the mean cross-entropy of some rows of a batch under the model as it is.
        rate: learning rate of the steps ahead.
        depth: steps from one start at w to the next.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        loss: Callable[[Batch, slice], Tensor],
        *,
        rate: float,
        depth: int,
    ) -> None:
        self._model, self._loss = model, loss
        self._parameters: list[Tensor] = [*parameters]
        self.rate, self.depth = float(rate), depth
        # steps since the last start, and starts: in odd cycles forgotten records are relearned too
        self.taken, self.cycles = depth, -1  # the first step starts a cycle
        self._point: list[Tensor] = [nn.Parameter(p.detach().clone()) for p in self._parameters]
        self._offset = [torch.zeros_like(p) for p in self._parameters]
        self._optimizer = torch.optim.Adam(self._point, lr=rate)

    @property
    def relearns_forgotten(self) -> bool:
        """True if forgotten records are among those of this cycle."""
        return self.cycles % 2 == 1

    @property
    def at_the_end_of_a_retain_cycle(self) -> bool:
        """True if the point is as far ahead as it gets, on retain records alone."""
        return self.taken >= self.depth and self.cycles >= 0 and not self.relearns_forgotten

    def restart(self) -> None:
        """Let the next step start a cycle on retain records alone."""
        self.taken = self.depth
        self.cycles -= self.cycles % 2 == 0
        self._optimizer.zero_grad()  # of a step that was broken off

    def advance(self, batches: Sequence[tuple[Batch, Batch]]) -> None:
        """Take a step or two from the model's weights plus the path, on the step's own batches.

        Args:
            batches: retain and forget records; several pairs where gradients accumulate.
        """
        with torch.no_grad():
            if self.taken >= self.depth:
                self.taken, self.cycles = 0, self.cycles + 1
                torch._foreach_zero_(self._offset)
                self._optimizer = torch.optim.Adam(self._point, lr=self.rate)
            torch._foreach_copy_(self._point, self._parameters)
            torch._foreach_add_(self._point, self._offset)
        records = sum(len(retain["labels"]) for retain, _ in batches)
        parts = [(retain, slice(None), forget) for retain, forget in batches]
        if records >= _TWO_STEPS_FROM and self.taken + 2 <= self.depth:
            if len(batches) == 1:
                half = -(-records // 2)
                ((retain, forget),) = batches
                parts = [(retain, rows, forget) for rows in (slice(half), slice(half, None))]
            middle = -(-len(parts) // 2)
            self._step(parts[:middle])
            parts = parts[middle:]
        self._step(parts)
        with torch.no_grad():
            torch._foreach_copy_(self._offset, self._point)
            torch._foreach_sub_(self._offset, self._parameters)

    def _step(self, parts: Sequence[tuple[Batch, slice, Batch]]) -> None:
        """Take a step on these rows of retain batches, and a few first ones of forget batches."""
        counts = [len(retain["labels"][rows]) for retain, rows, _ in parts]
        few = max(1, int(_FEW * sum(counts))) if self.relearns_forgotten else 0
        relearned: list[int] = []
        for _, _, forget in parts:
            relearned.append(min(few - sum(relearned), len(forget["labels"])))
        every = sum(counts) + sum(relearned)

        def loss_of(retain: Batch, rows: slice, forget: Batch, n: int, m: int) -> Tensor:
            loss = n / every * self._loss(retain, rows)
            return loss + m / every * self._loss(forget, slice(m)) if m else loss

        self.taken += 1
        for part, n, m in zip(parts, counts, relearned, strict=True):
            with self.ahead():
                loss = loss_of(*part, n, m)
                if bool(torch.isfinite(loss)):
                    self._add_gradient(self._point, loss)
                    continue
            self._optimizer.zero_grad()
            with torch.no_grad():
                if not bool(torch.isfinite(loss_of(*part, n, m))):
                    return  # nor is it finite here: the batch takes no step ahead
            raise HamuError(
                f"the loss of a step ahead is {loss.item()}; lower --lookahead_rate "
                f"{self.rate:g} or --lookahead_steps {self.depth}"
            )
        self._optimizer.step()
        self._optimizer.zero_grad()

    @contextmanager
    def rehearsed(self, batches: Iterable[Batch]) -> Iterator[None]:
        """Fine-tune a copy of the weights on these batches: a rehearsal of an attack.

        Inside, the model has the copy's weights; afterwards its own, its buffers and its modes.
        """
        copies = [nn.Parameter(p.detach().clone()) for p in self._parameters]
        optimizer = torch.optim.Adam(copies, lr=self.rate)
        with evaluating(self._model), restored(self._model.buffers()), self._at(copies):
            self._model.train()
            for batch in batches:
                self._add_gradient(copies, self._loss(batch, slice(None)))
                optimizer.step()
                optimizer.zero_grad()
            yield

    def ahead(self) -> AbstractContextManager[None]:
        """Put the point's weights in place of the model's; no version of a parameter changes."""
        return self._at(self._point)

    @contextmanager
    def _at(self, point: Sequence[Tensor]) -> Iterator[None]:
        kept = [p.data for p in self._parameters]
        for parameter, other in zip(self._parameters, point, strict=True):
            parameter.data = other.data
        try:
            yield
        finally:
            for parameter, data in zip(self._parameters, kept, strict=True):
                parameter.data = data

    def _add_gradient(self, point: Sequence[Tensor], loss: Tensor) -> None:
        grads = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        for one, grad in zip(point, grads, strict=True):
            if grad is not None:
                one.grad = grad if one.grad is None else one.grad + grad

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint: the path, and what its optimizer remembers."""
        own = {"taken": self.taken, "cycles": self.cycles, "offset": self._offset}
        return own | {"optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.taken, self.cycles = state["taken"], state["cycles"]
        both = zip(state["offset"], self._point, strict=True)
        self._offset = [saved.to(point.device) for saved, point in both]
        self._optimizer.load_state_dict(state["optimizer"])
