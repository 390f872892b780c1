"""A plan on paper: unlearning models of 1 B on a GPU, 7 B on 8 and 70 B on 64. One H200 gave the host's time.

    python examples/scaling_plan.py

Prints tables as Markdown, the last one that of docs/scaling.md: memory and traffic of each GPU, and what a paired step takes longer
than plain fine-tuning on both sides' summed gradients. Shapes are Llama 2's, built without memory; sizes of buckets and
pieces are the library's own. The Gram reads both gradients, the combine reads both and writes one. A GB is 10⁹ bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from hamu.core.distributed import BUCKET
from hamu.models.language import AdapterSettings, with_adapter

# One of the H100 class, by its maker's figures.
MEMORY = 80e9  # bytes
BANDWIDTH = 3.35e12  # bytes per second of its own memory
LINK = {
    1: math.inf,
    8: 450e9,
    64: 50e9,
}  # bytes per second that it sends: by NVLink among 8, by the network among nodes of 8
FLOPS = {4: 495e12, 2: 989e12}  # dense products per second, by bytes of a number (4: TF32)
# Assumed.
TOKENS = 4096  # of each side and GPU in a step, all scored
USED_FLOPS = 0.4  # the share of FLOPS that the passes reach
USED_BANDWIDTH = 0.9  # the share of BANDWIDTH that a copy reaches
HOST = 1.6e-5  # seconds of the host for a tensor: combine_bandwidth.py's time beyond its floor, on an H200
CHUNK = 1 << 14  # numbers whose three sums the Gram keeps for a while
SPLIT_TRAFFIC = 1.0001  # over the formula, the Gram included: docs/scaling.md
LAYOUTS = ("sequential", "split", "sharded")


@dataclass(frozen=True)
class Activations:
    """Bytes per token of checkpointed passes, fitted to the peaks of small Llamas on a CPU.

    Attributes:
        checkpoint: for each layer and each number of the hidden state.
        hidden, key, inner: within the layer that is computed again, for each number of the hidden state, of the keys,
            and of the feed-forward layer.
        last: at the loss, for each number of the hidden state.
        logit: at the loss, for each entry of the vocabulary.
    """

    checkpoint: int
    hidden: int
    key: int
    inner: int
    last: int
    logit: int = 12

    def per_token(self, config: Any) -> int:
        """The larger of the two peaks."""
        keys = config.hidden_size // config.num_attention_heads * config.num_key_value_heads
        layer = (
            self.hidden * config.hidden_size
            + self.key * keys
            + self.inner * config.intermediate_size
        )
        loss = self.last * config.hidden_size + self.logit * config.vocab_size
        found: int = self.checkpoint * config.num_hidden_layers * config.hidden_size + max(
            layer, loss
        )
        return found


@dataclass(frozen=True)
class Training:
    """Precision and parameters of a training.

    Attributes:
        weight: bytes of a weight in the passes.
        trained: bytes of a trainable weight, its gradients and each of AdamW's two averages.
        flops: for each weight and token: 2 forward, 2 again for the checkpoints, 2 back to the activations, and 2 to
            the weights if they are trained.
    """

    name: str
    weight: int
    trained: int
    flops: int
    activations: Activations
    adapter: bool = False


TRAININGS = (
    Training("float32", 4, 4, 8, Activations(4, 33, 8, 24, 12)),
    Training("bfloat16", 2, 2, 8, Activations(2, 23, 4, 12, 8)),
    Training("LoRA on bfloat16", 2, 4, 6, Activations(2, 23, 4, 12, 8), adapter=True),
)


class Model:
    """A Llama, and an adapter for it (r = 8, on what PEFT adapts by default), by shapes alone."""

    def __init__(self, name: str, gpus: int, **shape: Any) -> None:
        self.name, self.gpus = name, gpus
        self.config = LlamaConfig(vocab_size=32000, tie_word_embeddings=False, **shape)
        with torch.device("meta"):
            model = LlamaForCausalLM(self.config)
            self.layer = sum(sizes_of(model.model.layers[0]))
            self.sizes = sizes_of(model)
            self.adapter_sizes = sizes_of(
                with_adapter(model, AdapterSettings(rank=8, targets="q_proj,v_proj"))
            )


def sizes_of(model: nn.Module) -> list[int]:
    """The numbers in each trainable tensor."""
    return [p.numel() for p in model.parameters() if p.requires_grad]


@cache
def models() -> tuple[Model, ...]:
    one = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    seven = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}
    seventy = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    return (
        Model("1 B", 1, **one, num_attention_heads=32, num_key_value_heads=8),
        Model("7 B", 8, **seven, num_attention_heads=32),
        Model("70 B", 64, **seventy, num_attention_heads=64, num_key_value_heads=8),
    )


@dataclass(frozen=True)
class Plan:
    """One model, trained in one way, in one layout. All figures are of one GPU and one step."""

    model: Model
    training: Training
    layout: str

    @cached_property
    def trained(self) -> list[int]:
        """The numbers in each trainable tensor of the model."""
        return self.model.adapter_sizes if self.training.adapter else self.model.sizes

    @cached_property
    def gradient(self) -> int:
        """The bytes of one side's gradient of the whole model."""
        return self.training.trained * sum(self.trained)

    @cached_property
    def weights(self) -> int:
        """The bytes of all weights of the whole model."""
        frozen = self.training.weight * sum(self.model.sizes) if self.training.adapter else 0
        return frozen + self.training.trained * sum(self.trained)

    @cached_property
    def memory(self) -> dict[str, float]:
        """Bytes, by what takes them."""
        cut = self.model.gpus if self.layout == "sharded" else 1
        sides = 1 if self.layout == "split" else 2
        return {
            "weights": self.weights / cut,
            "gradients": sides * self.gradient / cut,
            "AdamW": 2 * self.gradient / cut,
            "activations": TOKENS * self.training.activations.per_token(self.model.config),
            "buckets": self.buckets,
        }

    @cached_property
    def buckets(self) -> int:
        """Bytes that are taken for a while: by the Gram and the combine, and by what is exchanged or gathered."""
        size, largest = self.training.trained, max(self.trained)
        own = 3 * 8 * (sum(self.trained) // CHUNK + len(self.trained))
        if self.layout == "sequential":
            return own + self.gradient  # DistributedDataParallel's buckets
        if self.layout == "split":
            return own + 2 * size * min(max(BUCKET, largest), sum(self.trained))
        gathered = (
            2 * self.model.layer + 2 * self.model.config.vocab_size * self.model.config.hidden_size
        )
        reduced = 0 if self.training.adapter else 2 * self.model.layer
        return own + self.training.weight * (gathered + reduced)

    @property
    def fits(self) -> bool:
        """True if a GPU has the memory."""
        return sum(self.memory.values()) <= MEMORY

    @cached_property
    def sent(self) -> float:
        """Bytes."""
        around = (self.model.gpus - 1) / self.model.gpus
        sums = 2 * around * 3 * 8 * len(self.trained)  # the Gram's
        if self.layout == "sequential":
            return 4 * around * self.gradient
        if self.layout == "split":
            return SPLIT_TRAFFIC * 2 * around * self.gradient
        return self.sent_by_plain + sums

    @cached_property
    def sent_by_plain(self) -> float:
        """Bytes that plain fine-tuning sends, which sums both sides' gradients before it reduces them."""
        around = (self.model.gpus - 1) / self.model.gpus
        if self.layout != "sharded":
            return 2 * around * self.gradient
        gathers, scatters = (
            2 * 2,
            2,
        )  # of two passes: for the forward and the backward pass, and after it
        return around * (gathers * self.weights + scatters * self.gradient)

    @cached_property
    def plain(self) -> float:
        """Seconds of plain fine-tuning: both passes, behind which all that it sends is hidden as far as it can be."""
        flops = self.training.flops * sum(self.model.sizes) * 2 * TOKENS
        passes = flops / (USED_FLOPS * FLOPS[self.training.weight])
        return max(passes, self.sent_by_plain / LINK[self.model.gpus])

    @cached_property
    def combine(self) -> float:
        """Seconds of the Gram and the combine: of the memory, and of the host, which waits for the Gram."""
        cut = 1 if self.layout == "sequential" else self.model.gpus
        moved = 5 * self.gradient / cut
        return moved / (USED_BANDWIDTH * BANDWIDTH) + HOST * len(self.trained)

    @cached_property
    def exchange(self) -> float:
        """Seconds of what a paired step sends and plain fine-tuning hides or does not send."""
        hidden = 0.0 if self.layout == "split" else self.sent_by_plain
        return (self.sent - hidden) / LINK[self.model.gpus]


def layouts_of(model: Model) -> tuple[str, ...]:
    """Layouts for a model's GPUs."""
    return LAYOUTS if model.gpus > 1 else LAYOUTS[:1]


def table(*rows: Sequence[str]) -> str:
    """Markdown; the first row is the head."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def tables() -> Iterator[str]:
    """The plan in full."""
    both = models()
    yield table(
        ("model", "GPUs", "parameters", "tensors", "largest tensor", "adapter", "its tensors"),
        *(
            (m.name, str(m.gpus), f"{sum(m.sizes):,}", str(len(m.sizes)), f"{max(m.sizes):,}",
             f"{sum(m.adapter_sizes):,}", str(len(m.adapter_sizes)))
            for m in both
        ),
    )  # fmt: skip
    plans = [
        Plan(model, training, layout)
        for model, training in product(both, TRAININGS)
        for layout in layouts_of(model)
    ]
    kinds = list(plans[0].memory)
    yield table(
        ("model", "training", "layout", *(f"{kind}, GB" for kind in kinds), "sum", "fits"),
        *(
            (p.model.name, p.training.name, p.layout, *(f"{p.memory[kind] / 1e9:.2f}" for kind in kinds),
             f"{sum(p.memory.values()) / 1e9:.1f}", "yes" if p.fits else "no")
            for p in plans
        ),
    )  # fmt: skip
    yield table(
        ("model", "training", "layout", "sent, GB", "by plain, GB", "ratio"),
        *(
            (p.model.name, p.training.name, p.layout, f"{p.sent / 1e9:.3f}", f"{p.sent_by_plain / 1e9:.3f}",
             f"{p.sent / p.sent_by_plain:.4f}")
            for p in plans
            if p.fits and p.sent
        ),
    )  # fmt: skip
    yield table(
        ("model", "training", "layout", "plain step, s", "Gram and combine, ms", "exchange, ms", "more"),
        *(
            (p.model.name, p.training.name, p.layout, f"{p.plain:.2f}", f"{1e3 * p.combine:.1f}",
             f"{1e3 * p.exchange:.2f}", f"{(p.combine + p.exchange) / p.plain:.1%}")
            for p in plans
            if p.fits
        ),
    )  # fmt: skip


def summary() -> str:
    """The table of docs/scaling.md: memory of a GPU and, where it fits, the additional time."""
    rows = []
    for model, training in product(models(), TRAININGS):
        cells = [model.name, training.name]
        for plan in (Plan(model, training, layout) for layout in layouts_of(model)):
            more = f", +{(plan.combine + plan.exchange) / plan.plain:.1%}" if plan.fits else ""
            cells.append(f"{sum(plan.memory.values()) / 1e9:.1f}{more}")
        cells += ["-"] * (2 + len(LAYOUTS) - len(cells))
        rows.append(cells)
    return table(("model", "training", *LAYOUTS), *rows)


if __name__ == "__main__":
    print("\n\n".join((*tables(), summary())))
