"""Texts: the shapes of files, tokens and what is scored of them."""

import copy
import csv
import json
from dataclasses import replace

import pytest
import torch

from hamu import HamuError
from hamu.data import TextCollator, encode, matching, read_text
from hamu.data.text_files import has_test_split, is_text
from hamu.models.language import new_tokenizer

RECORDS = [
    {
        "question": "Who?",
        "answer": "Ada.",
        "paraphrased_answer": "It is Ada.",
        "perturbed_answer": ["Bob.", "Cy."],
    },
    {
        "question": "Where, then?",
        "answer": "In a house.",
        "paraphrased_answer": "At home.",
        "perturbed_answer": ["No."],
    },
]


@pytest.fixture(scope="module")
def tokenizer():
    return new_tokenizer(["Question: who?\nAnswer: nobody at all"], 300)


@pytest.fixture
def texts(tmp_path):
    return read_text(str(saved(tmp_path / "a.jsonl", RECORDS)))


def saved(path, records):
    if path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, records)))
    elif path.suffix == ".json":
        path.write_text(json.dumps(records))
    elif path.suffix == ".csv":
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, list(records[0]))
            writer.writeheader()
            writer.writerows(records)
    else:
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(records), path)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
@pytest.mark.parametrize("column", ["labels", "Label", "output", "response", "target"])
def test_an_answer_beside_plain_text_is_used_or_refused(suffix, column, tmp_path):
    path = saved(
        tmp_path / f"a{suffix}",
        [{"text": "Who?", column: "Ada."}, {"text": "Where?", column: "Here."}],
    )
    with pytest.raises(HamuError) as error:
        read_text(str(path))
    assert f"has the column {column} beside text" in str(error.value)
    assert f"--answer_column {column} to train on it, or --answer_column none" in str(error.value)
    assert "Ada" not in str(error.value)
    assert (
        read_text(str(path), prompt_column="text", answer_column=column).records[0].answer
        == " Ada."
    )
    assert [(r.prompt, r.answer) for r in read_text(str(path), answer_column="none").records] == [
        ("", "Who?"),
        ("", "Where?"),
    ]


def test_plain_text_without_answers_may_lie_in_any_column(tmp_path):
    path = str(saved(tmp_path / "a.jsonl", [{"note": "Who?", "answer": "Ada.", "topic": "people"}]))
    assert read_text(path, prompt_column="note", answer_column="none").records[0].answer == "Who?"
    with pytest.raises(HamuError, match="has no column text; it has note, answer, topic"):
        read_text(path, answer_column="none")
    other = str(saved(tmp_path / "b.jsonl", [{"text": "Who?", "topic": "people"}]))
    assert read_text(other).records[0].answer == "Who?", "a topic is no answer"


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_every_format_gives_the_same_records(suffix, tmp_path):
    read = read_text(str(saved(tmp_path / f"a{suffix}", RECORDS)))
    assert [(r.prompt, r.answer) for r in read.records] == [
        ("Question: Who?\nAnswer:", " Ada."),
        ("Question: Where, then?\nAnswer:", " In a house."),
    ]


@pytest.mark.parametrize(
    ("record", "prompt", "answer"),
    [
        ({"prompt": "a", "completion": " b"}, "a", " b"),
        ({"text": "all of it"}, "", "all of it"),
        ({"instruction": "Add.", "input": "1 and 2", "output": "3"}, "Add.\n1 and 2", "3"),
        ({"instruction": "Greet.", "input": "", "output": "Hello"}, "Greet.", "Hello"),
        ({"instruction": "Greet.", "input": None, "output": "Hello"}, "Greet.", "Hello"),
        (
            {
                "messages": [
                    {"role": "user", "content": "hi"},
                    {"role": "assistant", "content": "ho"},
                ]
            },
            "hi",
            "ho",
        ),
    ],
)
def test_every_usual_shape_is_understood(record, prompt, answer, tmp_path):
    (read,) = read_text(str(saved(tmp_path / "a.jsonl", [record]))).records
    assert (read.prompt, read.answer) == (prompt, answer)


def test_a_csv_cell_may_hold_line_breaks(tmp_path):
    path = saved(tmp_path / "a.csv", [{"prompt": "one\ntwo", "completion": "three"}])
    assert read_text(str(path)).records[0].prompt == "one\ntwo"


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv"])
def test_a_byte_order_mark_belongs_to_no_record(suffix, tmp_path):
    path = saved(tmp_path / f"a{suffix}", [{"prompt": "one", "completion": "two"}])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    (read,) = read_text(str(path)).records
    assert (read.prompt, read.answer, list(read.fields)) == ("one", "two", ["prompt", "completion"])


def test_a_csv_cell_may_be_long(tmp_path):
    csv.field_size_limit(131_072)  # Python's default, whatever was read before
    path = saved(tmp_path / "a.csv", [{"prompt": "one", "completion": "x" * 131_073}])
    assert len(read_text(str(path)).records[0].answer) == 131_073


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ('{"a": 1}', "has the columns a; expected question and answer"),
        (
            '{"question": "q", "answer": "a"}\n{"question": "q", "answer": ""}',
            "row 1 of .* has no text in answer",
        ),
        (
            '{"question": "q", "answer": "a"}\n{"question": "q"}',
            "row 1 of .* has no text in answer",
        ),
        ('{"question": "q", "answer": "a"}\n[1]', "row 1 of .* is a list"),
        ('{"messages": [{"role": "user", "content": "hi"}]}', "is not a conversation"),
        ("[1, 2", "cannot be read as JSON"),
        (
            '{"question": "q", "answer": "a"}\n{"question',
            "line 2 of .* cannot be read as JSON: Unterminated string",
        ),
    ],
)
def test_a_damaged_file_is_named_with_its_row(content, message, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(HamuError, match=message):
        read_text(str(path))


def test_only_the_answer_and_its_end_are_scored(texts, tokenizer):
    item = encode(texts, tokenizer)[1]
    scored = item["labels"][item["labels"] != -100].tolist()
    assert tokenizer.decode(scored[:-1]) == " In a house."
    assert scored[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(encode(texts, tokenizer).prompt(1)) == "Question: Where, then?\nAnswer:"


def test_an_end_within_a_plain_answer_cuts_nothing_and_one_at_its_end_is_not_doubled(
    texts, tokenizer
):
    end = tokenizer.eos_token
    given = [
        replace(texts.records[0], answer=answer)
        for answer in (f" In{end} a house.", f" In a house.{end}")
    ]
    found = encode(replace(texts, records=tuple(given), rows=torch.arange(2)), tokenizer)
    answers = [tokenizer.decode(found.tokens[n][found.scored_from[n] :]) for n in range(2)]
    assert answers == [f" In{end} a house.{end}", f" In a house.{end}"]


def test_all_but_the_first_token_is_scored_on_request(texts, tokenizer):
    item = encode(texts, tokenizer, loss_on="all")[0]
    assert torch.equal(item["labels"][1:], item["input_ids"][1:])


def test_long_records_are_cut_at_their_end_and_counted(texts, tokenizer):
    whole = encode(texts, tokenizer)
    longest = max(len(ids) for ids in whole.tokens)
    cut = encode(texts, tokenizer, longest - 1)
    assert (whole.truncated, cut.truncated) == (0, 1)
    assert torch.equal(cut.tokens[1], whole.tokens[1][:-1])


def test_a_conversation_is_written_by_the_chat_template(tokenizer, tmp_path):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    texts = read_text(str(saved(tmp_path / "a.jsonl", [{"messages": messages}])))
    with pytest.raises(HamuError, match="no chat template"):
        encode(texts, tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    try:
        data = encode(texts, tokenizer)
    finally:
        tokenizer.chat_template = None
    assert tokenizer.decode(data.prompt(0)) == "<user>hi<assistant>"
    assert tokenizer.decode(data.tokens[0][data.scored_from[0] :], skip_special_tokens=True) == "ho"


def test_a_template_that_ends_the_answer_itself_does_not_end_it_twice(tokenizer, tmp_path):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    texts = read_text(str(saved(tmp_path / "a.jsonl", [{"messages": messages}])))
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        + tokenizer.eos_token
        + "\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    try:
        data = encode(texts, tokenizer)
    finally:
        tokenizer.chat_template = None
    assert tokenizer.decode(data.tokens[0][data.scored_from[0] :]) == "ho" + tokenizer.eos_token


def test_an_unclosed_quote_is_an_error(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('question,answer\n"who?,me\nwhere?,here\n')
    with pytest.raises(HamuError, match=r"cannot be read as CSV"):
        read_text(str(path))


@pytest.mark.parametrize(("content", "message"), [
    ("question,answer\nWho?,Ada\nWhere?,in town 1, house 3\n",
     r"line 3 of .*a\.csv has 3 cells, the header 2; put a text with commas in quotes"),
    ("question,answer,answer\nWho?,Ada,Bo\n",
     r"a\.csv has the column answer twice, among question, answer, answer; rename or remove one"),
])  # fmt: skip
def test_no_cell_of_a_csv_is_left_out_silently(content, message, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(content)
    with pytest.raises(HamuError, match=message):
        read_text(str(path))


@pytest.mark.parametrize("header", [
    "Where does Ada Byron live?,Her diagnosis is secret",
    "She is a person whom nobody knows,secret",
    "secretsecretsecretsecretsecretsecretsecret,Ada",
    "Is it a secret?,Is it a secret?",
])  # fmt: skip
def test_a_message_does_not_say_what_a_file_without_header_holds(header, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(f"{header}\nWho?,Ada\n")
    said = r"a\.csv has 2 columns whose names look like texts; does the file lack its header\?"
    with pytest.raises(HamuError, match=said):
        read_text(str(path))
    with pytest.raises(HamuError, match=said):
        read_text(str(path), prompt_column="quest")
    prompt, answer = header.split(",")
    if prompt != answer:
        texts = read_text(str(path), prompt_column=prompt, answer_column=answer)
        with pytest.raises(HamuError, match=said):
            matching(texts, "user=1")


def test_columns_of_a_csv_without_a_name_do_no_harm(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("question,answer,,\nWho?,Ada,,\n")
    assert [r.answer for r in read_text(str(path)).records] == [" Ada"]


def test_another_answer_to_a_conversation_is_its_last_message(tmp_path):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    texts = read_text(str(saved(tmp_path / "a.jsonl", [{"messages": messages, "other": "hum"}])))
    (record,) = texts.answering("other").records
    assert record.messages == (messages[0], {"role": "assistant", "content": "hum"})


def test_padding_is_masked_and_never_scored(texts, tokenizer):
    data = encode(texts, tokenizer)
    batch = TextCollator(tokenizer.pad_token_id)([data[0], data[1]])
    real = batch["attention_mask"].bool()
    assert real.sum(1).tolist() == [len(data.tokens[0]), len(data.tokens[1])]
    assert (batch["labels"][~real] == -100).all()
    assert (batch["input_ids"][~real] == tokenizer.pad_token_id).all()


def test_a_list_of_other_answers_makes_as_many_records(texts):
    wrong = texts.answering("perturbed_answer")
    assert [(r, t.answer) for r, t in zip(wrong.rows.tolist(), wrong.records, strict=True)] == [
        (0, " Bob."),
        (0, " Cy."),
        (1, " No."),
    ]
    with pytest.raises(HamuError, match=r"row 0 of .* has no hint"):
        texts.answering("hint")


@pytest.mark.parametrize(("cell", "found"), [
    ({"Bob.": 1}, "a value of type dict"),
    (3, "a value of type int"),
    (["Bob.", 2], "a list with a value of type int"),
    (["Bob.", None], "a list with a value of type NoneType"),
    (["Bob.", " "], "a list with an empty text"),
    ('["Bob.", "Cy."]', "a list written as text"),
    (" ['Bob.' 'Cy.']", "a list written as text"),
])  # fmt: skip
def test_other_answers_are_texts(cell, found, tmp_path):
    rows = [
        {"question": "Who?", "answer": "Ada.", "other": "[sic] Bo."},
        {"question": "Q", "answer": "A", "other": cell},
    ]
    texts = read_text(str(saved(tmp_path / "a.jsonl", rows)))
    assert texts.select([0]).answering("other").records[0].answer == " [sic] Bo."
    with pytest.raises(
        HamuError, match=rf"row 1 of .*a\.jsonl has {found} in other; expected a text, or a list of"
    ):
        texts.answering("other")


@pytest.mark.parametrize(
    ("prefix", "answer"), [(" A: ", "Bob."), (" ", "Bob."), ("", "Bob."), ("-\n", " Bob.")]
)
def test_other_answers_begin_with_the_prefix_too(prefix, answer, tmp_path):
    rows = [
        {
            "question": "Who?",
            "answer": answer.replace("Bob", "Ada"),
            "perturbed_answer": ["Bob.", "Cy."],
        }
    ]
    texts = read_text(str(saved(tmp_path / "a.jsonl", rows)), answer_prefix=prefix)
    wrong = texts.answering("perturbed_answer")
    assert [r.answer for r in wrong.records] == [
        prefix + answer,
        prefix + answer.replace("Bob", "Cy"),
    ]


@pytest.mark.parametrize(
    ("expression", "rows"),
    [
        ("question=Who?", [0]),
        ("question != Who?", [1]),
        ("answer~ho?use", [1]),
        ("answer~[aA]", [0, 1]),
    ],
)
def test_a_filter_finds_its_records(expression, rows, texts):
    assert matching(texts, expression) == rows


def test_a_filter_takes_truth_values_and_nothing_as_json_or_python_writes_them(tmp_path):
    rows = [
        {"text": "a", "gone": True, "by": None},
        {"text": "b", "gone": False, "by": "None at all"},
    ]
    texts = read_text(str(saved(tmp_path / "b.jsonl", rows)))
    for expression, found in {"gone=true": [0], "gone=True": [0], "gone!=true": [1], "gone~^fa": [1], "by=null": [0],
                              "by=None": [0], "by!=None": [1], "by~null": [0]}.items():  # fmt: skip
        assert matching(texts, expression) == found, expression


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_texts_are_told_from_images(suffix, tmp_path):
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / f"a{suffix}", tmp_path / f"folder/train{suffix}"):
        assert is_text(str(saved(path, RECORDS)))
    assert is_text(str(tmp_path / "folder"))
    several = ([{"image": {"bytes": b"1", "path": "1.png"}, "label": 0, "text": "a"}], [{"x": b"1", "y": 0}],
               [{"image": "1.png", "label": 0}], [{"image": [[1, 2], [3, 4]], "label": 0}])  # fmt: skip
    for number, images in enumerate(several):
        assert not is_text(str(saved(tmp_path / f"{number}.parquet", images)))
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    for other in ("broken.parquet", "missing.parquet", "."):
        assert not is_text(str(tmp_path / other))


@pytest.mark.parametrize("suffix", [".JSONL", ".Json", ".CSV", ".PARQUET"])
def test_endings_are_without_case(suffix, tmp_path):
    (tmp_path / "folder").mkdir()
    path = saved(tmp_path / f"a{suffix.lower()}", RECORDS)
    for place, source in ((f"b{suffix}", f"b{suffix}"), (f"folder/train{suffix}", "folder")):
        (tmp_path / place).write_bytes(path.read_bytes())
        assert is_text(str(tmp_path / source))
        assert len(read_text(str(tmp_path / source))) == 2


@pytest.mark.parametrize("inner", ["", "data"])
def test_a_split_in_parts_is_read_in_order(inner, tmp_path):
    place = tmp_path / inner
    place.mkdir(exist_ok=True)
    for number in range(2):
        saved(place / f"train-0000{number}-of-00002-ab1.parquet", [RECORDS[number]])
        assert not has_test_split(str(tmp_path))
        if not number:
            with pytest.raises(
                HamuError, match=r"has 1 files of train, by their names there are 2; get those that"
            ):
                read_text(str(tmp_path))
    assert is_text(str(tmp_path))
    assert [r.answer for r in read_text(str(tmp_path)).records] == [" Ada.", " In a house."]
    saved(place / "test-00000-of-00001.parquet", RECORDS[:1])
    assert has_test_split(str(tmp_path))
    assert len(read_text(str(tmp_path), "test")) == 1


def test_one_json_value_over_several_lines_is_no_damage(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(RECORDS[0], indent=2))
    assert [r.answer for r in read_text(str(path)).records] == [" Ada."]
    path.write_text(json.dumps({"data": RECORDS}, indent=2))
    with pytest.raises(
        HamuError, match=r"a\.json has the columns data; expected question and answer"
    ):
        read_text(str(path))


@pytest.mark.parametrize(("expression", "message"), [
    ("question", "the filter 'question' cannot be read; write COLUMN=VALUE, COLUMN!=VALUE or COLUMN~REGEX"),
    ("question~(", r"'\(' in the filter is not a regular expression: missing \)"),
    ("writer=Ada", r"record 0 of .*a\.jsonl has no column writer; it has question, answer, paraphrased_answer"),
])  # fmt: skip
def test_a_filter_that_means_nothing_is_refused(expression, message, texts):
    with pytest.raises(HamuError, match=message):
        matching(texts, expression)


@pytest.mark.parametrize(("name", "options", "message"), [
    ("a.jsonl", {"question_template": "Q:"}, "question_template 'Q:' must have {question} in it"),
    ("a.jsonl", {"prompt_column": "quest"}, r"a\.jsonl has no column quest; it has question, answer"),
    ("a.txt", {}, r"a\.txt is not text that can be read; give texts as \.jsonl, \.json, \.csv or \.parquet, images as"),
    ("latin.jsonl", {}, r"latin\.jsonl is not UTF-8 text: "),
    ("", {}, r"holds no train\.jsonl, \.json, \.csv or \.parquet; name a file"),
])  # fmt: skip
def test_a_source_that_cannot_be_read_is_named(name, options, message, tmp_path):
    saved(tmp_path / "a.jsonl", RECORDS)
    (tmp_path / "a.txt").write_text("Who? Ada.")
    (tmp_path / "latin.jsonl").write_bytes('{"text": "é"}'.encode("latin-1"))
    with pytest.raises(HamuError, match=message):
        read_text(str(tmp_path / name), **options)


@pytest.mark.parametrize(("options", "message"), [
    ({"loss_on": "some"}, "loss_on 'some' is unknown; choose answer or all"),
    ({"max_length": 1}, "max_length 1 must be at least 2 tokens"),
    ({"max_length": 5}, r"row 0 of .*a\.jsonl has no answer token among its first 5 tokens \(the prompt has \d+\)"),
])  # fmt: skip
def test_what_leaves_nothing_to_score_is_refused(options, message, texts, tokenizer):
    with pytest.raises(HamuError, match=message):
        encode(texts, tokenizer, **options)


def test_a_record_of_one_token_is_refused(tokenizer, tmp_path):
    texts = read_text(str(saved(tmp_path / "a.jsonl", [{"text": "a"}])))
    assert len(encode(texts, tokenizer).tokens[0]) == 2, "its end follows"
    assert TextCollator(None)([encode(texts, tokenizer)[0]])["input_ids"].shape == (1, 2)
    endless = copy.deepcopy(tokenizer)
    endless.eos_token = None
    with pytest.raises(
        HamuError, match=r"^row 0 of .*a\.jsonl is one token, which nothing precedes; leave the"
    ):
        encode(texts, endless)


@pytest.mark.parametrize(("template", "message"), [
    ("{{ raise_exception('no system message') }}", "a conversation of .* does not fit the tokenizer's chat template: "),
    ("{{ 'a' + 1 }}", "a conversation of .* does not fit the tokenizer's chat template: "),
    ("{{ 1 / 0 }}", "a conversation of .* does not fit the tokenizer's chat template: "),
    ("{% if add_generation_prompt %}again{% endif %}", "chat template does not put the last message behind what comes"),
])  # fmt: skip
def test_a_chat_template_that_does_not_serve_is_refused(
    template, message, tokenizer, tmp_path, monkeypatch
):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    texts = read_text(str(saved(tmp_path / "a.jsonl", [{"messages": messages}])))
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(HamuError, match=message):
        encode(texts, tokenizer)


def test_the_tokenizer_writes_any_text(tokenizer):
    text = "Ünïcode – 漢字, tabs\t and \n lines"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
