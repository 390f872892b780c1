"""Attacks: what they measure, what they leave alone, and the verdict."""

import re
import sys
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from fnmatch import fnmatchcase

import pytest
import torch
from helpers import is_as, state_of
from peft import LoraConfig, get_peft_model
from run_files import write_rows
from small_models import drawn_images, small_texts
from torch import nn
from transformers.pytorch_utils import Conv1D

from hamu import HamuError
from hamu.data import encode, read_text
from hamu.evaluation import (
    AttackData,
    AttackResult,
    AttackSettings,
    attack,
    lasts,
    robustness,
    sentence,
)
from hamu.evaluation.attacks import (
    Outcome,
    _after,
    _Attacker,
    leak_at_k,
    prefilled,
    quantized,
    sampled,
)
from hamu.models.language import new_language_model, new_tokenizer

QUICK = {"attack_steps": 6, "attack_seeds": 2, "attack_batch_size": 8}
FEW_STEPS = AttackSettings(**QUICK)


@pytest.fixture
def classifier():
    """All that training moves: dropout's random state, running statistics, a frozen parameter."""
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3), nn.Flatten()
    model = nn.Sequential(*layers, nn.Linear(16, 3))
    model[5].bias.requires_grad_(False)
    return model


@pytest.fixture
def data():
    return AttackData(drawn_images(40), drawn_images(30, 1, label=1))


@pytest.fixture(scope="module")
def texts():
    model, tokenizer, encoded = small_texts()
    parts = [encoded.select(range(*ends)) for ends in ((0, 10), (10, 18), (18, 24))]
    return model, AttackData(parts[0], parts[1], 8, parts[2], tokenizer)


def test_the_model_its_mode_and_the_random_state_are_as_before(classifier, data):
    classifier[1].eval()
    grad = classifier[0].weight.grad = torch.ones_like(classifier[0].weight)
    modes = [module.training for module in classifier]
    before, random = state_of(classifier), torch.get_rng_state()
    attack(classifier, data, FEW_STEPS)
    assert is_as(classifier, before), "parameters and buffers, to the last bit"
    assert [module.training for module in classifier] == modes
    assert torch.equal(classifier[0].weight.grad, grad)
    assert torch.equal(random, torch.get_rng_state())
    data.retain.labels[:] = -7  # no class
    with pytest.raises(IndexError):
        attack(classifier, data, FEW_STEPS)
    assert is_as(classifier, before), "when an attack fails too"


def test_a_seed_gives_the_same_curves_and_another_seed_others(classifier, data):
    first, again, other = (attack(classifier, data, FEW_STEPS, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first.outcomes["relearn-retain"] != other.outcomes["relearn-retain"]


def test_no_copy_of_a_relearned_record_is_looked_at_and_any_data_set_will_do(
    data, texts, classifier
):
    twice = data.forget.select([*range(15)] * 2)
    copies = texts[1].forget.select([*range(8)] * 2)
    for problem, sizes in (
        (data, (64 + 5, 25)),
        (replace(data, forget=twice), (64 + 5, 20)),
        (replace(texts[1], forget=copies), (2 * 8, 8)),
    ):
        attacker = _Attacker(None, problem, AttackSettings(relearned_records=5), 0, None)
        items, looked_at = attacker.batches("relearn-few", 3)
        key = "input_ids" if problem.kind == "text" else "pixel_values"
        batch = next(items)
        relearned = {tuple(row[row >= 0].tolist()) for row in batch[key].flatten(1)}
        seen = [tuple(looked_at[i][key].flatten().tolist()) for i in range(len(looked_at))]
        assert (len(batch[key]), len(seen)) == sizes
        assert not any(one[:20] == other[:20] for one in seen for other in relearned)
    same = replace(data, forget=data.forget.select([0] * 4))
    found = attack(classifier, same, replace(FEW_STEPS, attacks="relearn-few"))
    assert found.skipped["relearn-few"].startswith("it needs two forgotten records that differ")
    two = replace(data, forget=data.forget.select([0, 0, 0, 1]))
    assert attack(classifier, two, FEW_STEPS).records["relearned"] == 1
    plain = AttackData(*([one[i] for i in range(20)] for one in (data.retain, data.forget)))
    assert attack(classifier, plain, FEW_STEPS).records["relearned"] == 10


@pytest.mark.parametrize(("kind", "rate"), [("image", 1e-3), ("text", 3e-4), ("adapter", 1e-3)])
def test_the_rate_is_that_of_the_kind_of_model(kind, rate, classifier, data, texts, monkeypatch):
    """Adam's first step moves the weights by its rate."""
    model, problem = (classifier, data) if kind == "image" else texts
    if kind == "adapter":
        model = get_peft_model(deepcopy(model), LoraConfig(target_modules="all-linear", r=2))
    before, moved, measure = state_of(model), [], AttackData.measure

    def noted(self, model, records):
        changes = [(p.detach() - before[name]).abs().max() for name, p in model.named_parameters()]
        moved.append(max(changes).item())
        return measure(self, model, records)

    monkeypatch.setattr(AttackData, "measure", noted)
    once = AttackSettings("relearn-retain", attack_steps=1, attack_seeds=1)
    found = attack(model, problem, once).outcomes["relearn-retain"]["unlearned"]
    assert found.learning_rate == rate
    assert moved == [0.0, pytest.approx(rate, rel=0.05)]


def test_a_small_forget_set_is_halved_and_a_single_record_is_not_relearned(classifier, data):
    three = attack(classifier, replace(data, forget=drawn_images(3, label=1)), FEW_STEPS)
    assert three.records == {"forget": 3, "measured": 3, "relearned": 1}
    few = replace(FEW_STEPS, attacks="relearn-few")
    assert (
        attack(classifier, replace(data, forget=drawn_images(3, label=1)), few).records["measured"]
        == 2
    )
    one = attack(classifier, replace(data, forget=drawn_images(1, label=1)), FEW_STEPS)
    assert list(one.outcomes) == ["relearn-retain"]
    assert "two forgotten records" in one.skipped["relearn-few"]


def test_a_loss_that_is_not_finite_is_an_error_that_names_the_attack(classifier, data):
    spoiled = data.retain.normalized((0.0,), (0.0,))
    with pytest.raises(HamuError, match=r"relearn-retain on the unlearned model: .* not finite"):
        attack(classifier, replace(data, retain=spoiled), FEW_STEPS)


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"attack_learning_rate": 0.0}, "image", "attack_learning_rate 0.0 must be above 0"),
        ({"attack_steps": 0}, "image", "attack_steps 0 must be at least 1"),
        ({"attack_batch_size": 0}, "image", "attack_batch_size 0 must be at least 1"),
        ({"attacks": "relearn"}, "image", "choose from relearn-retain"),
        ({"attacks": "prefill"}, "image", "not for images"),
        ({"attack_batch_size": 1}, "text", "attack_batch_size 1 leaves relearn-few no room"),
        ({"attack_batch_size": 1, "attacks": "relearn-retain"}, "text", None),
        ({"attack_batch_size": 1}, "image", None),
    ],
)
def test_settings_out_of_range_and_attacks_not_for_such_records_are_errors(given, kind, message):
    with nullcontext() if message is None else pytest.raises(HamuError, match=message):
        AttackSettings(**given).names(kind)


def test_leak_at_k_is_the_mean_of_the_best_over_all_choices_of_k_draws():
    draws = [torch.tensor([0.0, 0.4]), torch.tensor([1.0, 0.2]), torch.tensor([0.5, 0.0])]
    assert leak_at_k(draws, 1) == pytest.approx((0.5 + 0.2) / 2)
    assert leak_at_k(draws, 2) == pytest.approx(((1 + 0.5 + 1) / 3 + (0.4 + 0.4 + 0.2) / 3) / 2)
    assert leak_at_k(draws, 3) == pytest.approx((1.0 + 0.4) / 2)


def test_samples_differ_from_each_other_and_are_repeated_by_their_seed(texts):
    model, data = texts
    runs = []
    for _ in range(2):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            runs.append(sampled(model, data, data.forget, 3))
    assert all(map(torch.equal, *runs))
    assert any(not torch.equal(runs[0][0], other) for other in runs[0][1:])
    for words in (0, 2, 1000):  # prefill leaves at least a token
        assert len(prefilled(model, data, data.forget, words)) == len(data.forget)


def test_a_text_of_one_token_is_left_out_of_prefill(texts, tmp_path):
    model, data = texts

    def asked(*rows):
        write_rows(tmp_path / "plain.jsonl", [{"text": row} for row in rows])
        plain = encode(read_text(str(tmp_path / "plain.jsonl")), data.tokenizer)
        attacker = _Attacker(model, replace(data, forget=plain), AttackSettings(), 0, print)
        return attacker.asked("prefill").figures

    assert asked("A town by the sea.") == asked("a", "A town by the sea.")
    plain = encode(read_text(str(tmp_path / "plain.jsonl")).select([0]), data.tokenizer)
    found = attack(model, replace(data, forget=plain), AttackSettings("prefill"))
    assert found.skipped == {"prefill": "no forgotten record has a prompt, or a second token"}


def test_answers_begin_behind_the_prompt_and_words_are_counted_in_any_script(texts):
    model, data = texts
    settings = AttackSettings("prefill,sample", attack_samples=2, attack_answers=3)
    whole = encode(data.forget.texts, data.tokenizer, loss_on="all")
    found = [attack(model, replace(data, forget=one), settings) for one in (data.forget, whole)]
    assert found[0].outcomes == found[1].outcomes
    assert found[0].records == {"forget": len(whole), "measured": 3, "relearned": 0}
    texts = ["eins zwei drei vier", "我们都在这里住着"]
    tokenizer = new_tokenizer(["no merges"], 260)
    for text, start in zip(texts, ("eins zwei", "我们"), strict=True):
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        given = tokenizer.decode(tokens[: _after(tokenizer, tokens, 0, 2, {})])
        assert given.rstrip(" \ufffd") == start  # maybe with the first bytes of the next character
    assert _after(tokenizer, [*tokens, 5], 0, 99, {5}) == len(tokens) - 1, "the end is no token"


def result_of(kind, unlearned, original=None, retrained=None, at=(0, 20, 40)):
    """A result of relearn-retain: of each model a figure at each of these steps."""
    name = "loss" if kind == "text" else "recognised"
    curves = {"unlearned": unlearned, "original": original, "retrained": retrained}
    outcomes = {
        role: Outcome(at[: len(values)], {name: tuple((value,) for value in values)})
        for role, values in curves.items()
        if values
    }
    return AttackResult(kind, {"relearn-retain": outcomes})


SURE = (1.0, 1.0)


@pytest.mark.parametrize(("kind", "unlearned", "original", "retrained", "expected"), [
    ("image", (0.0, 0.94), None, (0.0, 0.0), False),
    ("image", (0.0, 0.10), None, (0.0, 0.0), True),
    ("image", (0.0, 0.12), None, None, False),
    ("image", (0.2, 0.27), SURE, None, True),
    ("image", (0.2, 0.29), SURE, None, False),
    ("image", SURE, SURE, None, None),
    # as much as of records that were never seen
    ("image", (0.95, 0.97), (0.98, 0.98), None, None),
    ("image", (0.95, 0.97), None, None, None),
    ("image", (0.95, 0.97), None, (0.95, 0.96), True),
    # retrained with another seed, it generalises to others of them; nothing comes back
    ("image", (0.7, 0.62), SURE, (0.47, 0.47), True),
    ("image", (0.7, 0.85), SURE, (0.47, 0.47), False),
    # nothing comes back where next to nothing was forgotten
    ("image", (0.95, 0.93), (0.98, 0.98), (0.76, 0.76), None),
    ("image", (0.95, 0.96), SURE, (0.4, 0.4), None),
    ("image", (0.95, 0.95, 0.95), SURE * 2, (0.86, 0.4, 0.3), None),
    ("image", (0.95, 1.0, 1.0), SURE * 2, (0.86, 0.6, 0.5), None),
    # after 20 steps, though not after 40
    ("image", (0.0, 0.27, 0.0), (0.98, 0.41, 0.01), None, False),
    # the original would pass, too
    ("image", (0.0, 0.0), (0.98, 0.09), None, None),
    ("image", (0.0, 0.0), (0.98, 0.12), None, True),
    ("image", (0.2, 0.2), (1.0, 0.5), (0.3, 0.45), None),
    ("text", (5.3, 4.0), None, None, None),
    ("text", (5.3, 4.0), (1.8, 1.8), None, False),
    ("text", (5.3, 5.0), (1.8, 1.8), None, True),
    ("text", (5.3, 5.7), (1.8, 1.8), None, True),
    # no step did anything
    ("text", (5.3, 5.301), (1.8, 1.801), None, None),
    # what fine-tuning does to the original too does not come back
    ("text", (2.2, 2.0), (1.8, 1.6), None, True),
    ("text", (2.2, 2.0), (1.8, 1.9), None, False),
    ("text", (5.3, 5.3), (1.8, 2.4), None, True),
    ("text", (1.8006, 1.6), (1.8, 1.6), None, None),
    ("text", (5.3, 1.4), (1.8, 1.8), (1.801, 1.5), False),
    ("text", (5.3, 4.8), (1.8, 1.8), (5.3, 5.1), True),
    ("text", (5.3, 4.5), (1.8, 1.8), (5.3, 5.1), False),
    ("text", (20.0, 8.0), (1.8, 1.8), (5.3, 5.1), True),
    # nothing comes back in a retrained one whose loss rises
    ("text", (4.1, 3.9), (0.1, 0.1), (8.1, 9.1), True),
    # above the retrained one at 20 steps, not at 40
    ("text", (8, 4.1, 3), (1, 1, 1), (4, 4, 3.3), False),
])  # fmt: skip
def test_the_verdict_follows_its_rule(kind, unlearned, original, retrained, expected):
    result = result_of(kind, unlearned, original, retrained)
    assert lasts(result) is expected
    steps = 20 if unlearned[-1] == unlearned[0] else 20 * len(unlearned) - 20
    heads = {True: f"It lasts: {steps} steps", False: f"It does not last: {steps} steps"}
    assert sentence(result).startswith(heads.get(expected, "Whether it lasts is open"))
    assert not re.search(r" -\d|\d{3}%", sentence(result).replace(" 100%", "")), "0% to 100%"


@pytest.mark.parametrize(
    ("unlearned", "original", "expected", "head"),
    [
        ((0.0, 0.27, 0.0), (1.0, 0.9, 0.8), False, "It does not last: 5 steps"),
        ((0.0, 0.0, 0.0), (1.0, 0.6, 0.05), None, "Whether it lasts is open: the same steps"),
    ],
)
def test_each_measured_step_is_judged_and_few_steps_prove_nothing(
    unlearned, original, expected, head
):
    result = result_of("image", unlearned, original, at=(0, 5, 20))
    assert lasts(result) is expected
    assert sentence(result).startswith(head)


def test_steps_beyond_the_fortieth_decide_nothing():
    curves = (0.95,) * 3, (1.0,) * 3, (0.88, 0.87, 0.3)
    assert lasts(result_of("image", *curves, at=(0, 20, 80))) is True
    assert lasts(result_of("image", *curves, at=(0, 20, 40))) is None


@pytest.mark.parametrize(("unlearned", "original", "retrained", "words"), [
    # names the forgotten where a share of them comes back
    ((0.80, 0.81), (0.99, 0.99), None, "It lasts: * from 80% to 81%, 5% of the 19% forgotten."),
    ((0.80, 0.81), (0.99, 0.99), (0.80, 0.80), "It lasts: * to 81% (a model retrained without them: 80%)."),
    ((0.0, 0.003), SURE, None, "It lasts: * from 0% to 0.3%, 0.3% of the 100% forgotten."),
    ((0.57, 0.99), (0.90, 0.98), None, "It does not last: * from 57% to 99%, 100% of the 33% forgotten."),
    # a model that never saw the records does not remember them
    (SURE, SURE, None, "Whether it lasts is open: the model recognises 100% of the records before the "
     "attack, as one that never saw them may; give --retain_model."),
    (SURE, SURE, (0.0, 0.0), "* open: the model does as well on the forget set as the original does."),
    (SURE, None, (0.0, 0.0), "* open: the model recognises all of the forget set."),
    ((0.95, 0.93), SURE, (0.76, 0.76), "* open: the model recognises 95% of the records before the attack, "
     "the retain model 76%: too few were forgotten to tell."),
    # an original that keeps the records does not lose them
    ((0.96, 1.0), SURE, (0.98, 0.98), "Whether it lasts is open: after 20 steps the original recognises "
     "100% of them, the retrained model 98%."),
    ((0.0, 0.0), (0.98, 0.09), None, "Whether * too, from 98% to 9% in 20."),
])  # fmt: skip
def test_the_sentence_names_what_comes_back_or_why_it_is_open(
    unlearned, original, retrained, words
):
    found = sentence(result_of("image", unlearned, original, retrained))
    assert fnmatchcase(found, words), found


def test_robustness_compares_with_the_retain_model_and_with_the_weights_as_saved():
    def curve(*values, at=(0, 80)):
        return Outcome(at, {"recognised": tuple((value,) for value in values)})

    few = {"unlearned": curve(0.0, 0.8), "retrained": curve(0.0, 0.4)}
    rounded = {"unlearned": curve(0.2, 0.2, 0.6, at=(0, 8, 4))}
    found = robustness(AttackResult("image", {"relearn-few": few, "quantize": rounded}))
    assert found == {"R_recognised": pytest.approx(0.5), "Q_recognised": pytest.approx(0.5)}
    slower = few | {"unlearned": curve(0.0, 0.2)}
    assert robustness(AttackResult("image", {"relearn-few": slower})) == {"R_recognised": 1.0}


class MadeExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.down_proj = nn.Parameter(torch.randn(2, 8, 64))


@pytest.mark.parametrize("bits", [8, 4])
def test_all_kinds_of_layers_are_rounded_by_output_channel(bits, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "bitsandbytes", None)
        with pytest.raises(HamuError, match=r"pip install 'hamu\[quantize\]'"):
            AttackSettings("quantize").names("image")
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    transposed, linear, experts = Conv1D(16, 64), nn.Linear(64, 16, bias=False), MadeExperts()
    transposed.weight.data[:, 3] *= 1000
    linear.weight.data.copy_(transposed.weight.T)
    rounded = quantized(nn.ModuleList([transposed, linear, experts]), bits)
    assert torch.equal(rounded[0].weight, rounded[1].weight.T) or bits == 4
    for ours, original in zip(rounded, (transposed, linear, experts), strict=True):
        (new, old) = (next(one.parameters()).detach() for one in (ours, original))
        assert 0 < (new - old).norm() < 0.2 * old.norm()
    quiet = torch.arange(16) != 3  # channels, which the loud one leaves their own scale
    change = (rounded[1].weight - linear.weight)[quiet]
    assert change.norm() < 0.2 * linear.weight[quiet].norm()
    with pytest.raises(HamuError, match="has no linear or convolutional layer"):
        quantized(nn.Embedding(3, 4), bits)


def test_weights_in_4_bits_are_not_rounded_again_and_cost_no_other_attack(classifier, data):
    packed = deepcopy(classifier)
    packed[-1].packed = nn.Linear(2, 2)
    packed[-1].packed.weight = nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    found = attack(packed, data, replace(FEW_STEPS, attacks="relearn-retain,quantize"))
    assert list(found.outcomes) == ["relearn-retain"]
    assert found.skipped == {"quantize": "weights stored as uint8 cannot be rounded again"}


def test_quantization_rounds_what_an_adapter_makes_of_the_weights_but_for_the_embeddings():
    """PEFT keeps the old head beside the new one, and it may share its weight with the embeddings."""
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    model = new_language_model(new_tokenizer(["a b c"], 300), hidden=16, layers=1)
    settings = LoraConfig(
        target_modules="all-linear", modules_to_save=["lm_head"], r=2, init_lora_weights=False
    )
    adapted = get_peft_model(model, settings)
    rounded = quantized(adapted, 4)
    for name in ("get_input_embeddings", "get_output_embeddings"):
        old, new = (getattr(one, name)().weight for one in (adapted, rounded))
        assert torch.equal(old, new), name
    projection = adapted.get_submodule("base_model.model.model.layers.0.mlp.up_proj")
    meant = projection.weight + projection.get_delta_weight("default")
    error = rounded.get_submodule("model.layers.0.mlp.up_proj").weight - meant
    assert 0 < error.norm() < 0.2 * meant.norm()
