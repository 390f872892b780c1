"""Memory of the original model in a LoRA run: the adapter, not a second model.

Two runs of a few steps on the same Llama of 30 M parameters with an adapter (r = 8), each in a process of its own: by
gdiff, which needs no original model, and by kl, which compares with it. Counted: parameters that the copy holds.
Measured: resident memory after the last step and at its peak (kl also computes the original's logits, which a second
model would need too).

    python benchmarks/adapter_memory.py [--quick]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from _report import print_report
from transformers import LlamaConfig, LlamaForCausalLM

from hamu import UnlearnConfig, UnlearnTrainer
from hamu.data import collate
from hamu.models.language import AdapterSettings, with_adapter
from hamu.unlearning.trainer.logs import silence


def resident_mb() -> float:
    """Resident memory of this process now, in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def one_run(method: str, steps: int) -> dict[str, float]:
    """One run's memory."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
    )
    model = with_adapter(LlamaForCausalLM(config), AdapterSettings(targets="q_proj,v_proj"))
    texts = [torch.randint(0, 4096, (32,)) for _ in range(8)]
    data: Any = [{"input_ids": ids, "labels": ids} for ids in texts]
    with tempfile.TemporaryDirectory() as folder:
        args = UnlearnConfig(
            output_dir=folder,
            method=method,
            max_steps=steps,
            per_device_train_batch_size=2,
            eval_strategy="no",
            eval_on_start=False,
        )
        trainer = UnlearnTrainer(
            model,
            args,
            retain_dataset=data,
            forget_dataset=data,
            data_collator=collate,
        )
        silence(trainer)
        trainer.train()
    original = trainer.side_losses.original
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "adapter": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "copy": 0 if original is None else sum(t.numel() for t in original._original.values()),
        "resident_mb": resident_mb(),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two steps instead of five")
    parser.add_argument("--method", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.method:
        print(json.dumps(one_run(options.method, 2 if options.quick else 5)))
        return
    found = {}
    for method in ("gdiff", "kl"):
        words = [
            sys.executable,
            __file__,
            "--method",
            method,
            *(["--quick"] if options.quick else []),
        ]
        found[method] = json.loads(
            subprocess.run(words, check=True, capture_output=True, text=True).stdout.split("\n")[-2]
        )
    gdiff, kl = found["gdiff"], found["kl"]
    whole_mb = 4 * kl["parameters"] / 1e6
    figures = {
        "copy_over_adapter": kl["copy"] / kl["adapter"],
        "copy_over_model": round(kl["copy"] / kl["parameters"], 5),
        "resident_over_without": round(kl["resident_mb"] / gdiff["resident_mb"], 4),
        "peak_over_without": round(kl["peak_mb"] / gdiff["peak_mb"], 4),
        "extra_resident_over_second_model": round(
            (kl["resident_mb"] - gdiff["resident_mb"]) / whole_mb, 4
        ),
        "extra_peak_over_second_model": round((kl["peak_mb"] - gdiff["peak_mb"]) / whole_mb, 4),
    }
    for method, row in found.items():
        print(f"{method}: {row}")
    print_report("adapter_memory", figures)


if __name__ == "__main__":
    main()
