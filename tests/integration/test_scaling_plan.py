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


def llama(training, hidden, inner, layers, keys, vocab):
    sizes = {"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": inner}
    sizes |= {"num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": keys}
    config = LlamaConfig(**sizes, max_position_embeddings=256, use_cache=False)
    dtype = torch.float32 if training.weight == 4 else torch.bfloat16
    model = LlamaForCausalLM(config).to(dtype).train()
    if training.adapter:
        model = with_adapter(model, AdapterSettings(rank=8, targets="q_proj,v_proj"))
        model.enable_input_require_grads()
    model.gradient_checkpointing_enable()
    return model, config


def loss_of(model, ids):
    return CrossEntropy().total(Scored.of(predict_logits(model, {"input_ids": ids}), ids), None)


@pytest.mark.parametrize("shape", [(384, 1024, 7, 2, 64), (512, 2048, 2, 8, 6000)])
@pytest.mark.parametrize("training", scaling_plan.TRAININGS, ids=lambda training: training.name)
def test_activations_are_those_of_small_models(training, shape):
    torch.manual_seed(0)
    with TensorMeter() as meter:
        model, config = llama(training, *shape)
        ids = torch.randint(0, config.vocab_size, (2, 256))
        for parameter in model.parameters():  # so that the pass adds to gradients that are there
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        with meter.phase("passes"):
            loss = loss_of(model, ids)
            loss.backward()
    taken = meter.phases["passes"].peak - meter.phases["passes"].start
    planned = ids.numel() * training.activations.per_token(config)
    assert 0.94 * planned <= taken <= planned


def test_the_document_has_the_summary_of_the_plan():
    root = Path(__file__).parents[2]
    plan = [sys.executable, str(root / "examples" / "scaling_plan.py")]
    printed = subprocess.run(plan, capture_output=True, text=True, check=True).stdout
    *tables, summary = printed.strip().split("\n\n")
    assert summary in (root / "docs" / "scaling.md").read_text(encoding="utf-8")
    assert all(len(table.splitlines()) > 3 for table in tables)
