"""UnlearnTrainer on language models: token means, objectives, adapters, early ends."""

import copy
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import transformers
from helpers import state_of
from small_models import token_predictions
from transformers import set_seed

from hamu import HamuError, UnlearnConfig, UnlearnTrainer
from hamu.core.objectives import Scored, build_objective
from hamu.data import collate, encode, forget_rows, matching, read_text
from hamu.evaluation import predict_tokens
from hamu.models.language import (
    AdapterSettings,
    check_causal_mask,
    new_language_model,
    new_tokenizer,
    with_adapter,
)
from hamu.unlearning.trainer.logs import silence
from hamu.unlearning.trainer.sides import SideLosses


@pytest.fixture(scope="module")
def start():
    """(model, tokenizer, problem): a tiny random Llama and the miniature without one author."""
    texts = read_text("miniature").select(range(36))
    set_seed(0)
    tokenizer = new_tokenizer((r.prompt + r.answer for r in texts.records), 320)
    model = new_language_model(tokenizer, hidden=32, layers=2, max_length=128)
    problem = forget_rows(
        texts, None, matching(texts, f"author={texts.records[0].fields['author']}")
    )
    return model, tokenizer, [encode(data, tokenizer) for data in (problem.retain, problem.forget)]


@pytest.fixture
def trainer_of(start, tmp_path):
    def make(model=None, forget=None, retain=None, retain_predictions=None, **settings):
        base, _, sides = start
        defaults = {"eval_strategy": "no", "eval_on_start": "auto" in settings, "max_steps": 2}
        defaults |= {"per_device_train_batch_size": 6, "learning_rate": 0.05}
        defaults |= {"constraint_mode": "relative", "stopping": "off"}
        args = UnlearnConfig(output_dir=str(tmp_path / "run"), **defaults | settings)
        given = {"retain_dataset": retain or sides[0], "forget_dataset": forget or sides[1]}
        given["retain_predictions"] = retain_predictions
        trainer = UnlearnTrainer(model or copy.deepcopy(base), args, **given)
        silence(trainer)
        return trainer

    return make


def test_a_retain_model_of_another_tokenizer_predicts_the_same_records(start, trainer_of):
    model, _, (_, forget) = start
    found = predict_tokens(model, forget, 8)
    halves = {name: getattr(found, name).repeat(2) for name in ("losses", "correct", "expected")}
    record = found.record.repeat_interleave(2)
    others = replace(found, **halves, spread=halves["losses"], record=record)
    how = {"forget_objective": "bounded", "goal": "retrained", "eval_on_start": True}
    trainer = trainer_of(**how, retain_predictions=others)
    trainer.train()
    trainer.evaluate()
    assert trainer.history()["goal"]["after"]["records"] == len(forget)


@pytest.mark.parametrize("by_goal", [{}, {"auto": True, "target_forget_loss": 9.0}])
def test_texts_of_different_lengths_need_no_collator(by_goal, start, trainer_of):
    retain, forget = (
        [{"text": "", **{key: one.tolist() for key, one in data[i].items()}} for i in range(6)]
        for data in start[2]
    )
    assert len({len(item["labels"]) for item in retain}) > 1
    trainer = trainer_of(retain=retain, forget=forget, **by_goal)
    trainer.train()
    assert trainer.state.global_step == 2


def test_a_run_without_a_scored_token_says_that_no_step_was_taken(start, trained):
    masked = [item | {"labels": torch.full_like(item["labels"], -100)} for item in start[2][1]]
    trainer = trained(forget=masked)
    assert trainer.stop.kind == "skips"
    assert trainer.stop_reason == "2 tried, and the last one skipped as a loss is not finite"


def adapted(start, dtype=torch.float32):
    set_seed(1)
    return with_adapter(copy.deepcopy(start[0]).to(dtype), AdapterSettings(rank=2))


@pytest.fixture
def batch(start):
    _, _, (retain, _) = start
    return collate([retain[i] for i in range(4)])


def likelihoods(logits, labels):
    """Log-likelihood of the scored tokens of each record, [B]."""
    each = logits[:, :-1].double().log_softmax(-1)
    each = each.gather(2, labels[:, 1:, None].clamp(min=0))[..., 0]
    return each.masked_fill(labels[:, 1:] == -100, 0.0).sum(1)


@pytest.mark.parametrize("name", ["cross_entropy", "npo", "simnpo"])
def test_an_objective_of_texts_is_its_formula(name, batch):
    torch.manual_seed(3)
    labels = batch["labels"]
    logits, before = torch.randn(2, *labels.shape, 320)
    p, q = likelihoods(logits, labels), likelihoods(before, labels)
    n = (labels[:, 1:] != -100).sum(1)
    expected = {
        "cross_entropy": -p.sum(),
        "npo": -20 * (1 + (0.1 * (p - q)).exp()).log().sum(),
        "simnpo": -0.8 * (1 + (2.5 * p / n).exp()).log().sum(),
    }[name]
    objective = build_objective(name)
    original = Scored.of(before, labels).logits if objective.needs_original else None
    total = objective.total(Scored.of(logits, labels), original)
    assert total.item() == pytest.approx(expected.item(), rel=1e-5)
    assert objective.count(labels) == (n.sum() if name == "cross_entropy" else 4)


def with_alternatives(start):
    """The forget set with its other answers."""
    texts, tokenizer = start[2][1].texts, start[1]
    return replace(start[2][1], alternatives=encode(texts.alternatives(), tokenizer))


@torch.no_grad()
def test_dpo_prefers_the_other_answer_and_is_npo_where_that_is_as_likely_as_before(start):
    forget, model = with_alternatives(start), copy.deepcopy(start[0])
    torch.manual_seed(0)
    own, other = (collate([data[i] for i in range(3)]) for data in (forget, forget.alternatives))
    both = own | {"alternative": other}
    losses = SideLosses(model, {"retain": None, "forget": "dpo"})
    for parameter in model.parameters():  # away from the original
        parameter.add_(0.05 * torch.randn_like(parameter))
    gained = [
        likelihoods(model(one["input_ids"]).logits, one["labels"])
        - likelihoods(losses.original.logits(one), one["labels"])
        for one in (other, own)
    ]
    odds = torch.sigmoid(0.1 * (gained[0] - gained[1]))
    total = losses.total(model, "forget", both)[0]
    torch.testing.assert_close(total.double(), 20 * odds.log().sum(), rtol=1e-4, atol=1e-4)
    as_before, npo = (SideLosses(model, {"retain": None, "forget": n}) for n in ("dpo", "npo"))
    ours, theirs = as_before.total(model, "forget", both), npo.total(model, "forget", own)
    torch.testing.assert_close(ours[0], theirs[0])


@pytest.mark.parametrize("objective", ["npo", "simnpo", "kl_to_original", "undial", "ce-u"])
def test_any_forget_objective_goes_with_hamu(objective, trained):
    is_raised(trained(forget_objective=objective, max_steps=3, learning_rate=0.02))


def is_raised(trainer):
    values = [entry["forget_loss"] for entry in trainer.state.log_history if "taken" in entry]
    assert trainer.steps_taken == trainer.args.max_steps
    assert values[-1] > values[0], "the forget objective is raised"


@pytest.mark.parametrize("objective", ["idk", "dpo"])
def test_forgetting_by_another_answer_raises_its_likelihood(objective, start, trainer_of):
    forget = with_alternatives(start)
    settings = {"method": "gdiff", "forget_objective": objective, "max_steps": 6}
    trainer = trainer_of(forget=forget, learning_rate=0.3, **settings)
    before = predict_tokens(trainer.model, forget.alternatives, 16).losses.mean()
    trainer.train()
    after = predict_tokens(trainer.model, forget.alternatives, 16).losses.mean()
    assert after < before - 0.1
    is_raised(trainer)


@pytest.mark.parametrize("method", ["gdiff", "hamu-q", "npo"])
def test_accumulated_unequal_batches_weigh_every_token_alike(method, trainer_of):
    """One step on 6 pairs of unequal lengths is the same at once and in batches of 1."""
    at_once = trainer_of(method=method, max_steps=1)
    parts = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 6}
    one_by_one = trainer_of(method=method, max_steps=1, **parts)
    for trainer in (at_once, one_by_one):
        trainer.train()
    for (name, a), b in zip(
        state_of(at_once.model).items(), state_of(one_by_one.model).values(), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-6, msg=name)
    ours, theirs = (t.state.log_history[0]["retain_loss"] for t in (at_once, one_by_one))
    assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_tensor_of_an_adapter_moves_and_nothing_else_also_with_checkpointing(
    reentrant, dtype, start, trainer_of
):
    model, other = (adapted(start, dtype) for _ in range(2))
    before = state_of(model)
    trainer_of(model, max_steps=3).train()
    recompute = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    trainer_of(other, max_steps=3, gradient_checkpointing=True, **recompute).train()
    for (name, after), again in zip(state_of(model).items(), state_of(other).values(), strict=True):
        assert torch.equal(before[name], after) != ("lora_" in name), name
        torch.testing.assert_close(after, again, rtol=1e-5, atol=1e-7, msg=name)


def test_evaluation_is_the_mean_over_all_scored_tokens(start, trainer_of):
    trainer = trainer_of(per_device_eval_batch_size=7)
    found = trainer.evaluate()
    model, _, (retain, _) = start
    alone = predict_tokens(model, retain, 1)
    assert found["eval_retain_loss"] == pytest.approx(alone.losses.mean().item(), rel=1e-6)
    assert alone.losses.mean().item() != pytest.approx(alone.record_losses.mean().item(), rel=1e-6)


@pytest.mark.parametrize("learning_rate", [1e-3, 0.1])
def test_what_a_model_in_half_precision_rounds_is_not_taken_for_a_broken_promise(
    start, trained, learning_rate
):
    """Its logits are off by half a last digit of bfloat16, far more than a float32 loss is."""
    outcomes = []
    for dtype in (torch.float32, torch.bfloat16):
        base = copy.deepcopy(start[0]).to(dtype)
        with torch.no_grad():
            base.lm_head.weight.mul_(8)  # as sure of itself as a model that was trained
        set_seed(1)
        model = with_adapter(base, AdapterSettings(rank=2, targets="q_proj,v_proj"))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        region = {"trust_region": True, "trust_region_growth": 1.0}
        trainer = trained(model, max_steps=8, learning_rate=learning_rate, **region)
        outcomes.append(trainer.promise)
        assert trainer.steps_skipped == 0, "no step is undone for what is rounding"
    full, half = outcomes
    assert (full["judged"], full["kept"]) == (8, 1.0)
    assert (half["checked"], half["kept"]) == (8, 1.0 if learning_rate == 0.1 else None)
    assert half["judged"] >= 4 or half["kept"] is None, "what long steps do is told"
    for side, ratio in half["median_ratio"].items():
        assert ratio == pytest.approx(full["median_ratio"][side], abs=0.3)


OF_BERT = {"vocab_size": 320, "hidden_size": 16, "intermediate_size": 32}
OF_BERT |= {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 128}


def test_labels_are_not_shifted_for_a_model_that_sees_what_comes_later(trainer_of):
    bert = transformers.BertConfig(**OF_BERT)
    message = "a model of type bert is not a causal language model: its predictions change"
    with pytest.raises(HamuError, match=message):
        trainer_of(transformers.BertForMaskedLM(bert)).train()
    bert.is_decoder = True
    trainer_of(transformers.BertLMHeadModel(bert)).train()


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_last_token_that_is_not_padding_is_the_one_that_is_changed(side):
    model = transformers.BertForMaskedLM(transformers.BertConfig(**OF_BERT))
    real = torch.tensor([[0, 0, 1, 1] if side == "left" else [1, 1, 0, 0]])
    ids = torch.tensor([[5, 6, 7, 8]])
    batch = {"input_ids": ids, "attention_mask": real}
    with pytest.raises(HamuError, match="a model of type bert is not a causal"):
        check_causal_mask(model, batch | {"labels": ids})
    check_causal_mask(model, batch | {"labels": torch.tensor([1])})
    with pytest.raises(HamuError, match="the tokenizer has token 99999, the model 320 embeddings;"):
        check_causal_mask(model, {"input_ids": 99999 + 0 * ids, "labels": ids})


def test_a_rehearsal_on_texts_takes_batches_of_sixteen(trainer_of, monkeypatch):
    asked = {"auto": True, "lasting": True, "lookahead_steps": 2, "target_forget_loss": 9.0}
    run, drawn = trainer_of(**asked).goal_run, []

    @contextmanager
    def noted(batches):
        drawn.append([len(batch["labels"]) for batch in batches])
        yield

    monkeypatch.setattr(run.lookahead, "rehearsed", noted)
    run.rehearse()
    assert drawn == [[16], [16, 16]]


def test_the_rise_over_texts_is_known_to_the_error_of_a_mean_over_tokens(trainer_of, monkeypatch):
    run = trainer_of(auto=True, target_forget_loss=9.0).goal_run
    looks, forget = run._looks, run._looks.predict(run._looks.sets["forget"])
    looks.sets["retain"] = [*range(50)]  # of which some are measured
    losses = [[1.0, 2.0], [], [4.0, 4.0, 4.0], [1.0]]
    both = losses, [[2.0, 3.0], [], [4.0, 4.0, 7.0], [1.0]]
    found = iter([one for each in both for one in (token_predictions(each), forget)])
    monkeypatch.setattr(looks, "predict", lambda data: next(found))
    monkeypatch.setattr(looks, "some_retain", [0, 1, 2, 3])
    assert run.stand().retain_error == 0.0
    sizes, change = torch.tensor([2.0, 3.0, 1.0]), torch.tensor([1.0, 1.0, 0.0])
    off = sizes * (change - 5 / 6)
    assert run.stand().retain_error == pytest.approx(3 * off.norm().item() / 6)
