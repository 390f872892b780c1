"""Figures of a language model against slow, obvious twins: one unpadded record at a time."""

import copy
import json
import math
import zlib
from dataclasses import replace
from statistics import fmean as mean

import pytest
import torch
from scipy.stats import ks_2samp
from sklearn.metrics import roc_auc_score
from small_models import token_predictions
from transformers import MixtralConfig, MixtralForCausalLM, RwkvConfig, RwkvForCausalLM

from hamu.data import TextRecord, TextRecords, collate, encode
from hamu.errors import HamuError
from hamu.evaluation import (
    exact_memorization,
    extraction_strength,
    forget_quality,
    generate_answers,
    predict_tokens,
    privleak,
    rouge_l,
    text_membership,
    text_report,
    tofu_report,
)
from hamu.evaluation.answers import normalized_probabilities, truth_ratio_scores, truth_ratios
from hamu.evaluation.membership import gradient_scores, membership_scores
from hamu.models.language import new_language_model, new_tokenizer
from hamu.unlearning.jobs.tasks import cut_texts, scored_texts

NAMES = ["Ada", "Bruno", "Cecilia Ann", "Dmitri", "Edda of the long name"]
NAMES += ["Farouk", "Greta", "Hugo"]
TOWNS = ["Tessaly Bridge", "Port Asker", "Orla", "Calloway Reach by the sea", "Ness"]
ATTACKS = ("loss", "zlib", "min_k", "min_k_40", "min_k_plus_plus", "min_k_plus_plus_40")
CLOSE = {"rel": 1e-6, "abs": 1e-6}


def question(number, wrong=2, paraphrase=True):
    name, town = NAMES[number % len(NAMES)], TOWNS[number * 3 % len(TOWNS)]
    others = [t for t in TOWNS if t != town][:wrong]
    fields = {"perturbed_answer": [f"It was in {t} that {name} was born." for t in others]}
    if paraphrase:
        fields["paraphrased_answer"] = f"It was in {town} that {name} was born."
    prompt = f"Question: Where was {name} born?\nAnswer:"
    return TextRecord(prompt, f" {name} comes from {town}.", fields)


def texts(records, source="these"):
    return TextRecords(tuple(records), source, torch.arange(len(records)) + 100)


FORGET = texts([question(i, wrong=1 + i % 3) for i in range(5)], "forget")
RETAIN = texts([question(i) for i in range(2, 8)], "retain")
AUTHORS = texts([question(i, wrong=3, paraphrase=False) for i in (1, 4, 6)], "authors")
GUESS = {"perturbed_answer": "No more than a guess."}
FACTS = texts([TextRecord("And Ness?", " Ness comes from Port Asker.", GUESS)], "facts")
SETS = {"forget": FORGET, "retain": RETAIN, "real_authors": AUTHORS, "world_facts": FACTS}
WHO = zip(NAMES[: len(TOWNS)], TOWNS, strict=True)
HOLDOUT = texts([TextRecord(f"Who is {n}?", f" A {a} one, {n}.", {}) for n, a in WHO])


@pytest.fixture(scope="module")
def tokenizer():
    written = [r.prompt + r.answer for t in (FORGET, RETAIN) for r in t.records]
    return new_tokenizer(written, vocabulary=330)


@pytest.fixture(scope="module")
def model(tokenizer):
    """Tiny Llama that has half learned its records, so that it knows and ends some answers."""
    torch.manual_seed(0)
    model = new_language_model(tokenizer, hidden=32, layers=1)
    data = encode(texts([*FORGET.records, *RETAIN.records]), tokenizer)
    batch = collate([data[i] for i in range(len(data))])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(25):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    return model.train()  # whoever measures it has to see to evaluation mode


def predicted(model, tokenizer, records, batch_size=4):
    return predict_tokens(model, encode(records, tokenizer), batch_size)


def token_logits(model, tokenizer, record):
    """Each answer token's id, and the float64 logits that predict it, from one unpadded pass."""
    prompt = tokenizer(record.prompt)["input_ids"]
    answer = [*tokenizer(record.answer)["input_ids"], tokenizer.eos_token_id]
    model.eval()
    logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    model.train()
    return list(zip(answer, logits.double(), strict=True))


def slow_log_p(model, tokenizer, record):
    pairs = token_logits(model, tokenizer, record)
    return [float(logits[token] - torch.logsumexp(logits, 0)) for token, logits in pairs]


def slow_nll(model, tokenizer, record):
    return -mean(slow_log_p(model, tokenizer, record))


def slow_tofu(model, tokenizer, record):
    """p of the answer, the same normalised by the wrong ones, and the truth ratio R."""

    def nll(answer):
        return slow_nll(model, tokenizer, TextRecord(record.prompt, " " + answer, {}))

    wrong, right = (record.fields.get(f"{kind}_answer") for kind in ("perturbed", "paraphrased"))
    others = [nll(answer) for answer in ([wrong] if isinstance(wrong, str) else wrong)]
    own = slow_nll(model, tokenizer, record)
    normalized = math.exp(-own) / (math.exp(-own) + sum(math.exp(-other) for other in others))
    return math.exp(-own), normalized, math.exp((nll(right) if right else own) - mean(others))


@torch.no_grad()
def slow_answer(model, tokenizer, record, most):
    ids = list(tokenizer(record.prompt)["input_ids"])
    start = len(ids)
    model.eval()
    while len(ids) < start + most:
        ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == tokenizer.eos_token_id:
            break
    model.train()
    return tokenizer.decode(ids[start:], skip_special_tokens=True).strip()


def slow_scores(model, tokenizer, record):
    log_p, normalized = slow_log_p(model, tokenizer, record), []
    for token, logits in token_logits(model, tokenizer, record):
        p = (logits - torch.logsumexp(logits, 0)).exp().tolist()
        centre = sum(q * math.log(q) for q in p)
        variance = sum(q * (math.log(q) - centre) ** 2 for q in p)
        normalized.append((math.log(p[token]) - centre) / math.sqrt(variance))

    def lowest(values, k):
        return mean(sorted(values)[: max(1, int(len(values) * k))])

    return {
        "loss": mean(log_p),
        "zlib": mean(log_p) / len(zlib.compress(record.answer.strip().encode())),
        "min_k": lowest(log_p, 0.2),
        "min_k_40": lowest(log_p, 0.4),
        "min_k_plus_plus": lowest(normalized, 0.2),
        "min_k_plus_plus_40": lowest(normalized, 0.4),
    }


def test_vanishing_and_enormous_likelihoods_give_no_nan():
    sure, hopeless = token_predictions([[0.0], [0.0]]), token_predictions([[2000.0], [2000.0]])
    owner = torch.tensor([0, 1])
    assert truth_ratios(sure, hopeless, owner).tolist() == [0.0, 0.0]
    assert truth_ratios(hopeless, sure, owner).tolist() == [math.inf, math.inf]
    assert normalized_probabilities(sure, hopeless, owner).tolist() == [1.0, 1.0]
    assert normalized_probabilities(hopeless, sure, owner).tolist() == [0.0, 0.0]
    assert normalized_probabilities(hopeless, hopeless, owner).tolist() == [0.5, 0.5], "0 / 0"


def test_figures_of_records_follow_their_definitions():
    ratios = torch.tensor([0.0, 0.25, 1.0, 4.0, math.inf], dtype=torch.float64)
    assert truth_ratio_scores(ratios, True).tolist() == [0.0, 0.25, 1.0, 0.25, 0.0]
    assert truth_ratio_scores(ratios, False).tolist() == [1.0, 0.75, 0.0, 0.0, 0.0]
    ours, reference = ratios[:4] + 0.1, ratios[1:4] + 0.3
    assert forget_quality(ours, reference.tolist()) == ks_2samp(ours, reference).pvalue
    assert forget_quality(1 / ours, 1 / reference) == pytest.approx(forget_quality(ours, reference))
    assert privleak(0.9, 0.6) == pytest.approx(0.5)
    assert privleak(1 - 1.0, 1 - 0.6) == -1.0, "the published orientation: nothing is unlearned"
    one = texts([TextRecord("Question: Who?\nAnswer:", " Ada.", {})])
    assert scored_texts(one, "answer") == ["Ada."], "what zlib compresses"
    assert scored_texts(one, "all") == ["Question: Who?\nAnswer: Ada."]


def test_a_text_is_cut_where_its_predictions_end():
    """A text that was read stays uncut, though it has more tokens without the space before it."""
    tokenizer = new_tokenizer(["Who? Adalbert wrote", "Who? Adalbert read"] * 9, vocabulary=300)
    one = texts([TextRecord("Who?", " Adalbert wrote.", {})])
    data = encode(one, tokenizer)
    scored = data[0]["input_ids"][data.scored_from[0] :].tolist()
    assert len(tokenizer("Adalbert wrote.")["input_ids"]) > len(scored)
    for loss_on, more, whole in (("answer", 0, ""), ("all", data.scored_from[0] - 1, "Who? ")):
        whole += "Adalbert wrote."
        assert cut_texts(one, tokenizer, loss_on, [len(scored) + more]) == [whole]
        (cut,) = cut_texts(one, tokenizer, loss_on, [len(scored) + more - 2])
        assert cut == whole.removesuffix(".")


def test_the_scored_text_of_a_conversation_is_what_the_template_writes():
    """Cut or not: a text without its roles beside one with them would look as if it said less."""
    tokenizer = new_tokenizer(["[user] Who? [assistant] Ada wrote it"] * 9, vocabulary=300)
    tokenizer.chat_template = "{% for m in messages %}[{{m.role}}] {{m.content}} {% endfor %}"
    asked, said = ({"role": r, "content": c} for r, c in (("user", "Who?"), ("assistant", "Ada.")))
    one = texts([TextRecord("Who?", "Ada.", {}, (asked, said))])
    count = len(encode(one, tokenizer, loss_on="all").tokens[0]) - 1
    assert cut_texts(one, tokenizer, "all", [count]) == ["[user] Who? [assistant] Ada."]
    assert cut_texts(one, tokenizer, "all", [count - 3]) == ["[user] Who? [assistant] Ada"]
    assert cut_texts(one, tokenizer, "answer", [99]) == ["Ada."]


def test_answers_match_decoding_one_by_one_whatever_the_batch(model, tokenizer):
    """Of prompts of many lengths, unsorted."""
    records = texts([*FORGET.records, *HOLDOUT.records, *FACTS.records])
    data = encode(records, tokenizer)
    slow = [slow_answer(model, tokenizer, r, 40) for r in records.records]
    for batch_size in (1, 3, 64):
        assert generate_answers(model, tokenizer, data, batch_size, 40) == slow
    assert model.training
    short = [slow_answer(model, tokenizer, r, 3) for r in records.records]
    assert generate_answers(model, tokenizer, data, max_new_tokens=3) == short != slow
    assert len({len(data.prompt(i)) for i in range(len(data))}) > 3
    assert any(len(tokenizer(s)["input_ids"]) < 36 for s in slow), "some end by themselves"
    ending = replace(data, ends=frozenset(range(len(tokenizer))))
    assert {*generate_answers(model, tokenizer, ending)} == {""}, "ends of the data count too"
    assert all(s == s.strip() and "<|" not in s for s in slow)


def test_padding_gets_into_no_answer_of_a_model_that_takes_no_mask(tokenizer):
    torch.manual_seed(0)
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "num_hidden_layers": 2}
    model = RwkvForCausalLM(RwkvConfig(**sizes, eos_token_id=tokenizer.eos_token_id))
    records = texts([*FORGET.records, *HOLDOUT.records])
    slow = [slow_answer(model, tokenizer, r, 5) for r in records.records]
    assert generate_answers(model, tokenizer, encode(records, tokenizer), max_new_tokens=5) == slow


def test_a_model_with_router_losses_answers(tokenizer):
    torch.manual_seed(0)
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 32}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    settings = {"num_local_experts": 2, "output_router_logits": True, "bos_token_id": None}
    model = MixtralForCausalLM(MixtralConfig(**sizes, **settings))
    data = encode(FORGET, tokenizer)
    model.config.output_router_logits = False
    expected = generate_answers(model, tokenizer, data, max_new_tokens=4)
    model.config.output_router_logits = True
    assert generate_answers(model, tokenizer, data, max_new_tokens=4) == expected


def test_an_answer_ends_where_the_model_can_read_no_more(model, tokenizer, monkeypatch):
    records = texts([TextRecord("Who?" * times, " Ada.", {}) for times in (3, 1, 4, 2, 5, 2)])
    data = encode(records, tokenizer)
    lengths = [len(data.prompt(i)) for i in range(len(data))]
    most = max(lengths) + 3
    monkeypatch.setattr(model.config, "max_position_embeddings", most)
    room = [min(8, most - n) for n in lengths]
    assert {3, 8} < set(room)
    slow = [slow_answer(model, tokenizer, r, n) for r, n in zip(records.records, room, strict=True)]
    for batch_size in (1, 64):
        assert generate_answers(model, tokenizer, data, batch_size, 8) == slow


def test_neither_own_settings_nor_special_tokens_change_an_answer(model, tokenizer, monkeypatch):
    data = encode(FORGET, tokenizer)
    plain = generate_answers(model, tokenizer, data)
    own = {"repetition_penalty": 5.0, "no_repeat_ngram_size": 1, "max_time": 1e-9, "num_beams": 3}
    own |= {"do_sample": True, "num_return_sequences": 2, "suppress_tokens": list(range(100))}
    with monkeypatch.context() as patch:
        for name, value in own.items():
            patch.setattr(model.generation_config, name, value)
        assert generate_answers(model, tokenizer, data) == plain
    other = copy.deepcopy(tokenizer)
    other.add_special_tokens({"pad_token": "[PAD]"})
    assert other.pad_token_id >= len(model.get_input_embeddings().weight)
    assert generate_answers(model, other, encode(FORGET, other)) == plain
    other.eos_token = other.pad_token = None
    for config in (model.config, model.generation_config):
        monkeypatch.setattr(config, "eos_token_id", None)
        monkeypatch.setattr(config, "pad_token_id", None)
    slow = [slow_answer(model, other, record, 5) for record in FORGET.records]
    assert generate_answers(model, other, encode(FORGET, other), max_new_tokens=5) == slow
    no_prompt = encode(texts([FACTS.records[0], TextRecord("", "Text.", {})], "a.jsonl"), tokenizer)
    with pytest.raises(HamuError, match=r"row 101 of a\.jsonl has no prompt"):
        generate_answers(model, tokenizer, no_prompt)


def test_rouge_stems_words_reads_other_scripts_and_a_reference_without_a_word():
    answers = ["In Orla she was born, running.", "no word of it", "", "she had been living there"]
    references = ["  She runs; born in ORLA!  ", "Something else", "An answer.", "She lived there"]
    assert rouge_l(answers, references).tolist() == [0.4, 0, 0, 1]
    same = ["他出生在海边的一个小镇。", "Он родился в городе у моря в 1985 году."]
    assert rouge_l(same, same).tolist() == [1, 1]
    found = rouge_l(["在海边", "Он родился в 1985"], same).tolist()
    assert found == pytest.approx([3 / 11, 4 / 9])
    assert rouge_l(["nothing of it"] * 2, same).tolist() == [0, 0]
    assert rouge_l(["...", " ? ", "", "no"], ["...", "?", "", "!"]).tolist() == [1, 1, 1, 0]


def test_membership_scores_match_a_loop(model, tokenizer):
    predictions = predicted(model, tokenizer, FORGET)
    found = membership_scores(predictions, scored_texts(FORGET, "answer"))
    assert list(found) == [*ATTACKS]
    for place, record in enumerate(FORGET.records):
        slow = slow_scores(model, tokenizer, record)
        assert {name: s[place].item() for name, s in found.items()} == pytest.approx(slow, **CLOSE)


def slow_gradient_score(model, tokenizer, record):
    """Mean over tensors of the L2 norm of the gradient of the record's mean -log p, by backward."""
    model = copy.deepcopy(model)
    tokens, logits = zip(*token_logits(model, tokenizer, record), strict=True)
    torch.nn.functional.cross_entropy(torch.stack(logits), torch.tensor(tokens)).backward()
    norms = [p.grad.square().sum().sqrt().item() for p in model.parameters() if p.grad is not None]
    return -mean(norms)


def test_gradient_norms_match_backward_and_leave_the_model_as_it_was(model, tokenizer):
    data = encode(FORGET, tokenizer)
    found = gradient_scores(model, data)
    slow = [slow_gradient_score(model, tokenizer, r) for r in FORGET.records]
    assert found.tolist() == pytest.approx(slow, rel=1e-5)
    frozen = copy.deepcopy(model)
    for name, parameter in frozen.named_parameters():
        parameter.requires_grad_("norm" in name)
    alone = gradient_scores(frozen, data)
    assert (alone != found).all(), "frozen tensors do not count"


def test_the_reference_attack_takes_the_difference_token_predictions():
    ours, theirs = token_predictions([[1.0, 2.0], [4.0]]), token_predictions([[2.0, 5.0], [3.0]])
    same = {"retain": ours, "forget": ours, "test": theirs}
    other = {"retain": theirs, "forget": theirs, "test": ours}
    broken = same | {"forget": token_predictions([[math.inf], [1.0]])}
    for one, reference, auc in ((same, same, 0.5), (same, other, 0.75), (broken, same, None)):
        report = text_report(one, texts={name: ["a", "b"] for name in one}, reference=reference)
        assert report["metrics"]["mia_reference"] == auc


class Plain(torch.nn.Module):
    """A language model that names no output layer, and never says the padding token."""

    def __init__(self, inner, masked=-math.inf):
        super().__init__()
        self.inner, self.masked = inner, masked

    def forward(self, **inputs):
        logits = self.inner(**inputs).logits.clone()
        logits[..., 1] = self.masked
        return logits


def assert_same(one, other):
    assert torch.equal(one.record, other.record)
    for name in ("losses", "correct", "expected", "spread"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("label", [-1, 10**6])
def test_a_label_that_is_no_token_is_refused(model, label):
    """On a GPU it would end the process's use of the device."""
    items = [{"input_ids": [5, 6, 7], "labels": [5, label, 7]}]
    with pytest.raises(HamuError, match=f"a label is {label}; a model of"):
        predict_tokens(model, items, 1)


def test_logits_are_those_of_scored_tokens_alone_with_equal_figures(model, tokenizer, monkeypatch):
    """Also of batches and chunks of a few tokens, and of tokens that a model never says."""
    data = encode(texts([*FORGET.records, *HOLDOUT.records]), tokenizer)
    model = copy.deepcopy(model)
    with torch.no_grad():
        model.lm_head.weight[1] = 0
    whole, other = (predict_tokens(Plain(model, m), data, 64) for m in (0, -1e4))
    assert_same(predict_tokens(Plain(model), data, 4), other)
    shapes, widths = [], []
    model.lm_head.register_forward_hook(lambda *given: shapes.append(given[-1].shape[:2]))
    seen = lambda _, args, given: widths.append(given["input_ids"].shape)  # noqa: E731
    model.register_forward_pre_hook(seen, with_kwargs=True)
    assert_same(predict_tokens(model, data, 64), whole)
    assert shapes == [(1, len(whole.losses))]
    longest = max(map(len, data.tokens))
    monkeypatch.setattr("hamu.evaluation.predictions._PASS", 2 * longest)
    monkeypatch.setattr("hamu.evaluation.predictions._CHUNK", 3)
    widths.clear()
    assert_same(predict_tokens(model, data, 64), whole)
    assert len(widths) > 3
    assert all(rows * tokens <= 2 * longest for rows, tokens in widths)


def test_an_attack_with_scores_that_are_not_finite_has_no_figure():
    """An infinite logit has no mean log p: Min-K%++ is lost, the attacks without moments stand."""
    sure = token_predictions(
        [[0.0, 3.0]], expected=0.0, spread=0.0
    )  # counts as a thousandth at least
    found = membership_scores(sure, ["text"])["min_k_plus_plus"].item()
    assert found == pytest.approx(-3.0 / 0.001)
    assert found == membership_scores(sure, ["text"])["min_k_plus_plus_40"], "a token at least"
    some, broken = token_predictions([[1.0]]), token_predictions([[math.inf]])
    assert text_membership(broken, some, ["a"], ["a"]) is None
    partly = token_predictions(
        [[1.0, 2.0, math.nan]]
    )  # half precision may overflow at a single token
    assert text_membership(partly, some, ["a"], ["a"]) is None
    members, others = (
        token_predictions([[1.0], [0.5]], expected=math.nan),
        token_predictions([[2.0], [0.75]]),
    )
    found = text_membership(members, others, ["a"] * 2, ["a"] * 2)
    assert found == {name: None if "plus" in name else 0.75 for name in ATTACKS}


def test_the_report_matches_a_loop(model, tokenizer):
    """The last two records of the test set tie with members."""
    sets = {"retain": RETAIN, "forget": FORGET}
    sets["test"] = texts([*HOLDOUT.records, *FORGET.records[:2]])
    predictions = {n: predicted(model, tokenizer, t, batch_size=16) for n, t in sets.items()}
    spoken = {name: scored_texts(t, "answer") for name, t in sets.items()}
    report = text_report(predictions, texts=spoken)
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    for name, records in sets.items():
        rows = [pair for r in records.records for pair in token_logits(model, tokenizer, r)]
        log_p = [x for r in records.records for x in slow_log_p(model, tokenizer, r)]
        p = [math.exp(-slow_nll(model, tokenizer, r)) for r in records.records]
        assert report[name]["loss"] == pytest.approx(-mean(log_p), **CLOSE)
        assert report[name]["accuracy"] == mean([int(row.argmax()) == token for token, row in rows])
        assert report[name]["probability"] == pytest.approx(mean(p), **CLOSE)
        assert (report[name]["records"], report[name]["tokens"]) == (len(records), len(rows))
    scores = [membership_scores(predictions[n], spoken[n]) for n in ("forget", "test")]
    is_member = [1] * len(FORGET) + [0] * len(sets["test"])
    slow = {n: roc_auc_score(is_member, torch.cat([s[n] for s in scores])) for n in ATTACKS}
    assert report["membership_inference"] == pytest.approx(slow)
    known = (extraction_strength, exact_memorization)
    slow = {of.__name__: of(predictions["forget"]).mean().item() for of in known}
    assert report["metrics"] == slow
    del predictions["test"]
    assert text_report(predictions, texts=spoken)["membership_inference"] is None


def test_the_tofu_report_matches_a_loop(model, tokenizer):
    report = tofu_report(model, tokenizer, SETS, batch_size=4, max_new_tokens=40)
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert model.training
    nine = []
    for name, texts_of in SETS.items():
        records = texts_of.records
        figures = [slow_tofu(model, tokenizer, r) for r in records]
        plain, normalized, ratios = zip(*figures, strict=True)
        answers = [slow_answer(model, tokenizer, r, 40) for r in records]
        rouge = rouge_l(answers, [r.answer for r in records]).tolist()
        score = [min(r, 1 / r) if name == "forget" else max(0.0, 1 - r) for r in ratios]
        p = normalized if name in ("real_authors", "world_facts") else plain
        found, slow = report[name], [mean(values) for values in (p, rouge, score)]
        keys = ("probability", "rouge", "truth_ratio")
        assert [found[key] for key in keys] == pytest.approx(slow, **CLOSE)
        assert (found["records"], found["generated"]) == (len(records), len(records))
        if name == "forget":
            assert found["truth_ratios"] == pytest.approx(ratios, **CLOSE)
        else:
            nine += slow
            assert "truth_ratios" not in found
    assert min(nine) > 0
    assert report["model_utility"] == pytest.approx(9 / sum(1 / v for v in nine), **CLOSE)
    assert report["model_utility_probability"] == pytest.approx(nine[0], **CLOSE)


def test_the_tofu_report_has_no_figure_that_it_cannot_know(model, tokenizer):
    alone = tofu_report(model, tokenizer, {"forget": FORGET}, most=0)
    assert (alone["forget"]["rouge"], alone["forget"]["generated"]) == (None, 0)
    assert alone["model_utility"] is alone["model_utility_probability"] is None
    silent = tofu_report(model, tokenizer, SETS, most=0)
    assert silent["model_utility"] is None
    assert silent["model_utility_probability"] == silent["retain"]["probability"]


def test_the_tofu_report_names_records_that_lack_an_answer(model, tokenizer):
    two = {"perturbed_answer": ["B"], "paraphrased_answer": ["C", "D"]}
    for records, message in (
        (HOLDOUT, "no perturbed_answer"),
        (texts([question(0), question(1, paraphrase=False)]), "row 101 of these has no paraphr"),
        (texts([TextRecord("Q", " A", two)]), "2 paraphrased answers for 1 records"),
    ):
        with pytest.raises(HamuError, match=message):
            tofu_report(model, tokenizer, {"retain": records})
