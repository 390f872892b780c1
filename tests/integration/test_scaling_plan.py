"""The plan for large models says what small ones do, and docs/scaling.md says what the plan does."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hamu.core.forward import predict_logits
from hamu.core.objectives import CrossEntropy, Scored
from hamu.models.language import AdapterSettings, with_adapter

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import scaling_plan
from _memory_meter import TensorMeter

TRAININGS = pytest.mark.parametrize(
    "training", scaling_plan.TRAININGS, ids=lambda training: training.name
)


def llama(training, **shape):
    config = LlamaConfig(
        num_attention_heads=8, max_position_embeddings=256, use_cache=False, **shape
    )
    model = (
        LlamaForCausalLM(config)
        .to(torch.float32 if training.weight == 4 else torch.bfloat16)
        .train()
    )
    model = with_adapter(model, AdapterSettings(rank=8)) if training.adapter else model
    if training.adapter:
        model.enable_input_require_grads()
    model.gradient_checkpointing_enable()
    return model, config


SHAPES = {
    "deep": {
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 7,
        "num_key_value_heads": 2,
    },
    "wide": {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 2,
        "num_key_value_heads": 8,
    },
}


@pytest.mark.parametrize(
    ("shape", "vocab_size"), zip(SHAPES.values(), (64, 6000), strict=True), ids=SHAPES
)
@TRAININGS
def test_activations_are_those_of_small_models(training, shape, vocab_size):
    torch.manual_seed(0)
    with TensorMeter() as meter:
        model, config = llama(training, vocab_size=vocab_size, **shape)
        ids = torch.randint(0, vocab_size, (2, 256))
        for parameter in model.parameters():  # so that the pass adds to gradients that are there
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        with meter.phase("forward"):
            loss = CrossEntropy().total(
                Scored.of(predict_logits(model, {"input_ids": ids}), ids), None
            )
        with meter.phase("backward"):
            loss.backward()
    taken = (
        max(meter.phases[name].peak for name in ("forward", "backward"))
        - meter.phases["forward"].start
    )
    planned = ids.numel() * training.activations.per_token(config)
    assert 0.94 * planned <= taken <= planned


def test_the_document_has_the_summary_of_the_plan():
    root = Path(__file__).parents[2]
    plan = [sys.executable, str(root / "examples" / "scaling_plan.py")]
    printed = subprocess.run(plan, capture_output=True, text=True, check=True).stdout
    *tables, summary = printed.strip().split("\n\n")
    assert summary in (root / "docs" / "scaling.md").read_text(encoding="utf-8")
    assert all(len(table.splitlines()) > 3 for table in tables)
