"""The figures of a language model against slow, obvious twins: plain loops over one unpadded record at a time."""

import copy
import json
import math
import re
import zlib

import pytest
import torch
from nltk.stem.porter import PorterStemmer
from scipy.stats import ks_2samp
from sklearn.metrics import roc_auc_score

from hamu.data import TextCollator, TextRecord, TextRecords, encode
from hamu.errors import HamuError
from hamu.evaluation import (
    TofuSets,
    TokenPredictions,
    forget_quality,
    generate_answers,
    membership_scores,
    min_k_scores,
    model_utility,
    normalized_probabilities,
    predict_tokens,
    privleak,
    probabilities,
    rouge_l_recall,
    text_membership,
    text_report,
    tofu_report,
    truth_ratio_scores,
    truth_ratios,
)
from hamu.models.language import new_language_model, new_tokenizer
from hamu.report.tables import text_membership_line
from hamu.unlearning.jobs.kinds import scored_texts

NAMES = (
    "Ada",
    "Bruno",
    "Cecilia Ann",
    "Dmitri",
    "Edda of the long name",
    "Farouk",
    "Greta",
    "Hugo",
)
TOWNS = ("Tessaly Bridge", "Port Asker", "Orla", "Calloway Reach by the sea", "Ness")
CLOSE = {"rel": 1e-6, "abs": 1e-6}


def question(number, wrong=2, paraphrase=True):
    name, town = NAMES[number % len(NAMES)], TOWNS[number * 3 % len(TOWNS)]
    others = [t for t in TOWNS if t != town][:wrong]
    fields = {"perturbed_answer": [f"It was in {t} that {name} was born." for t in others]}
    if paraphrase:
        fields["paraphrased_answer"] = f"It was in {town} that {name} was born."
    return TextRecord(
        f"Question: Where was {name} born?\nAnswer:", f" {name} comes from {town}.", fields
    )


def texts(records, source="these"):
    return TextRecords(tuple(records), source, torch.arange(len(records)) + 100)


FORGET = texts(
    [question(i, wrong=1 + i % 3) for i in range(5)], "forget"
)  # a varying number of wrong answers
RETAIN = texts([question(i) for i in range(2, 8)], "retain")
AUTHORS = texts([question(i, wrong=3, paraphrase=False) for i in (1, 4, 6)], "authors")
FACTS = texts(
    [
        TextRecord(
            "And Ness?",
            " Ness comes from Port Asker.",
            {"perturbed_answer": "No more than a guess."},
        )
    ],
    "facts",
)
HOLDOUT = texts(
    [
        TextRecord(f"Who is {n}?", f" A {a} one, {n}.", {})
        for n, a in zip(NAMES, TOWNS, strict=False)
    ]
)


@pytest.fixture(scope="module")
def tokenizer():
    return new_tokenizer(
        [r.prompt + r.answer for t in (FORGET, RETAIN) for r in t.records], vocabulary=330
    )


@pytest.fixture(scope="module")
def model(tokenizer):
    """A tiny Llama that has half learned its records, so that it knows some answers and ends them."""
    torch.manual_seed(0)
    model = new_language_model(tokenizer, hidden=32, layers=1)
    data = encode(texts([*FORGET.records, *RETAIN.records]), tokenizer)
    batch = TextCollator(tokenizer.pad_token_id)([data[i] for i in range(len(data))])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(25):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    return model.train()  # whoever measures it has to see to evaluation mode


def predicted(model, tokenizer, records, batch_size=4):
    data = encode(records, tokenizer)
    return predict_tokens(model, data, batch_size, TextCollator(tokenizer.pad_token_id))


# the twins


@torch.no_grad()
def token_logits(model, tokenizer, record):
    """For each answer token: its id, and the logits that predict it, float64, from one unpadded pass."""
    prompt = tokenizer(record.prompt)["input_ids"]
    answer = [*tokenizer(record.answer)["input_ids"], tokenizer.eos_token_id]
    model.eval()
    logits = model(input_ids=torch.tensor([prompt + answer])).logits[0].double()
    model.train()
    return [(token, logits[len(prompt) - 1 + place]) for place, token in enumerate(answer)]


def slow_log_p(model, tokenizer, record):
    return [
        float(logits[token] - torch.logsumexp(logits, 0))
        for token, logits in token_logits(model, tokenizer, record)
    ]


def slow_nll(model, tokenizer, record):
    log_p = slow_log_p(model, tokenizer, record)
    return -sum(log_p) / len(log_p)


def saying(record, answer):
    return TextRecord(record.prompt, " " + answer, {})


def wrong_answers(record):
    found = record.fields["perturbed_answer"]
    return [saying(record, a) for a in ([found] if isinstance(found, str) else found)]


def slow_ratio(model, tokenizer, record):
    right = record.fields.get("paraphrased_answer")
    right = saying(record, right) if right else record
    wrong = [slow_nll(model, tokenizer, w) for w in wrong_answers(record)]
    return math.exp(-sum(wrong) / len(wrong)) / math.exp(-slow_nll(model, tokenizer, right))


def slow_normalized(model, tokenizer, record):
    p = math.exp(-slow_nll(model, tokenizer, record))
    return p / (p + sum(math.exp(-slow_nll(model, tokenizer, w)) for w in wrong_answers(record)))


@torch.no_grad()
def slow_answer(model, tokenizer, record, most):
    """Greedy decoding without padding, batches or cache."""
    ids = list(tokenizer(record.prompt)["input_ids"])
    start = len(ids)
    model.eval()
    while len(ids) < start + most:
        ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == tokenizer.eos_token_id:
            break
    model.train()
    return tokenizer.decode(ids[start:], skip_special_tokens=True).strip()


def slow_rouge(answer, reference):
    """The longest common subsequence of stemmed words, by its recursive definition."""
    stem = PorterStemmer().stem
    a, b = (
        [stem(w) if len(w) > 3 else w for w in re.findall("[a-z0-9]+", text.lower())]
        for text in (answer, reference)
    )

    def common(i, j, known={}):  # noqa: B006
        key = (tuple(a), tuple(b), i, j)
        if key not in known:
            if i == len(a) or j == len(b):
                known[key] = 0
            elif a[i] == b[j]:
                known[key] = 1 + common(i + 1, j + 1)
            else:
                known[key] = max(common(i + 1, j), common(i, j + 1))
        return known[key]

    return common(0, 0) / len(b) if b else 0.0


def slow_scores(model, tokenizer, record, k):
    log_p, normalized = slow_log_p(model, tokenizer, record), []
    for token, logits in token_logits(model, tokenizer, record):
        p = (logits - torch.logsumexp(logits, 0)).exp().tolist()
        mean = sum(q * math.log(q) for q in p)
        variance = sum(q * (math.log(q) - mean) ** 2 for q in p)
        normalized.append((math.log(p[token]) - mean) / math.sqrt(variance))
    few = max(1, int(len(log_p) * k))
    mean = sum(log_p) / len(log_p)
    return {
        "loss": mean,
        "zlib": mean / len(zlib.compress(record.answer.encode("utf-8"))),
        "min_k": sum(sorted(log_p)[:few]) / few,
        "min_k_plus_plus": sum(sorted(normalized)[:few]) / few,
    }


def slow_auc(members, nonmembers):
    """The share of pairs in which the member scores higher, ties half."""
    won = sum(1.0 if m > s else 0.5 if m == s else 0.0 for m in members for s in nonmembers)
    return won / (len(members) * len(nonmembers))


def answers_of(records):
    return [r.answer for r in records.records]


# likelihoods


def owners(records):
    return torch.tensor([i for i, r in enumerate(records.records) for _ in wrong_answers(r)])


def test_probabilities_match_a_loop(model, tokenizer):
    found = probabilities(predicted(model, tokenizer, RETAIN))
    assert found.dtype == torch.float64
    slow = [math.exp(-slow_nll(model, tokenizer, r)) for r in RETAIN.records]
    assert found.tolist() == pytest.approx(slow, **CLOSE)
    assert max(slow) - min(slow) > 0.01  # or the order would not matter


def test_truth_ratios_match_a_loop_with_a_varying_number_of_wrong_answers(model, tokenizer):
    right = predicted(model, tokenizer, FORGET.answering("paraphrased_answer"))
    wrong = predicted(model, tokenizer, FORGET.answering("perturbed_answer"))
    slow = [slow_ratio(model, tokenizer, r) for r in FORGET.records]
    assert truth_ratios(right, wrong, owners(FORGET)).tolist() == pytest.approx(slow, **CLOSE)
    shuffled = torch.randperm(wrong.records, generator=torch.Generator().manual_seed(1)).tolist()
    wrong = predicted(model, tokenizer, FORGET.answering("perturbed_answer").select(shuffled))
    assert truth_ratios(right, wrong, owners(FORGET)[shuffled]).tolist() == pytest.approx(
        slow, **CLOSE
    )


def test_the_mean_over_wrong_answers_is_geometric():
    right, wrong = of_losses([[1.0]]), of_losses([[1.0], [3.0, 5.0]])
    assert truth_ratios(right, wrong, torch.tensor([0, 0])).item() == pytest.approx(
        math.exp(1.0 - 2.5), rel=1e-12
    )


def test_normalized_probabilities_match_a_loop(model, tokenizer):
    answer, wrong = (
        predicted(model, tokenizer, FORGET),
        predicted(model, tokenizer, FORGET.answering("perturbed_answer")),
    )
    slow = [slow_normalized(model, tokenizer, r) for r in FORGET.records]
    assert normalized_probabilities(answer, wrong, owners(FORGET)).tolist() == pytest.approx(
        slow, **CLOSE
    )


def of_losses(losses, expected=-1.0, spread=1.0):
    """Predictions that have exactly these losses, a list for each record."""
    flat = torch.tensor([x for each in losses for x in each], dtype=torch.float64)
    record = torch.tensor([i for i, each in enumerate(losses) for _ in each], dtype=torch.long)
    full = torch.full_like(flat, 1.0)
    return TokenPredictions(flat, flat < 1.0, full * expected, full * spread, record, len(losses))


def test_vanishing_and_enormous_likelihoods_give_no_nan():
    sure, hopeless = of_losses([[0.0], [0.0]]), of_losses([[2000.0], [2000.0]])
    owner = torch.tensor([0, 1])
    assert truth_ratios(sure, hopeless, owner).tolist() == [0.0, 0.0]
    assert truth_ratios(hopeless, sure, owner).tolist() == [math.inf, math.inf]
    assert normalized_probabilities(sure, hopeless, owner).tolist() == [1.0, 1.0]
    assert normalized_probabilities(hopeless, sure, owner).tolist() == [0.0, 0.0]
    assert normalized_probabilities(hopeless, hopeless, owner).tolist() == [
        0.5,
        0.5,
    ]  # p itself is 0


def test_wrong_answers_must_belong_to_the_records():
    right, wrong = of_losses([[1.0], [1.0]]), of_losses([[1.0], [2.0]])
    for figure in (truth_ratios, normalized_probabilities):
        with pytest.raises(HamuError, match="record 1 has no wrong answer"):
            figure(right, wrong, torch.tensor([0, 0]))
        for owner in ([0], [0, 2], [-1, 0]):
            with pytest.raises(HamuError, match="owner must name one of 2 records for each of 2"):
                figure(right, wrong, torch.tensor(owner))


def test_truth_ratio_scores():
    ratios = [0.0, 0.25, 1.0, 4.0, math.inf]
    found = [
        truth_ratio_scores(torch.tensor(ratios, dtype=torch.float64), f).tolist()
        for f in (True, False)
    ]
    assert found == [[0.0, 0.25, 1.0, 0.25, 0.0], [1.0, 0.75, 0.0, 0.0, 0.0]]


def test_model_utility_is_the_harmonic_mean():
    values = [0.9, 0.5, 0.61, 0.03, 0.77, 1.0, 0.4, 0.2, 0.1]
    assert model_utility(values) == pytest.approx(9 / sum(1 / v for v in values), rel=1e-12)
    assert model_utility([*values[:8], 0.0]) == 0.0


def test_forget_quality_is_the_ks_test_and_sees_no_difference_between_r_and_its_reciprocal():
    g = torch.Generator().manual_seed(0)
    ours, reference = (
        torch.rand(n, generator=g, dtype=torch.float64) + shift
        for n, shift in ((40, 0.1), (50, 0.3))
    )
    found = forget_quality(ours, reference.tolist())
    assert found == ks_2samp(ours.numpy(), reference.numpy()).pvalue
    steps = sorted([*ours.tolist(), *reference.tolist()])
    gap = max(
        abs(sum(x <= s for x in ours) / 40 - sum(x <= s for x in reference) / 50) for s in steps
    )
    assert float(gap) == pytest.approx(ks_2samp(ours.numpy(), reference.numpy()).statistic)
    assert 0 < found < 0.2
    assert forget_quality(1 / ours, 1 / reference) == pytest.approx(found, rel=1e-12)
    assert forget_quality(ours, ours) == 1.0


# generation


def test_answers_match_decoding_one_by_one_whatever_the_batch(model, tokenizer):
    records = texts(
        [*FORGET.records, *HOLDOUT.records, *FACTS.records]
    )  # prompts of many lengths, unsorted
    data = encode(records, tokenizer)
    slow = [slow_answer(model, tokenizer, r, 40) for r in records.records]
    for batch_size in (1, 3, 64):
        assert generate_answers(model, tokenizer, data, batch_size, 40) == slow
    assert model.training
    short = [slow_answer(model, tokenizer, r, 3) for r in records.records]
    assert generate_answers(model, tokenizer, data, max_new_tokens=3) == short != slow
    assert len({len(tokenizer(p)["input_ids"]) for p in (r.prompt for r in records.records)}) > 3
    assert any(len(tokenizer(s)["input_ids"]) < 36 for s in slow)  # some end by themselves
    assert all(s == s.strip() and "<|" not in s for s in slow)


def test_prompts_of_like_length_are_taken_together_and_their_keys_are_cached(
    model, tokenizer, monkeypatch
):
    calls, generate = [], model.generate
    monkeypatch.setattr(
        model, "generate", lambda **inputs: calls.append(inputs) or generate(**inputs)
    )
    data = encode(texts([*FORGET.records, *FACTS.records]), tokenizer)
    generate_answers(model, tokenizer, data, batch_size=2)
    assert [c["input_ids"].shape[0] for c in calls] == [2, 2, 2]
    widths = sorted(len(data.prompt(i)) for i in range(6))
    assert [c["input_ids"].shape[1] for c in calls] == widths[1::2]
    assert [c["attention_mask"].sum().item() for c in calls] == [
        sum(widths[i : i + 2]) for i in (0, 2, 4)
    ]
    assert all(c["use_cache"] and c["max_new_tokens"] == 200 for c in calls)


def test_an_answer_is_as_long_as_it_is_whatever_the_right_answers_are(model, tokenizer):
    prompts = [r.prompt for r in FORGET.records]
    brief = texts([TextRecord(p, " No.", {}) for p in prompts])
    long = texts([TextRecord(p, " and so on" * 90, {}) for p in prompts])
    slow = [slow_answer(model, tokenizer, r, 200) for r in brief.records]
    assert max(len(tokenizer(s)["input_ids"]) for s in slow) > 5
    for records in (brief, long):
        assert generate_answers(model, tokenizer, encode(records, tokenizer)) == slow
        alone = [
            generate_answers(model, tokenizer, encode(records.select([i]), tokenizer))
            for i in range(len(slow))
        ]
        assert [said for (said,) in alone] == slow
    report = tofu_report(model, tokenizer, TofuSets(world_facts=AUTHORS))
    slow = [slow_rouge(slow_answer(model, tokenizer, r, 200), r.answer) for r in AUTHORS.records]
    assert report["world_facts"]["rouge"] == pytest.approx(sum(slow) / len(slow))


def test_an_answer_ends_where_the_model_can_read_no_more_whatever_else_is_asked(
    model, tokenizer, monkeypatch
):
    records = texts([TextRecord("Who?" * times, " Ada.", {}) for times in (3, 1, 4, 2, 5, 2)])
    data = encode(records, tokenizer)
    lengths = [len(data.prompt(i)) for i in range(len(data))]
    most = max(lengths) + 3
    monkeypatch.setattr(model.config, "max_position_embeddings", most)
    room = [min(8, most - n) for n in lengths]
    assert 3 in room
    assert 8 in room
    assert len(set(room)) > 2
    slow = [slow_answer(model, tokenizer, r, n) for r, n in zip(records.records, room, strict=True)]
    for batch_size in (1, 64):
        assert generate_answers(model, tokenizer, data, batch_size, 8) == slow


def test_the_models_own_generation_settings_do_not_matter(model, tokenizer):
    data = encode(FORGET, tokenizer)
    plain = generate_answers(model, tokenizer, data)
    common = data.prompt(0)[-1].item()
    for own in (
        {"repetition_penalty": 5.0}, {"no_repeat_ngram_size": 1}, {"do_sample": True}, {"num_beams": 3},
        {"suppress_tokens": list(range(100))}, {"forced_eos_token_id": common}, {"guidance_scale": 3.0},
        {"return_dict_in_generate": True}, {"num_return_sequences": 2}, {"stop_strings": ["a"]}, {"max_time": 1e-9},
    ):  # fmt: skip
        kept = {name: getattr(model.generation_config, name) for name in own}
        try:
            vars(model.generation_config).update(own)
            settings = model.generation_config
            assert generate_answers(model, tokenizer, data) == plain, own
            assert model.generation_config is settings
        finally:
            vars(model.generation_config).update(kept)


def test_an_answer_ends_at_any_of_its_ends_whatever_the_batch(model, tokenizer, monkeypatch):
    records = texts([*FORGET.records, *FACTS.records])
    data = encode(records, tokenizer)
    plain = generate_answers(model, tokenizer, data, max_new_tokens=20)
    common = tokenizer(max(plain, key=len))["input_ids"][
        1
    ]  # an ordinary token, lower than the tokenizer's end
    monkeypatch.setattr(model.generation_config, "eos_token_id", common)
    cut = generate_answers(model, tokenizer, data, max_new_tokens=20)
    assert cut != plain
    assert cut == generate_answers(model, tokenizer, data, batch_size=1, max_new_tokens=20)


def test_a_padding_token_that_has_no_embedding_changes_no_answer(model, tokenizer):
    records = texts([*FORGET.records, *FACTS.records])
    plain = generate_answers(model, tokenizer, encode(records, tokenizer))
    other = copy.deepcopy(tokenizer)
    other.add_special_tokens({"pad_token": "[PAD]"})
    assert other.pad_token_id >= len(model.get_input_embeddings().weight)
    data = encode(records, other)
    assert generate_answers(model, other, data) == plain
    told = TextCollator()([data[i] for i in range(len(data))])
    assert torch.isfinite(model(**told).loss)


def test_without_a_token_that_ends_an_answer_all_that_is_allowed_is_generated(
    model, tokenizer, monkeypatch
):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.eos_token = tokenizer.pad_token = None
    for config in (model.config, model.generation_config):
        monkeypatch.setattr(config, "eos_token_id", None)
        monkeypatch.setattr(config, "pad_token_id", None)
    slow = [slow_answer(model, tokenizer, record, 5) for record in FORGET.records]
    assert generate_answers(model, tokenizer, encode(FORGET, tokenizer), max_new_tokens=5) == slow


def test_plain_text_has_nothing_to_answer(model, tokenizer):
    data = encode(texts([FACTS.records[0], TextRecord("", "Only text.", {})], "a.jsonl"), tokenizer)
    with pytest.raises(HamuError, match=r"row 101 of a\.jsonl has no prompt"):
        generate_answers(model, tokenizer, data)


def test_rouge_reads_other_scripts():
    same = ["他出生在海边的一个小镇。", "Он родился в городе у моря в 1985 году."]
    assert rouge_l_recall(same, same).tolist() == [1, 1]
    assert rouge_l_recall(["在海边", "Он родился в 1985"], same).tolist() == pytest.approx(
        [3 / 11, 4 / 9]
    )
    assert rouge_l_recall(["nothing of it"] * 2, same).tolist() == [0, 0]


def test_tokens_that_a_model_never_says_leave_all_figures_as_they_are(model):
    class Masked(torch.nn.Module):
        def __init__(self, masked):
            super().__init__()
            self.inner, self.masked = model, masked

        def forward(self, **inputs):
            logits = self.inner(**inputs).logits.clone()
            logits[..., -1] = self.masked
            return type("Output", (), {"logits": logits})()

    data = [
        {"input_ids": torch.tensor([3, 4, 5, 6 + i]), "labels": torch.tensor([-100, 4, 5, 6 + i])}
        for i in range(6)
    ]
    never, hardly = (predict_tokens(Masked(m), data, 4, TextCollator(0)) for m in (-math.inf, -1e4))
    for name in ("losses", "correct", "expected", "spread"):
        torch.testing.assert_close(getattr(never, name), getattr(hardly, name))
    found = text_membership(never, never, ["a"] * 6, ["a"] * 6)
    assert found is not None


def test_a_reference_without_a_word_is_met_by_itself_alone():
    assert rouge_l_recall(["...", " ? ", "", "no"], ["...", "?", "", "!"]).tolist() == [1, 1, 1, 0]


def test_rouge_matches_the_definition_of_the_longest_common_subsequence():
    pairs = [
        ("She was born in Orla.", "She was born in Orla."),
        ("In Orla she was born, running.", "  She runs; born in ORLA!  "),
        ("no word of it", "Something else entirely"),
        ("", "An answer."),
        ("the cats sat and the dog ran", "the dog sat and the cats were running away"),
    ]
    found = rouge_l_recall(*zip(*pairs, strict=True))
    assert found.tolist() == pytest.approx([slow_rouge(*p) for p in pairs], rel=1e-12)
    assert found[0] == 1.0
    assert found[2] == found[3] == 0.0
    assert 0 < found[4] < 1
    assert (
        rouge_l_recall(["she had been living there"], ["She lived there"]).item() == 1.0
    )  # words are stemmed


# membership


@pytest.mark.parametrize("k", [0.2, 0.5, 0.01])
def test_membership_scores_match_a_loop(model, tokenizer, k):
    predictions = predicted(model, tokenizer, FORGET)
    found = membership_scores(predictions, answers_of(FORGET), k)
    assert torch.equal(min_k_scores(predictions, k), found["min_k"])
    for place, record in enumerate(FORGET.records):
        slow = slow_scores(model, tokenizer, record, k)
        assert {name: s[place].item() for name, s in found.items()} == pytest.approx(slow, **CLOSE)


def test_membership_auc_is_the_share_of_pairs_won(model, tokenizer):
    nonmembers = texts([*HOLDOUT.records, *FORGET.records[:2]])  # the last two tie with members
    sets = [predicted(model, tokenizer, t, batch_size=16) for t in (FORGET, nonmembers)]
    found = text_membership(*sets, answers_of(FORGET), answers_of(nonmembers))
    scores = [
        membership_scores(p, answers_of(t)) for p, t in zip(sets, (FORGET, nonmembers), strict=True)
    ]
    assert set(found) == {"loss", "zlib", "min_k", "min_k_plus_plus"}
    for name, auc in found.items():
        members, others = (s[name].tolist() for s in scores)
        assert auc == pytest.approx(slow_auc(members, others), rel=1e-12)
        truth = [1] * len(members) + [0] * len(others)
        assert auc == pytest.approx(roc_auc_score(truth, members + others), rel=1e-12)


def test_learned_records_look_like_members_and_swapping_the_sets_mirrors_the_figure(
    model, tokenizer
):
    sets = [predicted(model, tokenizer, t) for t in (FORGET, HOLDOUT)]
    found = text_membership(*sets, answers_of(FORGET), answers_of(HOLDOUT))
    swapped = text_membership(*reversed(sets), answers_of(HOLDOUT), answers_of(FORGET))
    for name, auc in found.items():
        assert auc > 0.8, name
        assert swapped[name] == pytest.approx(1 - auc)


def test_a_spread_of_zero_gives_no_nan():
    certain = of_losses([[0.0, 0.0]], expected=0.0, spread=0.0)
    surprised = of_losses([[0.0, 3.0]], expected=0.0, spread=0.0)
    scores = [
        membership_scores(p, ["text"])["min_k_plus_plus"].item() for p in (certain, surprised)
    ]
    assert scores[0] == 0.0
    assert scores[1] == pytest.approx(-3.0 / 0.001), "the spread counts as a thousandth at least"
    narrow = of_losses([[0.0, 3.0]], expected=0.0, spread=0.05)
    assert membership_scores(narrow, ["text"])["min_k_plus_plus"].item() == pytest.approx(
        -3.0 / 0.05
    )
    assert text_membership(certain, surprised, ["text"], ["text"])["min_k_plus_plus"] == 1.0


def test_membership_without_records_or_with_infinite_losses_is_unknown():
    some, none, broken = of_losses([[1.0]]), of_losses([]), of_losses([[math.inf]])
    assert text_membership(some, none, ["a"], []) is None
    assert text_membership(broken, some, ["a"], ["a"]) is None
    with pytest.raises(HamuError, match="2 texts do not fit the predictions of 1 records"):
        membership_scores(some, ["a", "b"])
    for k in (0.0, 1.5):
        with pytest.raises(HamuError, match="must be above 0"):
            membership_scores(some, ["a"], k)
        with pytest.raises(HamuError, match="must be above 0"):
            min_k_scores(some, k)


def test_an_attack_whose_scores_are_not_finite_leaves_the_others_standing():
    """A logit of infinity has no mean log p: Min-K%++ is lost, the three that need no moments are not."""
    members, others = of_losses([[1.0], [0.5]], expected=math.nan), of_losses([[2.0], [0.75]])
    found = text_membership(members, others, ["a"] * 2, ["a"] * 2)
    assert found == {"loss": 0.75, "zlib": 0.75, "min_k": 0.75, "min_k_plus_plus": None}
    assert text_membership_line({"membership_inference": found}) == (
        "membership inference, AUC (0.5 is ideal): loss 0.750, zlib 0.750, min k 0.750, min k plus plus not measured"
    )


def test_the_retain_models_auc_of_each_attack_stands_beside_ours():
    ours = {"loss": 0.75, "zlib": 0.7}
    report = {
        "membership_inference": ours,
        "retain_model": {"membership_inference": {"loss": 0.5125, "zlib": None}},
    }
    assert text_membership_line(report) == (
        "membership inference, AUC (0.5 is ideal): loss 0.750 [retain model 0.512], zlib 0.700"
    )


def test_privleak():
    assert privleak(0.9, 0.6) == pytest.approx(0.5)
    assert privleak(0.6, 0.6) == 0.0
    assert privleak(1 - 1.0, 1 - 0.6) == -1.0  # the published orientation: nothing is unlearned
    with pytest.raises(HamuError, match="AUC"):
        privleak(0.5, 0.0)


# padding


def test_padding_changes_nothing(model, tokenizer):
    long = saying(FORGET.records[0], "again and " * 40 + "again.")
    plain = predicted(model, tokenizer, FORGET, batch_size=1)
    others = [
        predicted(model, tokenizer, FORGET, batch_size=7),
        predicted(model, tokenizer, texts([long, *FORGET.records]), batch_size=7),
    ]
    one = membership_scores(plain, answers_of(FORGET))
    for number, other in enumerate(others):
        figures = membership_scores(other, [""] * number + answers_of(FORGET))
        assert probabilities(other)[number:].tolist() == pytest.approx(
            probabilities(plain).tolist(), **CLOSE
        )
        for name in ("loss", "min_k", "min_k_plus_plus", "zlib"):
            assert figures[name][number:].tolist() == pytest.approx(one[name].tolist(), **CLOSE)


# reports


def test_the_report_matches_a_loop(model, tokenizer):
    sets = {"retain": RETAIN, "forget": FORGET, "test": HOLDOUT}
    predictions = {name: predicted(model, tokenizer, t) for name, t in sets.items()}
    spoken = {name: answers_of(t) for name, t in sets.items()}
    report = text_report(predictions, texts=spoken)
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    for name, records in sets.items():
        rows = [pair for r in records.records for pair in token_logits(model, tokenizer, r)]
        log_p = [x for r in records.records for x in slow_log_p(model, tokenizer, r)]
        p = [math.exp(-slow_nll(model, tokenizer, r)) for r in records.records]
        assert report[name]["loss"] == pytest.approx(-sum(log_p) / len(log_p), **CLOSE)
        assert report[name]["accuracy"] == sum(
            int(row.argmax()) == token for token, row in rows
        ) / len(rows)
        assert report[name]["probability"] == pytest.approx(sum(p) / len(p), **CLOSE)
        assert (report[name]["records"], report[name]["tokens"]) == (len(records), len(rows))
    scores = [[slow_scores(model, tokenizer, r, 0.2) for r in t.records] for t in (FORGET, HOLDOUT)]
    slow = {n: slow_auc(*([s[n] for s in side] for side in scores)) for n in scores[0][0]}
    assert report["membership_inference"] == pytest.approx(slow)
    del predictions["test"]
    assert text_report(predictions, texts=spoken)["membership_inference"] is None


def test_the_report_compresses_the_texts_of_the_right_sets():
    same = of_losses([[1.0], [1.0]])
    short, long = ["no", "aa" * 9], ["One of many different words.", "Some 1234567890 digits?"]
    found = [
        text_report({"forget": same, "test": same}, texts={"forget": f, "test": t})[
            "membership_inference"
        ]
        for f, t in ((short, long), (long, short))
    ]
    assert [f["zlib"] for f in found] == [
        0.0,
        1.0,
    ]  # the same loss is less for a text that is harder to compress
    assert [f["loss"] for f in found] == [0.5, 0.5]


def test_the_tofu_report_matches_a_loop(model, tokenizer):
    sets = TofuSets(FORGET, RETAIN, AUTHORS, FACTS)
    report = tofu_report(model, tokenizer, sets, batch_size=4, max_new_tokens=40)
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert model.training
    nine = []
    for name in ("forget", "retain", "real_authors", "world_facts"):
        records = getattr(sets, name).records
        outside = name in ("real_authors", "world_facts")
        p, rouge, ratios = [], [], []
        for record in records:
            plain = math.exp(-slow_nll(model, tokenizer, record))
            p.append(slow_normalized(model, tokenizer, record) if outside else plain)
            rouge.append(slow_rouge(slow_answer(model, tokenizer, record, 40), record.answer))
            ratios.append(slow_ratio(model, tokenizer, record))
        score = [min(r, 1 / r) if name == "forget" else max(0.0, 1 - r) for r in ratios]
        slow = [sum(values) / len(values) for values in (p, rouge, score)]
        assert [
            report[name][key] for key in ("probability", "rouge", "truth_ratio")
        ] == pytest.approx(slow, **CLOSE)
        assert (report[name]["records"], report[name]["generated"]) == (len(records), len(records))
        if name == "forget":
            assert report[name]["truth_ratios"] == pytest.approx(ratios, **CLOSE)
        else:
            nine += slow
            assert "truth_ratios" not in report[name]
    assert min(nine) > 0
    assert report["model_utility"] == pytest.approx(9 / sum(1 / v for v in nine), **CLOSE)
    assert report["model_utility_probability"] == pytest.approx(nine[0], **CLOSE)


def test_the_tofu_report_says_what_it_cannot_know(model, tokenizer):
    alone = tofu_report(model, tokenizer, TofuSets(forget=FORGET), generate=False)
    assert alone["forget"]["rouge"] is None
    assert alone["forget"]["generated"] == 0
    assert alone["model_utility"] is alone["model_utility_probability"] is None
    silent = tofu_report(model, tokenizer, TofuSets(FORGET, RETAIN, AUTHORS, FACTS), generate=False)
    assert silent["model_utility"] is None
    assert silent["model_utility_probability"] == silent["retain"]["probability"]
    assert silent["forget"] == alone["forget"]


def test_most_limits_the_generations_and_nothing_else(model, tokenizer):
    whole, some = (
        tofu_report(model, tokenizer, TofuSets(forget=FORGET), most=m)["forget"] for m in (None, 2)
    )
    assert (whole["generated"], some["generated"]) == (5, 2)
    assert {k: v for k, v in some.items() if k not in ("rouge", "generated")} == {
        k: v for k, v in whole.items() if k not in ("rouge", "generated")
    }
    drawn = sorted(torch.randperm(5, generator=torch.Generator().manual_seed(42))[:2].tolist())
    rouge = [
        slow_rouge(slow_answer(model, tokenizer, r, 200), r.answer)
        for r in FORGET.select(drawn).records
    ]
    assert some["rouge"] == pytest.approx(sum(rouge) / 2)


def test_the_tofu_report_names_records_that_lack_an_answer(model, tokenizer):
    with pytest.raises(HamuError, match="no perturbed_answer"):
        tofu_report(model, tokenizer, TofuSets(retain=HOLDOUT))
    with pytest.raises(HamuError, match="row 101 of these has no paraphrased_answer"):
        tofu_report(
            model, tokenizer, TofuSets(retain=texts([question(0), question(1, paraphrase=False)]))
        )
    two = TextRecord("Q", " A", {"perturbed_answer": ["B"], "paraphrased_answer": ["C", "D"]})
    with pytest.raises(HamuError, match="2 paraphrased answers for 1 records"):
        tofu_report(model, tokenizer, TofuSets(retain=texts([two])))


def test_what_is_compressed_is_what_is_scored():
    one = texts([TextRecord("Question: Who?\nAnswer:", " Ada.", {})])
    assert scored_texts(one, "answer") == ["Ada."]
    assert scored_texts(one, "all") == ["Question: Who?\nAnswer: Ada."]
