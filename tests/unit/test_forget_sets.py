"""Choosing what to forget: App. E.1 to the letter, and every way to get it wrong."""

import json
from dataclasses import replace
from unicodedata import normalize

import pyarrow
import pytest
import torch
from pyarrow import parquet
from small_models import drawn_images, text_records
from torch.utils.data import Subset

from hamu import HamuError
from hamu.data import (
    ImageData,
    TextRecord,
    draw_positions,
    forget_class,
    forget_data,
    forget_rows,
    matching,
    parse_rows,
    read_images,
    read_text,
    subset,
)
from hamu.data.forget_sets import rows_of


def texts(*pairs):
    return text_records(*(TextRecord(prompt, answer, {}) for prompt, answer in pairs))


@pytest.fixture
def train():
    labels = torch.arange(300) % 3
    return replace(drawn_images(300), labels=labels, classes=("cat", "dog", "owl"), source="here")


@pytest.mark.parametrize(
    ("rho", "mixed"), [(0, 0), (0.25, 25), (0.29, 29), (0.57, 57), (0.999, 99), (1, 100)]
)
def test_the_mixing_ratio_draws_floor_rho_n_from_everything_not_yet_chosen(train, rho, mixed):
    problem = forget_class(train, None, "dog", rho)
    assert (len(problem.forget), len(problem.retain)) == (100, 200)
    own = (problem.forget.labels == 1).sum().item()
    assert own >= 100 - mixed, "the rest may hold unchosen records of the class too"
    rows = torch.cat([problem.forget.rows, problem.retain.rows])
    assert torch.equal(rows.sort().values, train.rows), "forget and retain divide the data"
    named = replace(train, classes=("1", "0", "owl"))
    assert (forget_class(named, None, "0").forget.labels == 1).all(), "a name before a number"
    assert (forget_class(named, None, "2").forget.labels == 2).all()
    composed = replace(train, classes=("é", "0", "owl"))  # a folder's name may be in another form
    assert (forget_class(composed, None, "e\u0301").forget.labels == 0).all()
    numbers = "class '1' does not exist in here; choose of 0, 2, 5: its classes have numbers"
    with pytest.raises(HamuError, match=numbers):
        forget_class(replace(train, classes=("0", "2", "5")), None, "1")


def test_rho_one_draws_from_all_classes_alike_by_the_seed(train):
    draws = [forget_class(train, None, 0, 1.0, seed=s).forget for s in range(20)]
    labels = torch.cat([one.labels for one in draws])
    assert (torch.bincount(labels) / len(labels) - 1 / 3).abs().max() < 0.05
    assert torch.equal(forget_class(train, None, 0, 1.0, seed=1).forget.rows, draws[1].rows)
    assert not torch.equal(draws[1].rows, draws[2].rows)


@pytest.mark.parametrize("column", ["user-id", "a.b c", "who"])
def test_a_filter_takes_a_column_of_any_name(column):
    texts = text_records(*(TextRecord("q", "a", {column: one}) for one in ("1", "a=b", "1")))
    assert matching(texts, f"{column} = 1") == [0, 2]
    assert matching(texts, f"{column}!=1") == matching(texts, f"{column}~=b") == [1]


def test_a_record_is_found_in_every_form_of_its_letters_and_with_other_white_space():
    names = [normalize("NFC", "José"), normalize("NFD", "José"), "Ana"]
    records = [TextRecord(f"Who is {name}?", f" {name}.", {"who": name}) for name in names]
    prompt = f" {records[0].prompt} ".replace("is ", " is\r\n")
    spaced = replace(records[0], prompt=prompt, answer=f"{records[0].answer} ")
    train = text_records(*records, spaced)
    problem = forget_data(train, None, train.select([0]))
    assert problem.retain.rows.tolist() == [2]
    for form in ("NFC", "NFD"):
        assert matching(train, normalize(form, "who=José")) == [0, 1, 3]
        assert matching(train, normalize(form, "who~sé$")) == [0, 1, 3]


def test_another_label_is_another_record(train):
    renamed = replace(train, labels=(train.labels + 1) % 3).select([3, 4, 5])
    problem = forget_data(train, None, renamed, allow_missing=True)
    assert (len(problem.retain), problem.not_found) == (300, 3)


def test_a_text_that_is_divided_otherwise_into_prompt_and_answer_is_no_twin():
    train = texts(("ab", "c"), ("d", "e"))
    problem = forget_data(train, None, texts(("a", "bc")), allow_missing=True)
    assert (len(problem.retain), problem.not_found) == (2, 1)
    assert forget_data(train, None, texts(("ab", "c"))).not_found == 0


CALL = {"role": "assistant", "content": "", "tool_calls": [{"name": "find", "of": "Ana"}]}
TALK = [{"role": "user", "content": "Who?"}, CALL, {"role": "assistant", "content": "Done. "}]
OTHER = CALL | {"tool_calls": [{"name": "find", "of": "Bob"}]}


def test_conversations_with_the_same_words_are_not_the_same(tmp_path):
    """All of these are equal by their words alone, joined by line breaks."""
    others = [
        {"messages": [TALK[0], OTHER, TALK[2]]},
        {"messages": [TALK[0] | {"role": "system"}, *TALK[1:]]},
        {"messages": [{"role": "user", "content": "Who?\n"}, TALK[2]]},
        {"messages": TALK, "tools": [{"name": "find"}]},
    ]
    path, gone = tmp_path / "all.jsonl", tmp_path / "gone.parquet"
    path.write_text("".join(json.dumps(one) + "\n" for one in ({"messages": TALK}, *others)))
    spaced = [TALK[0], CALL, TALK[2] | {"content": " Done."}]  # in a table, with nulls
    parquet.write_table(pyarrow.Table.from_pylist([{"messages": spaced}]), gone)
    train = read_text(str(path))
    problem = forget_data(train, None, read_text(str(gone)))
    assert problem.retain.rows.tolist() == [1, 2, 3, 4]
    assert problem.copies() == problem.near_copies()[0] == 0


def test_a_conversation_of_one_question_equals_its_prompt_and_answer(tmp_path):
    path = tmp_path / "all.jsonl"
    talks = [[TALK[0], TALK[2]], [TALK[0] | {"role": "system"}, TALK[2]]]
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    problem = forget_data(read_text(str(path)), None, texts(("Who?", "Done.")))
    assert problem.retain.rows.tolist() == [1]


def test_twins_in_either_set_do_not_hide_what_is_not_found(train):
    forget = train.select([0, 4])
    forget.pixels[1] = 255 - forget.pixels[1]
    problem = forget_data(train.select([0, 0, 0, 1, 2, 3]), None, forget, allow_missing=True)
    assert (len(problem.retain), problem.not_found) == (3, 1)
    assert problem.forget_name.startswith("2 records of here, 1 of them found in the training data")
    single = forget_data(train, None, train.select([3])).forget_name
    assert single == "1 record of here, 1 of them found in the training data"


def test_a_record_repeated_in_the_second_data_set_counts_as_often_as_it_is_trained_on(train):
    problem = forget_data(train, None, train.select([5, 5, 7]))
    assert (len(problem.retain), len(problem.forget), problem.not_found) == (298, 2, 0)
    assert problem.forget_name.endswith("2 of them found in the training data; repeated in the file and left out: 1")  # fmt: skip
    twice = forget_data(train.select([5, 5, 6]), None, train.select([5, 5, 5]))
    assert (len(twice.retain), len(twice.forget)) == (1, 2), "as copies in the training data"
    missing = "1 of 2 records of here are not in here as they are; .* give --allow_missing"
    with pytest.raises(HamuError, match=missing):
        forget_data(train.select([0, 1]), None, train.select([1, 3, 3]))


def test_records_that_repeat_are_counted_with_each_set_read_once(train, monkeypatch):
    assert forget_rows(train.select([0, 0, 0, 1]), None, [0]).copies() == 2, "which stay"
    assert forget_rows(train, None, [0]).without_known_tests().test is None
    assert forget_rows(train, None, [0]).forget_name == "1 named row"
    read = []
    digests = ImageData.digests
    monkeypatch.setattr(ImageData, "digests", lambda data: read.append(len(data)) or digests(data))
    problem = forget_rows(train.select([0, 0, 1, 2]), train.select([2, 9]), [0])
    assert problem.copies() == 1
    assert problem.without_known_tests().test.rows.tolist() == [9]
    assert sorted(read) == [1, 2, 3]


def test_texts_in_other_case_or_punctuation_are_near_copies():
    def said(*answers):
        return texts(*(("Who?", answer) for answer in answers))

    data = said("It is Ann.", "it is ANN", "It is Bob.", "It is Ann.")
    problem = forget_rows(data, said("it is bob", "It is Ann!", "It is Ben."), [0])
    assert (problem.copies(), problem.near_copies()) == (1, (1, 2))
    assert forget_rows(data, None, [2]).near_copies() == (0, 0)
    alone = forget_rows(said("Ann.", "Bob."), said("ann", "Ben"), [0])
    assert alone.near_copies() == (0, 1), "in the test set alone"
    for one, other in (("3 < 5", "3 > 5"), ("कमला", "कमल"), ("\U0001f44d", "\U0001f44e")):
        problem = forget_rows(said(one, other, f"{one}."), None, [0])
        assert problem.near_copies() == (1, 0), f"{other} is other text"


@pytest.mark.parametrize(
    ("choose", "message"),
    [
        (lambda t: forget_class(t, None, "cow"), "class 'cow' .* in here; choose of cat, dog"),
        (lambda t: forget_class(t, None, 0, 1.5), r"rho is a share in \[0, 1\]; got 1.5"),
        (lambda t: forget_class(t.select([1, 2]), None, 0), "class 0 does .* choose of dog, owl"),
        (lambda t: forget_rows(t, None, []), "the forget set is empty"),
        (lambda t: forget_rows(t, None, [300]), "row 300 is not in here, which has rows 0 to 299"),
        (lambda t: forget_rows(t, None, [4, 4]), "row 4 is named twice"),
        (lambda t: forget_rows(t, None, list(range(300))), "nothing is left to retain"),
        (lambda t: forget_data(t, None, t), "nothing is left to retain"),
    ],
)
def test_a_wrong_choice_is_an_error_that_says_how_to_put_it_right(train, choose, message):
    with pytest.raises(HamuError, match=message):
        choose(train)


def test_row_lists_are_read_from_text_and_files(tmp_path):
    file = tmp_path / "rows.txt"
    file.write_text("3\r\n17", encoding="utf-8-sig")
    assert parse_rows(str(file)) == [3, 17]
    file.write_text("[3, 17\n25]\n")
    assert parse_rows("3, 17,25") == parse_rows(str(file)) == [3, 17, 25]
    for content in (b"3 Ada", b"3\xff", b"3-5"):
        file.write_bytes(content)
        message = r"rows .* are not whole numbers: .*; write 3,17,25 or"
        with pytest.raises(HamuError, match=message) as error:
            parse_rows(str(file))
        assert "Ada" not in str(error.value), "a record's content"
    file.write_text("\n")
    with pytest.raises(HamuError, match=r"is empty: '.*rows\.txt' names no row; write 3,17,25 or"):
        parse_rows(str(file))
    with pytest.raises(HamuError, match=r"No such file .*; write 3,17,25 or name a text file"):
        parse_rows("nowhere.txt")
    for cut in ("[3, 17, 12", "3, 17]", "[3, 1[7]"):  # the last number may be another row
        file.write_text(cut)
        with pytest.raises(HamuError, match=r"not whole numbers: (the list is cut|they hold)"):
            parse_rows(str(file))


def test_records_are_drawn_by_the_seed_alone_as_in_every_version():
    """A later report of a run shows the records that an earlier one does."""
    assert draw_positions(10, 4, 3) == [6, 0, 3, 7] != draw_positions(10, 4, 4)
    assert draw_positions(10, 2, 3) == [6, 0], "fewer are the first of more"


@pytest.mark.parametrize("most", [None, 0, 1, 3, 4])
def test_a_subset_has_the_records_that_are_drawn_and_is_the_data_itself_if_these_are_all(most):
    data, drawn = ["a", "b", "c"], draw_positions(3, most, 3)
    assert (drawn is None) == (subset(data, most, 3) is data) == (most in (None, 3, 4))
    if drawn is not None:
        assert list(subset(data, most, 3)) == [data[i] for i in drawn]


def test_rows_are_those_of_the_source_and_of_a_users_own_set_its_places():
    class Own(list):
        rows = (("a", 1), ("b", 2))

    assert rows_of(read_images("digits").select([5, 3])).tolist() == [5, 3]
    assert rows_of(Own("abc")).tolist() == [0, 1, 2]
    assert rows_of(Subset(Own("abc"), [2, 0])).tolist() == [2, 0]
