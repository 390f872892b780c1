"""Memorization of texts, and gibberish, against slow twins and known answers."""

import math
import random
from collections import Counter

import pytest
import torch
from small_models import text_records, token_predictions

from hamu.data import TextRecord, encode, read_text
from hamu.evaluation import open_unlearning
from hamu.evaluation.answers import rouge_l
from hamu.evaluation.memorization import (
    exact_memorization,
    extraction_strength,
    gibberish,
    knowmem,
    verbmem,
)
from hamu.models.language import new_language_model, new_tokenizer

TEXTS = [record.answer for record in read_text("miniature").records]


def test_extraction_strength_counts_the_right_tokens_at_the_end():
    losses = [0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 1, 0, 0], [0], [1]  # 1: wrong
    found = token_predictions(losses)
    assert extraction_strength(found).tolist() == [1.0, 0.75, 0.0, 0.5, 1.0, 0.0]
    assert exact_memorization(found).tolist() == [1.0, 0.75, 0.75, 0.75, 1.0, 0.0]


@pytest.fixture(scope="module")
def tokenizer():
    return new_tokenizer(TEXTS, vocabulary=330)


def test_knowmem_takes_the_first_32_tokens_of_an_answer(tokenizer):
    answer = " ".join(TEXTS)
    ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
    cut = tokenizer.decode(ids[:32])
    assert len(ids) > 32
    found = knowmem([answer, "Ness", ""], [TEXTS[0], "Ness", "Ness"], tokenizer).tolist()
    assert found == [rouge_l([cut], [TEXTS[0]], "fmeasure").item(), 1.0, 0.0]


def test_knowmem_leaves_out_the_questions_that_a_model_goes_on_with(tokenizer):
    """As MUSE's get_prefix_before_words_occur does: a model that was not tuned to end runs on."""
    runs_on = ["\nQuestion: Who?", "\n\nWho?", " Question: Who?\nAnswer: Ness"]
    answers = [f"Ness{more}" for more in ("", "\nWho?", *runs_on)]
    found = knowmem(answers, ["Ness"] * len(answers), tokenizer)
    assert found.tolist() == pytest.approx([1.0, 2 / 3, 1.0, 1.0, 1.0])


def test_verbmem_continues_half_of_a_text_and_all_of_a_longer_prompt(tokenizer):
    """Against a loop over single records that calls the model for each token."""
    torch.manual_seed(0)
    model = new_language_model(tokenizer, hidden=32, layers=1)
    data = [TextRecord("", text, {}) for text in TEXTS[:3]]
    data += [TextRecord(TEXTS[3] + TEXTS[4], " Ness.", {}), TextRecord("", "a", {})]
    encoded = encode(text_records(*data), tokenizer)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(40):
        for ids in encoded.tokens:
            optimizer.zero_grad()
            model(input_ids=ids[None].long(), labels=ids[None].long()).loss.backward()
            optimizer.step()
    slow, lengths = [], []
    model.eval()
    for ids, start in zip(encoded.tokens, encoded.scored_from, strict=True):
        begin = max(start, len(ids) // 2)
        lengths.append(begin - start)
        said = ids[:begin].tolist()
        while len(said) < begin + 128 and said[-1] != tokenizer.eos_token_id:
            with torch.no_grad():
                said.append(int(model(input_ids=torch.tensor([said])).logits[0, -1].argmax()))
        spoken = [tokenizer.decode(one[begin:], skip_special_tokens=True) for one in (said, ids)]
        slow.append(rouge_l([spoken[0]], [spoken[1]], "fmeasure").item())
    assert lengths[0] > 0 == lengths[3]
    found = verbmem(model, tokenizer, encoded, batch_size=2)
    assert found.tolist() == pytest.approx(slow)
    assert max(slow[:3]) > 0.5, "it knows some by heart"


def slow_gain(text, texts):
    """Log likelihood of a text's characters given the two before, over that of each alone."""
    everything = [f"\n\n{one.strip()}\n" for one in texts]
    places = [(one, i) for one in everything for i in range(2, len(one))]
    shown = f"\n\n{text.strip()}\n"
    gain, signs = 0.0, {one[i] for one, i in places} | {None}  # and one for all others
    often = Counter(one[i] for one, i in places)
    single = {sign: (often[sign] + 1) / (len(places) + len(signs)) for sign in signs}
    for i in range(2, len(shown)):
        chances = single
        for n in (1, 2):
            after = Counter(o[j] for o, j in places if o[j - n : j] == shown[i - n : i])
            if after:
                chances = {s: (p + after[s] / after.total()) / 2 for s, p in chances.items()}
        assert sum(chances.values()) == pytest.approx(1.0)
        sign = shown[i] if shown[i] in signs else None
        gain += math.log(chances[sign]) - math.log(single[sign])
    return gain


def test_gibberish_is_told_from_language_by_form():
    drawn = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    noise = [" ".join("".join(drawn.choices(letters, k=6)) for _ in range(8)) for _ in range(20)]
    known, unseen = TEXTS[:200], TEXTS[200:]
    assert gibberish(noise, known) == 1.0
    assert gibberish(["the the the the the the", "", "...", " \n"], known) == 1.0
    assert gibberish(unseen, known) == 0.0
    assert gibberish(["I don't know.", "Sorry, no idea at all", "Ness", "1985"], known) == 0.0
    assert gibberish([*noise, *unseen[:20]], known) == 0.5
    assert gibberish(["Ness"], TEXTS[:19]) is None
    few = [text[:12] for text in unseen]
    assert gibberish(few, TEXTS[:20]) == 0.0, "too few texts to tell short answers"
    assert gibberish(noise, TEXTS[:20]) == 1.0
    mixed = [drawn.sample(unseen[n], 14) for n in range(10)]
    mixed = ["".join(one).strip() + "." for one in mixed]
    slow = [slow_gain(text, known) <= 0 for text in mixed]
    assert 0 < sum(slow) < 10
    assert [gibberish([text], known) for text in mixed] == slow
    foreign = f"{unseen[0]} {'☃' * 40}"  # after which the texts say nothing of what follows
    assert gibberish([foreign], known) == (slow_gain(foreign, known) <= 0) == 0.0


def test_open_unlearning_has_its_keys_and_units_and_none_without_a_figure():
    sets = {n: {"probability": p, "rouge": p / 2, "truth_ratio": p / 4, "truth_ratios": []}
            for n, p in (("forget", 0.1), ("retain", 0.2), ("real_authors", 0.3), ("world_facts", 0.4))}  # fmt: skip
    report = {"forget": {"probability": 0.8}, "retain": {"probability": 0.9}, "privleak": -0.25}
    report |= {"membership_inference": None, "metrics": {"gibberish": 0.25, "forget_rouge": 0.7}}
    tofu = {"model_utility": 0.5, "forget_quality": 0.01, "model_utility_probability": 0.2}
    expected = {"privleak": -25.0, "forget_Q_A_gibberish": 0.75, "forget_truth_ratio": 0.025}
    expected |= {"forget_Q_A_Prob": 0.1, "forget_Q_A_ROUGE": 0.05}  # of TOFU's own sets
    expected |= {"model_utility": 0.5, "forget_quality": 0.01}
    for short, p in (("retain", 0.2), ("ra", 0.3), ("wf", 0.4)):
        probability = "Prob" if short == "retain" else "Prob_normalised"
        expected |= {f"{short}_Q_A_{probability}": p, f"{short}_Q_A_ROUGE": p / 2}
        expected[f"{short}_Truth_Ratio"] = p / 4
    assert open_unlearning(report | {"tofu": sets | tofu}) == expected
