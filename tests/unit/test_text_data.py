"""Texts: the shapes of files, tokens and what is scored of them."""

import copy
import json
import math
from dataclasses import replace

import pandas
import pytest
import torch

from hamu import HamuError
from hamu.data import collate, encode, matching, read_text
from hamu.data.text import has_test_split, is_text
from hamu.models.language import new_tokenizer

RECORDS = [
    {"question": "Who?", "answer": "Ada.", "perturbed_answer": ["Bob.", "Cy."]},
    {"question": "Where, then?", "answer": "In a house.", "perturbed_answer": ["No."]},
]
DIALOGUE = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
ASKED = "Question: {}\nAnswer:"
SUFFIXES = pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])


@pytest.fixture(scope="module")
def tokenizer():
    return new_tokenizer(["Question: who?\nAnswer: nobody at all"], 300)


@pytest.fixture
def texts(tmp_path):
    return read_text(saved(tmp_path / "a.jsonl", RECORDS))


def saved(path, records):
    frame, suffix = pandas.DataFrame(records), path.suffix.lower()
    if suffix == ".csv":
        frame.to_csv(path, index=False)
    elif suffix == ".parquet":
        frame.to_parquet(path)
    else:
        frame.to_json(path, orient="records", lines=suffix == ".jsonl")
    return str(path)


def pairs(texts):
    return [(record.prompt, record.answer) for record in texts.records]


def test_an_answer_beside_plain_text_is_used_or_refused(tmp_path):
    path = saved(tmp_path / "a.csv", [{"text": "Who?", "Labels": "Ada."}])
    beside = r"has the column Labels beside text, .* --answer_column none"
    with pytest.raises(HamuError, match=beside) as error:
        read_text(path)
    assert "Ada" not in str(error.value)
    assert pairs(read_text(path, prompt_column="text", answer_column="Labels"))[0][1] == " Ada."
    assert pairs(read_text(path, answer_column="none")) == [("", "Who?")]


def test_plain_text_without_answers_may_lie_in_any_column(tmp_path):
    path = saved(tmp_path / "a.jsonl", [{"note": "Who?", "answer": "Ada.", "topic": "people"}])
    assert pairs(read_text(path, prompt_column="note", answer_column="none")) == [("", "Who?")]
    with pytest.raises(HamuError, match="no text in text, but nothing; its columns are note, ans"):
        read_text(path, answer_column="none")


@SUFFIXES
def test_every_format_gives_the_same_records_whatever_the_case_of_its_ending(suffix, tmp_path):
    for path in (tmp_path / f"a{suffix}", tmp_path / f"a{suffix.upper()}"):
        saved(path, RECORDS)
        if suffix != ".parquet":  # a byte order mark is of no record
            path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
        who, where = (ASKED.format(record["question"]) for record in RECORDS)
        assert pairs(read_text(str(path))) == [(who, " Ada."), (where, " In a house.")]
        assert is_text(str(path))
    (tmp_path / "folder").mkdir()
    saved(tmp_path / f"folder/train{suffix}", RECORDS)
    assert is_text(str(tmp_path / "folder"))
    assert len(read_text(str(tmp_path / "folder"))) == 2
    assert not has_test_split(str(tmp_path / "folder"))


@pytest.mark.parametrize(
    ("record", "prompt", "answer"),
    [
        ({"prompt": "a", "completion": " b"}, "a", " b"),
        ({"prompt": "", "completion": " b"}, "", " b"),
        ({"text": "all of it"}, "", "all of it"),
        ({"instruction": "Add.", "input": "1", "output": "3"}, ASKED.format("Add.\n1"), " 3"),
        ({"instruction": "Hi", "input": None, "output": "Ho"}, ASKED.format("Hi"), " Ho"),
        ({"messages": DIALOGUE}, "hi", "ho"),
    ],
)
def test_every_usual_shape_is_understood(record, prompt, answer, tmp_path):
    assert pairs(read_text(saved(tmp_path / "a.jsonl", [record]))) == [(prompt, answer)]


def test_other_answers_are_a_record_each_and_alternatives_one_for_each(texts, tmp_path):
    wrong = texts.answering("perturbed_answer")
    assert [record.answer for record in wrong.records] == [" Bob.", " Cy.", " No."]
    assert wrong.rows.tolist() == [0, 0, 1]
    assert {answer for _, answer in pairs(texts.alternatives())} == {" I don't know."}
    with pytest.raises(HamuError, match=r"wer has 3 texts for 2 records of .*a\.jsonl; name a col"):
        texts.alternatives("perturbed_answer")
    talk = read_text(saved(tmp_path / "b.jsonl", [{"messages": DIALOGUE, "other": "hum"}]))
    (record,) = talk.alternatives("other").records
    assert record.messages == (DIALOGUE[0], {"role": "assistant", "content": "hum"})
    with pytest.raises(HamuError, match=r"row 0 of .*c\.jsonl has no prompt, which another"):
        read_text(saved(tmp_path / "c.jsonl", [{"text": "all of it"}])).alternatives()


QUESTION = '{"question": "q", "answer": "a"}\n'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "", "is empty"),
        ("a.jsonl", '{"a": 1}', "has the columns a; expected question and answer"),
        ("a.jsonl", QUESTION + '{"question": "q"}', "row 1 of .* no text in answer, but nothing"),
        ("a.jsonl", '{"question": "q", "answer": 0}', "row 0 of .* no text in answer, but int"),
        ("a.jsonl", QUESTION + '{"question": "q", "answer": "\\ud800"}', "row 1 of .* not Unicode"),
        ("a.jsonl", QUESTION + "1", "row 1 of .* is a int; expected a record"),
        ("a.jsonl", '{"messages": [{"role": "user"}]}', "row 0 of .*: message 0 lacks a role or"),
        ("a.jsonl", '{"messages": "hi"}', "row 0 of .* has a str as its messages; give a list"),
        ("a.jsonl", json.dumps({"messages": DIALOGUE[:1]}), "message is not the assist"),
        ("a.jsonl", json.dumps({"messages": DIALOGUE, "tools": "{"}), "tools that are no JSON"),
        ("a.jsonl", json.dumps({"messages": DIALOGUE, "tools": {"a": 1}}), "a dict as its tools"),
        ("a.json", "[1,\n 2", "what begins in line 1 is no JSON: Expecting .* line 2 column 3"),
        ("a.jsonl", '{"a": 1}\n{"b": \n{"c": 2}\n', "what begins in line 2 is no JSON: Expecting"),
        ("a.csv", 'question,answer\n"who?,me\n', r"a\.csv cannot be read: .*EOF inside"),
        ("a.csv", "question,answer,answer\nWho?,I,me\n", "columns 2 and 3 have the same name"),
        ("a.csv", "question,answer\nWho?,in town, house 3\n", "put a text with commas in quotes"),
        ("a.csv", "", r"a\.csv is empty: it has no records"),
        ("a.parquet", "PAR1", r"a\.parquet cannot be read as parquet"),
        ("a.txt", "Who?", r"a\.txt is not a data set that can be read; give texts as .*, images"),
        ("a.jsonl", b'{"text": "\xe9"}', r"a\.jsonl cannot be read: .* byte; save it as UTF-8$"),
        ("a.csv", b"text\nZ\xfcrich\n", r"a\.csv cannot be read: .* byte; save it as UTF-8$"),
        ("b/a.csv", "", r"holds no train\.jsonl, \.json, \.csv or \.parquet; name a file"),
    ],
)
def test_a_damaged_file_is_named_with_its_row(name, content, message, tmp_path):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(HamuError, match=message):
        read_text(str(path if path.parent == tmp_path else path.parent))


@pytest.mark.parametrize("header", ["Where does Ada Byron live?,It is a secret", "s" * 42 + ",Ada"])
def test_a_message_does_not_show_the_content_of_a_file_without_header(header, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(f"{header}\nWho?,Ada\n")
    message = r"names that look like texts \(does the file lack its header\?\)"
    prompt, answer = header.split(",")
    texts = read_text(str(path), prompt_column=prompt, answer_column=answer)
    for fails in (
        lambda: read_text(str(path)),
        lambda: read_text(str(path), prompt_column="quest"),
        lambda: matching(texts, "user=1"),
    ):
        with pytest.raises(HamuError, match=message) as error:
            fails()
        assert "Ada" not in str(error.value)


def test_texts_are_told_from_images(tmp_path):
    pictures = [{"image": {"bytes": b"1", "path": "1.png"}, "label": 0, "text": "a"}]
    for number, images in enumerate((pictures, [{"image": "1.png", "label": 0}])):
        assert not is_text(saved(tmp_path / f"{number}.parquet", images))
    with_bytes = [{"question": "Who?", "answer": "Ada.", "key": b"1"}]
    assert is_text(saved(tmp_path / "keys.parquet", with_bytes))
    for header, holds_text in (("image,label", False), ("image,text", True), ("q,a", True)):
        (tmp_path / "a.csv").write_text(header)
        assert is_text(str(tmp_path / "a.csv")) == holds_text
    (tmp_path / "a.csv").write_text("")
    with pytest.raises(HamuError, match=r"a\.csv is empty: it has no records"):
        is_text(str(tmp_path / "a.csv"))
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    for other in ("broken.parquet", "missing.parquet", "."):
        assert not is_text(str(tmp_path / other))


@pytest.mark.parametrize("inner", ["", "data"])
def test_a_split_in_parts_is_read_in_order_and_whole(inner, tmp_path):
    place = tmp_path / inner
    place.mkdir(exist_ok=True)
    saved(place / "train-00000-of-00002-ab1.parquet", RECORDS[:1])
    with pytest.raises(HamuError, match="has 1 files of train, by their names there are 2; get"):
        read_text(str(tmp_path))
    saved(place / "train-00001-of-00002-ab1.parquet", RECORDS[1:])
    assert is_text(str(tmp_path))
    assert [r.answer for r in read_text(str(tmp_path)).records] == [" Ada.", " In a house."]
    assert not has_test_split(str(tmp_path))
    saved(place / "test-00000-of-00001.parquet", RECORDS[:1])
    assert has_test_split(str(tmp_path))
    assert len(read_text(str(tmp_path), "test")) == 1


def test_only_the_answer_and_its_end_are_scored_and_padding_never(texts, tokenizer):
    data = encode(texts, tokenizer)
    scored = data[1]["labels"][data[1]["labels"] != -100].tolist()
    assert tokenizer.decode(scored) == f" In a house.{tokenizer.eos_token}"
    assert tokenizer.decode(data.prompt(1)) == "Question: Where, then?\nAnswer:"
    item = encode(texts, tokenizer, loss_on="all")[0]
    assert torch.equal(item["labels"][1:], item["input_ids"][1:]), "all but the first, on request"
    batch = collate([data[0], data[1]])
    real = batch["attention_mask"].bool()
    assert real.sum(1).tolist() == [len(data.tokens[0]), len(data.tokens[1])]
    assert (batch["labels"][~real] == -100).all()
    assert (batch["input_ids"][~real] == 0).all(), "any model has it"


def test_an_end_within_an_answer_cuts_nothing_and_one_at_its_end_is_not_doubled(texts, tokenizer):
    end = tokenizer.eos_token
    answers = (f" In{end} a house.", f" In a house.{end}")
    given = tuple(replace(texts.records[0], answer=answer) for answer in answers)
    found = encode(replace(texts, records=given, rows=torch.arange(2)), tokenizer)
    answers = [tokenizer.decode(found.tokens[n][found.scored_from[n] :]) for n in range(2)]
    assert answers == [f" In{end} a house.{end}", f" In a house.{end}"]


def test_long_records_are_cut_at_their_end_and_counted_if_an_answer_is_left(texts, tokenizer):
    whole = encode(texts.select([0]), tokenizer)
    prompt, length = len(whole.prompt(0)), len(whole.tokens[0])
    assert encode(whole.texts, tokenizer, length).truncated == 0, "what just fits is whole"
    cut = encode(whole.texts, tokenizer, prompt + 1)
    assert (cut.truncated, cut.tokens[0].tolist()) == (1, whole.tokens[0][: prompt + 1].tolist())
    assert (cut[0]["labels"] != -100).sum() == 1
    message = rf"row 0 of .* no answer token among its first {prompt} tokens \(the"
    with pytest.raises(HamuError, match=message):
        encode(whole.texts, tokenizer, prompt)


@pytest.fixture
def talks(tokenizer, tmp_path, monkeypatch):
    """Encodes conversations, written by a chat template."""

    def call(template, *rows, name="a.jsonl", by=tokenizer):
        monkeypatch.setattr(by, "chat_template", template)
        return encode(read_text(saved(tmp_path / name, rows)), by)

    return call


@pytest.mark.parametrize("end", ["", "{{ eos_token }}\n"])
def test_a_conversation_is_written_by_the_chat_template(end, tokenizer, talks):
    template = (
        f"{{% for m in messages %}}<{{{{ m.role }}}}>{{{{ m.content }}}}{end}"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    silent = {"messages": [DIALOGUE[0], DIALOGUE[1] | {"content": ""}]}
    with pytest.raises(HamuError, match=r"^row 0 of .*a\.jsonl has an empty answer; take the"):
        talks(template, silent)
    data = talks(template, {"messages": DIALOGUE})
    assert tokenizer.decode(data.prompt(0)).startswith("<user>hi")
    assert tokenizer.decode(data.prompt(0)).endswith("<assistant>")
    answer = tokenizer.decode(data.tokens[0][data.scored_from[0] :])
    assert answer == "ho" + tokenizer.eos_token


def calling(name):
    """A conversation that calls a tool, as it is exported: without a text beside the call."""
    call = {"type": "function", "function": {"name": "find", "arguments": {"name": name}}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    found = {"role": "tool", "content": "ok"}
    return {"messages": [DIALOGUE[0], called, found, DIALOGUE[1]]}


@pytest.mark.parametrize(
    ("name", "tools"),
    [
        ("a.jsonl", [{"name": "find"}]),
        ("b.parquet", [{"name": "find"}]),
        ("c.jsonl", '[{"name": "find"}]'),
    ],
)
def test_a_chat_template_sees_calls_and_tools_alike_from_each_kind_of_file(
    name, tools, tokenizer, talks
):
    template = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>"
        "{% if 'tool_calls' in m %}{{ m.tool_calls[0].function.arguments | tojson }}{% endif %}"
        "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    rows = (calling("Ana") | {"tools": tools}, {"messages": DIALOGUE, "tools": None})
    data = talks(template, *rows, name=name)
    said = '<user>hi<assistant>{"name": "Ana"}<tool>ok<assistant>'
    prompts = [tokenizer.decode(data.prompt(n)) for n in (0, 1)]
    assert prompts == ['[{"name": "find"}]' + said, "<user>hi<assistant>"]


def test_a_template_that_has_an_end_of_its_own_needs_no_other(tokenizer, talks):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    (turn,) = tokenizer("<|turn|>")["input_ids"]
    written = "{% for m in messages %}{{ m.content }}<|turn|>\n{% endfor %}"
    data = talks(written, {"messages": DIALOGUE}, by=tokenizer)
    assert data.tokens[0].tolist() == tokenizer("hi<|turn|>\nho<|turn|>")["input_ids"]
    assert data.ends == {turn}
    listed = {"messages": [DIALOGUE[0], DIALOGUE[1] | {"content": "a <|turn|> b"}]}
    data = talks(written.replace("<|turn|>", ""), listed, by=tokenizer)
    assert tokenizer.decode(data.tokens[0]).startswith("hi\na <|turn|> b\n")
    assert data.ends == {tokenizer.eos_token_id}


def test_an_empty_thought_of_the_template_belongs_to_the_prompt_and_a_full_one_to_the_answer(
    tokenizer, talks
):
    thinking = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}"
        "<think>{{ m.thought or '' }}</think>\n\n{% endif %}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>"
        "{% if enable_thinking is false %}<think></think>\n\n{% endif %}{% endif %}"
    )
    thoughtful = [DIALOGUE[0], DIALOGUE[1] | {"thought": "hm"}]
    data = talks(thinking, {"messages": DIALOGUE}, {"messages": thoughtful})
    prompts = [tokenizer.decode(data.prompt(i)) for i in range(2)]
    asked = "<user>hi<assistant>"
    assert prompts == [f"{asked}<think></think>\n\n", asked]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "row 0 of .* does not fit the tokenizer's chat template: .*not set"),
        ("{{ 'a' + 1 }}", "row 0 of .* does not fit the tokenizer's chat template: "),
        ("{% if add_generation_prompt %}again{% endif %}", "row 0 .* changes what comes before"),
    ],
)
def test_an_unusable_chat_template_is_refused(template, message, talks):
    with pytest.raises(HamuError, match=message):
        talks(template, {"messages": DIALOGUE})


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda t, k: encode(t, k, loss_on="some"), "loss_on 'some' is unknown; choose answer or"),
        (lambda t, k: encode(t, k, 1), "no answer token among its first 1 tokens"),
        (lambda t, k: matching(t, "question"), "'question' cannot be read; write COLUMN=VALUE, C"),
        (lambda t, k: matching(t, "question~("), r"'\(' in the filter is not a regular .*missing"),
        (lambda t, k: matching(t, "writer=Ada"), "record 0 of .* has no column writer; it has qu"),
        (lambda t, k: read_text(t.source, question_template="Q:"), r"'Q:' must have \{question\}"),
    ],
)
def test_options_that_do_not_fit_the_texts_are_refused(refused, message, texts, tokenizer):
    with pytest.raises(HamuError, match=message):
        refused(texts, tokenizer)


def test_a_record_of_one_token_is_refused(tokenizer, tmp_path):
    texts = read_text(saved(tmp_path / "a.jsonl", [{"text": "a"}]))
    assert collate([encode(texts, tokenizer)[0]])["input_ids"].shape == (1, 2), "its end"
    endless = copy.deepcopy(tokenizer)
    endless.eos_token = None
    with pytest.raises(HamuError, match=r"^row 0 of .*a\.jsonl has no answer token"):
        encode(texts, endless)


@pytest.mark.parametrize("cell", [None, {"Bob.": 1}, ["Bob.", " "], []])
def test_other_answers_are_texts(cell, texts):
    second = replace(texts.records[1], fields={"other": cell})
    with pytest.raises(HamuError, match=r"row 1 of .*a\.jsonl has no other; expected a text"):
        replace(texts, records=(second,), rows=torch.tensor([1])).answering("other")


@pytest.mark.parametrize(("prefix", "space"), [(" A: ", ""), (" ", ""), ("", ""), ("-\n", " ")])
def test_other_answers_begin_with_the_prefix_too(prefix, space, tmp_path):
    row = {"question": "Who?", "answer": f"{space}Ada.", "perturbed_answer": ["[sic] Bob.", " Cy."]}
    texts = read_text(saved(tmp_path / "a.jsonl", [row]), answer_prefix=prefix)
    answers = [record.answer for record in texts.answering("perturbed_answer").records]
    assert answers == [f"{prefix}{space}[sic] Bob.", f"{prefix}{space}Cy."]


@pytest.mark.parametrize(
    ("expression", "rows"),
    [
        ("question=Who?", [0]),
        ("question != Who?", [1]),
        ("answer~ho?use", [1]),
        ("gone=true", [0]),
        ("gone!=True", [1]),
        ("by!=None", [1]),
        ("by=null", [0]),
        ("by~ne", [1]),  # None, nan and the .0 that pandas gives to whole numbers have no parts
        ("age=7", [0]),
        ("age!=7.0", [1]),
        ("age~0", []),
        ("age~^7$", [0]),
        ("age=nan", [1]),
        ("age~n", []),
    ],
)
def test_a_filter_finds_values_as_json_or_python_writes_them(expression, rows, tmp_path):
    more = ({"gone": True, "by": None, "age": 7.0}, {"gone": False, "by": "Anne", "age": math.nan})
    records = [record | added for record, added in zip(RECORDS, more, strict=True)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    assert matching(read_text(str(tmp_path / "a.jsonl")), expression) == rows


def test_the_tokenizer_writes_any_text(tokenizer):
    text = "Ünïcode – 漢字, tabs\t and \n lines"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_selection_keeps_each_record_with_its_other_answer(texts, tokenizer):
    alternatives = texts.alternatives()
    data = replace(encode(texts, tokenizer), alternatives=encode(alternatives, tokenizer))
    assert data.select([1]).alternatives.texts.records == alternatives.select([1]).records


def test_a_mask_of_ones_own_is_kept():
    padded = {"input_ids": [0, 5], "labels": [-100, 5], "attention_mask": [0, 1]}
    batch = collate([padded, {"input_ids": [5, 6, 7], "labels": [5, 6, 7]}])
    assert batch["attention_mask"].tolist() == [[0, 1, 0], [1, 1, 1]]
