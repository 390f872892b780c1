"""Memory of a step is what benchmarks/memory.py and the plan for large models say, on models that take seconds."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from two_processes import in_two_processes

from hamu.core.forward import predict_logits
from hamu.core.objectives import CrossEntropy, Scored
from hamu.models.language import AdapterSettings, with_adapter

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import memory
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
    assert scaling_plan.summary() in (root / "docs/scaling.md").read_text(encoding="utf-8")
    assert all(len(table.splitlines()) > 3 for table in scaling_plan.tables())


@pytest.mark.parametrize("case", memory.QUICK)
def test_one_process_holds_two_gradients_and_a_bucket_and_moves_none(case):
    found = memory.measured(case, "hamu-q")
    assert 2 * found["gradient"] < memory.peak(found) <= 2 * found["gradient"] + found["bucket"]
    assert found["moved"] == 0


def test_a_process_of_split_pairing_holds_one_gradient_and_two_buckets(tmp_path):
    both = in_two_processes(lambda _: memory.measured("llama_5m", "hamu-q", split=True), tmp_path)
    found = max(both, key=memory.peak)
    assert found["gradient"] < memory.peak(found) <= found["gradient"] + 2 * found["bucket"]


def test_the_original_model_costs_a_copy_of_what_is_trained():
    without = memory.measured("resnet20", "gdiff")
    for method in memory.WITH_ORIGINAL:
        found = memory.measured("resnet20", method)
        extra = found["combine"] - without["combine"]
        assert found["gradient"] <= extra <= found["original"], method
