"""Choosing what to forget: App. E.1 to the letter, and every way to get it wrong."""

from dataclasses import replace

import pytest
import torch

from hamu import HamuError
from hamu.data import (
    ImageData,
    TextRecord,
    TextRecords,
    forget_class,
    forget_data,
    forget_rows,
    parse_rows,
)


@pytest.fixture
def train():
    labels = torch.arange(300) % 3
    pixels = torch.randint(
        0, 256, (300, 1, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    return ImageData(pixels, labels, ("cat", "dog", "owl"), "here", torch.arange(300))


@pytest.mark.parametrize(
    ("rho", "mixed"), [(0, 0), (0.25, 25), (0.29, 29), (0.57, 57), (0.999, 99), (1, 100)]
)
def test_the_mixing_ratio_draws_exactly_floor_rho_n_from_everything_not_yet_chosen(
    train, rho, mixed
):
    problem = forget_class(train, None, "dog", rho)
    assert len(problem.forget) == 100
    assert len(problem.retain) == 200
    own = (problem.forget.labels == 1).sum().item()
    assert own >= 100 - mixed, "the rest may hold unchosen records of the class too"
    rows = torch.cat([problem.forget.rows, problem.retain.rows])
    assert torch.equal(rows.sort().values, train.rows), "forget and retain divide the data"


def test_rho_zero_forgets_the_whole_class_and_nothing_else(train):
    problem = forget_class(train, None, 2, 0.0)
    assert (problem.forget.labels == 2).all()
    assert (problem.retain.labels != 2).all()


def test_rho_one_draws_from_all_classes_alike(train):
    labels = torch.cat([forget_class(train, None, 0, 1.0, seed=s).forget.labels for s in range(20)])
    share = torch.bincount(labels) / len(labels)
    assert (share - 1 / 3).abs().max() < 0.05


def test_the_draw_follows_the_seed(train):
    draws = [forget_class(train, None, 0, 0.5, seed=s).forget.rows for s in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_rows_are_forgotten_in_place(train):
    problem = forget_rows(train, None, [5, 7])
    assert problem.forget.rows.tolist() == [5, 7]
    assert torch.equal(problem.forget.pixels[1], train.pixels[7])
    assert len(problem.retain) == 298


def test_a_second_data_set_takes_its_twins_out_of_the_retain_set(train):
    forget = train.select([3, 4, 5])
    problem = forget_data(train, None, forget)
    assert len(problem.retain) == 297
    assert not set(problem.retain.digests()) & set(forget.digests())
    assert (problem.not_found, problem.copies()) == (0, 0)


def test_a_record_with_another_label_is_no_twin(train):
    forget = train.select([3, 4])
    problem = forget_data(
        train, None, replace(forget, labels=(forget.labels + 1) % 3), allow_missing=True
    )
    assert (len(problem.retain), problem.not_found) == (300, 2)


def test_a_text_that_is_divided_otherwise_into_prompt_and_answer_is_no_twin():
    def texts(*pairs):
        records = tuple(TextRecord(prompt, answer, {}) for prompt, answer in pairs)
        return TextRecords(records, "somewhere", torch.arange(len(pairs)))

    train = texts(("ab", "c"), ("d", "e"))
    problem = forget_data(train, None, texts(("a", "bc")), allow_missing=True)
    assert (len(problem.retain), problem.not_found) == (2, 1)
    assert forget_data(train, None, texts(("ab", "c"))).not_found == 0


def test_a_class_is_named_before_it_is_numbered(train):
    named = replace(train, classes=("1", "0", "owl"))
    assert (forget_class(named, None, "0").forget.labels == 1).all()
    assert (forget_class(named, None, "2").forget.labels == 2).all()


def test_twins_in_either_set_do_not_hide_what_is_not_found(train):
    thrice = train.select([0, 0, 0, 1, 2, 3])
    strange = replace(train.select([4]), pixels=255 - train.select([4]).pixels)
    forget = replace(train, pixels=torch.cat([train.pixels[:1], strange.pixels]), labels=train.labels[[0, 4]],
                     rows=torch.arange(2))  # fmt: skip
    problem = forget_data(thrice, None, forget, allow_missing=True)
    assert (len(problem.retain), problem.not_found) == (3, 1)
    assert problem.forget_name == (
        "2 records of here, 1 of them found in the training data, where they are 3 records"
    )  # fmt: skip
    assert forget_data(train, None, train.select([5, 5])).not_found == 0
    assert forget_rows(thrice, None, [0]).copies() == 2, "which stay"
    assert forget_rows(train, None, [0]).known_tests() == 0
    assert forget_rows(train.select([0, 1, 2]), train.select([0, 2, 5, 6]), [0]).known_tests() == 2


def test_each_set_is_read_through_once_for_records_that_repeat(train, monkeypatch):
    read = []
    digests = ImageData.digests
    monkeypatch.setattr(ImageData, "digests", lambda data: read.append(len(data)) or digests(data))
    problem = forget_rows(train.select([0, 0, 1, 2]), train.select([2, 9]), [0])
    assert (problem.copies(), problem.known_tests()) == (1, 1)
    assert sorted(read) == [1, 2, 3]


@pytest.mark.parametrize(
    ("choose", "message"),
    [
        (
            lambda t: forget_class(t, None, "cow"),
            "class 'cow' does not exist in here; choose one of cat, dog, owl",
        ),
        (lambda t: forget_class(t, None, 7), "class 7 does not exist"),
        (lambda t: forget_class(t, None, 0, 1.5), r"rho is a share in \[0, 1\]; got 1.5"),
        (
            lambda t: forget_class(t.select((t.labels != 0).nonzero().flatten()), None, 0),
            "'cat' has no records",
        ),
        (lambda t: forget_rows(t, None, []), "the forget set is empty"),
        (lambda t: forget_rows(t, None, [300]), "row 300 is not in here, which has rows 0 to 299"),
        (lambda t: forget_rows(t, None, [-1]), "row -1 is not in here"),
        (lambda t: forget_rows(t, None, [4, 4]), "row 4 is named twice"),
        (lambda t: forget_rows(t, None, list(range(300))), "nothing is left to retain"),
        (lambda t: forget_data(t, None, t), "nothing is left to retain"),
        (
            lambda t: forget_data(t.select([0, 1]), None, t.select([2, 3, 4])),
            "none of the 3 records of here is in here; .* --allow_missing if here holds only what is to be retained",
        ),
        (
            lambda t: forget_data(t.select([0, 1]), None, t.select([1, 3, 4])),
            "2 of 3 records of here are not in here as they are; .* --allow_missing to forget them all the same",
        ),
    ],
)
def test_a_wrong_choice_is_an_error_that_says_how_to_put_it_right(train, choose, message):
    with pytest.raises(HamuError, match=message):
        choose(train)


def test_row_lists_are_read_from_text_and_files(tmp_path):
    (tmp_path / "windows.txt").write_text("3\r\n17", encoding="utf-8-sig")
    assert parse_rows(str(tmp_path / "windows.txt")) == [3, 17]
    file = tmp_path / "rows.txt"
    file.write_text("[3, 17\n25]\n")
    assert parse_rows("3, 17,25") == parse_rows(str(file)) == [3, 17, 25]
    file.write_text("3 seventeen")
    with pytest.raises(HamuError, match="'seventeen' in the forget rows"):
        parse_rows(str(file))
    file.write_bytes(b"3\xff")
    with pytest.raises(
        HamuError, match=r"rows\.txt is not a text file; expected one row number a line"
    ):
        parse_rows(str(file))
    with pytest.raises(HamuError, match="neither a list of row numbers nor a file"):
        parse_rows("nowhere.txt")
