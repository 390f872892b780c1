"""Rounding errors of the mean loss of a language model in half precision: what `_ROUGH` of
hamu/unlearning/trainer/promise.py rests on.

    python examples/rounding.py --output docs/results/rounding.json

Random Llamas of several sizes, as sure of themselves as the deviation of their logits says, with a LoRA adapter in
float32 that is moved by next to nothing: what the loss does then is rounding. It is given in last digits of the
precision times the deviation of the logits over the root of the number of tokens.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from hamu.models.language import AdapterSettings, with_adapter

SIZES = ((64, 2, 16, 32, 500), (64, 2, 4, 16, 500), (128, 4, 16, 64, 2000), (256, 2, 8, 32, 8000))
DEVIATIONS = (3.0, 6.0, 12.0)  # of the logits
_MOVES, _MOVED_BY = 12, 1e-4


@torch.no_grad()
def roughness(size: tuple[int, ...], dtype: torch.dtype, deviation: float) -> float:
    """The root mean square of what small moves do to the loss, in the units above."""
    hidden, layers, batch, length, words = size
    config = LlamaConfig(hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
                         num_attention_heads=4, num_key_value_heads=4, vocab_size=words)  # fmt: skip
    set_seed(0)
    base: Any = LlamaForCausalLM(config)
    for parameter in base.parameters():
        if parameter.dim() > 1:
            parameter.mul_(3)
    model: Any = with_adapter(
        base.to(dtype), AdapterSettings(rank=8, targets="q_proj,v_proj")
    ).eval()
    moved = [p for p in model.parameters() if p.requires_grad]
    for parameter in moved:
        parameter.normal_(std=0.02)
    ids = torch.randint(0, words, (batch, length))

    def logits() -> torch.Tensor:
        found: torch.Tensor = model(input_ids=ids).logits.float().flatten(0, 1)
        return found

    model.get_output_embeddings().weight.mul_(deviation / logits().std())
    start = logits()
    labels = torch.distributions.Categorical(logits=start).sample()
    before, kept, changes = F.cross_entropy(start, labels).item(), [p.clone() for p in moved], []
    for _ in range(_MOVES):
        for parameter, original in zip(moved, kept, strict=True):
            parameter.copy_(original * (1 + _MOVED_BY * torch.randn_like(original)))
        changes.append(F.cross_entropy(logits(), labels).item() - before)
    rms = math.sqrt(sum(change**2 for change in changes) / _MOVES)
    return rms / (torch.finfo(dtype).eps * start.std().item() / math.sqrt(len(labels)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    output = parser.parse_args().output
    found: list[dict[str, Any]] = [
        {"size": list(size), "dtype": str(dtype).removeprefix("torch."), "deviation": deviation,
         "roughness": round(roughness(size, dtype, deviation), 3)}
        for size in SIZES for dtype in (torch.bfloat16, torch.float16) for deviation in DEVIATIONS
    ]  # fmt: skip
    values = sorted(float(one["roughness"]) for one in found)
    Console().print(
        f"{len(values)} models: {values[0]:.2f} to {values[-1]:.2f}, median {values[len(values) // 2]:.2f}"
    )
    if output:
        output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
