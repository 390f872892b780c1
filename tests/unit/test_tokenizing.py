"""Prompt and answer are tokenized as the one text that a model reads, by any tokenizer."""

from copy import deepcopy

import pytest
from small_models import text_records
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from hamu.data import TextRecord, encode
from hamu.models.language import new_tokenizer

CORPUS = [
    "Question: Who is it?\nAnswer: In a town. (or not)",
    "[INST] Who? [/INST] In a town. Ada lives there.",
]
DIALOGUE = ({"role": "user", "content": "Who?"}, {"role": "assistant", "content": "In a town."})
LLAMA = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}"
)


def sentencepiece_like(space, ends):
    """Write spaces as ▁, put one before a text, and <s> before that (and </s> at its end)."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    if space == "normalizer":
        tokenizer.pre_tokenizer = None
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(steps)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>" if ends else "<s> $A", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names, chat_template=LLAMA)


KINDS = [(space, ends) for space in ("normalizer", "metaspace") for ends in (False, True)]


@pytest.fixture(scope="module", params=KINDS, ids=str)
def tokenizer(request):
    return sentencepiece_like(*request.param)


def pieces(tokenizer, record, **options):
    data = encode(text_records(record), tokenizer, **options)
    found = tokenizer.convert_ids_to_tokens(data.tokens[0].tolist())
    return found[: data.scored_from[0]], found[data.scored_from[0] :]


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("Question: Who is it?\nAnswer:", " In a town."),
        ("[INST] Who? [/INST]", " In a town."),
        ("[INST] Who? [/INST]", "In a town."),
        ("[INST] Who? [/INST] ", "In a town."),
        ("", "In a town."),
    ],
)
def test_prompt_and_answer_are_the_tokens_of_the_one_text(prompt, answer, tokenizer):
    record = TextRecord(prompt, answer, {})
    asked, said = pieces(tokenizer, record)
    whole, alone = (
        [token for token in tokenizer(text)["input_ids"] if token != tokenizer.eos_token_id]
        for text in (prompt + answer, prompt.rstrip(" "))
    )
    assert asked + said == [*tokenizer.convert_ids_to_tokens(whole), "</s>"]
    assert asked == tokenizer.convert_ids_to_tokens(alone)
    assert not prompt or prompt.endswith("]") or said[:2] == ["▁In", "▁a"], "no lone space"


def test_a_conversation_is_the_tokens_of_its_template(tokenizer):
    asked, said = pieces(tokenizer, TextRecord("Who?", "In a town.", {}, messages=DIALOGUE))
    whole = tokenizer.apply_chat_template(list(DIALOGUE), tokenize=True, return_dict=False)
    assert asked + said == tokenizer.convert_ids_to_tokens(whole)
    prompt = tokenizer("<s>[INST] Who? [/INST]", add_special_tokens=False).input_ids
    assert asked == tokenizer.convert_ids_to_tokens(prompt)


def test_a_prompt_keeps_its_own_tokens_where_one_would_stand_across_the_border():
    tokenizer = new_tokenizer(["Question: who?\nAnswer: nobody"] * 9, 300)
    prompt, answer = "Question: who?\nAns", "wer: nobody"
    alone, rest, whole = tokenizer([prompt, answer, prompt + answer])["input_ids"]
    assert whole[: len(alone)] != alone
    data = encode(text_records(TextRecord(prompt, answer, {})), tokenizer)
    assert data.prompt(0).tolist() == alone
    assert data.tokens[0].tolist() == [*alone, *rest, tokenizer.eos_token_id]


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("<s>[INST] Who? [/INST]", " In a town.</s>"),  # as apply_chat_template writes it
        ("", "<s>[INST] Who? [/INST] In a town."),
    ],
)
def test_a_text_that_has_its_start_already_is_not_started_twice(prompt, answer, tokenizer):
    asked, said = pieces(tokenizer, TextRecord(prompt, answer, {}))
    assert (asked + said)[0] == "<s>"
    assert ((asked + said).count("<s>"), (asked + said).count("</s>")) == (1, 1)
    assert asked if prompt else asked == ["<s>"]


@pytest.mark.parametrize(
    ("written", "date"),
    [("%d %b %Y", "26 Jul 2024"), ("%Y-%m-%d %H:%M", "2024-07-26 00:00")],
)
def test_the_date_in_a_chat_template_is_the_same_on_every_day(written, date):
    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = (
        "{%- if strftime_now is defined %}"
        f"{{%- set today = strftime_now('{written}') %}}{{%- endif %}}"
        "On {{ today }}, {% for m in messages %}{{ m.content }}{% endfor %}"
    )
    asked, said = pieces(tokenizer, TextRecord("Who?", "In a town.", {}, messages=DIALOGUE))
    assert "".join(asked + said) == f"On {date}, Who?In a town.</s>"


def test_an_end_token_within_an_answer_does_not_end_it(tokenizer):
    tokenizer = deepcopy(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<|im_end|>\n{% endfor %}"
    said = (
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "In a </s> town."},
    )
    _, scored = pieces(tokenizer, TextRecord("Who?", "In a </s> town.", {}, messages=said))
    assert scored[-1] == "<|im_end|>"
    assert scored.count("</s>") == 1
