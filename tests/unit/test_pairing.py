"""Pairs: who stands beside whom, and that it depends on the seed alone."""

import json

import pytest
from torch.utils.data import DataLoader

from hamu import HamuError
from hamu.core.gram import SIDES
from hamu.data import PairedDataset

RETAIN, FORGET = list(range(10)), list(range(100, 104))


def epoch(pairs, number, batch_size=3):
    pairs.set_epoch(number)
    loader = DataLoader(pairs, batch_size=batch_size, collate_fn=lambda batch: batch)
    batches = list(loader)
    return [r for b in batches for r in b["retain"]], [f for b in batches for f in b["forget"]]


@pytest.mark.parametrize("shuffle", ["epoch", "once"])
@pytest.mark.parametrize(("retain", "forget"), [(RETAIN, FORGET), (FORGET, RETAIN)])
def test_every_round_draws_each_forget_record_once_also_across_epochs(retain, forget, shuffle):
    pairs = PairedDataset(retain, forget, shuffle=shuffle)
    epochs = [epoch(pairs, number) for number in range(10)]
    assert all(sorted(stay) == sorted(retain) for stay, _ in epochs), "a pass over the retain data"
    assert epoch(PairedDataset(retain, forget, seed=2), 0) != epochs[0], "by the seed"
    drawn = [f for _, go in epochs for f in go]
    rounds = [drawn[i : i + len(forget)] for i in range(0, len(drawn), len(forget))]
    assert all(sorted(one) == forget for one in rounds)
    first = -(-len(retain) // len(forget))
    orders = [rounds[n : n + first] for n in range(0, len(rounds) - first, first)]
    assert all(one == orders[0] for one in orders) == (shuffle == "once"), "those of the first"


def test_the_order_does_not_depend_on_the_batch_size_and_is_of_each_side_its_own():
    retain, forget = epoch(PairedDataset(RETAIN, RETAIN), 2)
    assert sorted(retain) == sorted(forget) == RETAIN != retain != forget
    for size in (1, 4, 10):
        assert epoch(PairedDataset(RETAIN, RETAIN), 2, size) == (retain, forget)


def test_shuffled_once_all_epochs_have_the_same_pairs_where_the_sizes_divide():
    pairs = PairedDataset(RETAIN, [*FORGET, 104], shuffle="once")
    fresh = PairedDataset(RETAIN, [*FORGET, 104])
    assert epoch(pairs, 0) == epoch(pairs, 1) == epoch(pairs, 7) == epoch(fresh, 0)
    assert epoch(fresh, 0)[0] != epoch(fresh, 1)[0] != RETAIN, "else each epoch has its own"


def test_a_batch_has_the_sides_asked_for():
    one_side = PairedDataset(RETAIN, FORGET, sides=["forget"])
    assert (len(one_side), set(one_side.__getitems__([0]))) == (len(RETAIN), {"forget"})


class WithAlternatives(list):
    alternatives = tuple(-value for value in FORGET)


def test_another_answer_stands_in_the_batch_of_its_own_record():
    sides, forget = [*SIDES, "alternative"], WithAlternatives(FORGET)
    pairs = PairedDataset(RETAIN, forget, collate=lambda items: {"values": items}, sides=sides)
    batch = pairs.__getitems__(list(range(7)))
    assert set(batch) == {"retain", "forget"}
    assert batch["forget"]["alternative"]["values"] == [-v for v in batch["forget"]["values"]]
    forget.append(0)
    with pytest.raises(HamuError, match=f"has {len(forget)} records and {len(FORGET)} altern"):
        PairedDataset(RETAIN, forget, sides=sides)


@pytest.mark.parametrize(
    ("retain", "forget", "side"), [([], FORGET, "retain"), (RETAIN, [], "forget")]
)
def test_an_empty_side_is_an_error_that_names_it(retain, forget, side):
    with pytest.raises(HamuError, match=f"the {side} set is empty"):
        PairedDataset(retain, forget)


def test_a_focus_draws_only_from_its_records_from_its_place_on():
    pairs, plain = PairedDataset(RETAIN, FORGET), PairedDataset(RETAIN, FORGET)
    pairs.focus_on([1, 3], 6)
    (retain, forget), (whole_retain, whole_forget) = epoch(pairs, 0), epoch(plain, 0)
    assert retain == whole_retain, "the retain side is as it was"
    assert forget[:6] == whole_forget[:6]
    assert {tuple(sorted(forget[i : i + 2])) for i in range(6, 10, 2)} == {(101, 103)}
    assert set(epoch(pairs, 3)[1]) == {101, 103}
    pairs.focus_on([2], 20)
    assert set(epoch(pairs, 1)[1]) == {101, 103}, "before its place the one before holds"
    assert set(epoch(pairs, 2)[1]) == {102}
    resumed = PairedDataset(RETAIN, FORGET)
    resumed.focus = [(start, where) for start, where in json.loads(json.dumps(pairs.focus))]
    assert epoch(pairs, 2) == epoch(resumed, 2, batch_size=4), "after a resume too"
    pairs.focus_on([], 30)
    assert epoch(pairs, 3) == epoch(plain, 3), "no records mean all of them"


def test_with_positions_a_batch_has_each_forget_record_once_and_names_it():
    pairs = PairedDataset(RETAIN, FORGET, with_positions=True)
    pairs.focus_on([3, 1], 0)
    batch = pairs.__getitems__(list(range(6)))
    assert sorted(batch["positions"].tolist()) == [1, 3]
    assert batch["forget"] == [FORGET[i] for i in batch["positions"].tolist()]
    assert len(batch["retain"]) == 6
    assert "positions" not in PairedDataset(RETAIN, FORGET).__getitems__([0, 1])


@pytest.mark.parametrize("open_", [[], [3, 1], [2]])
@pytest.mark.parametrize("processes", [2, 3, 4])
def test_with_positions_all_processes_together_have_each_forget_record_once(processes, open_):
    whole = PairedDataset(RETAIN, FORGET, with_positions=True)
    shares = [PairedDataset(RETAIN, FORGET, with_positions=True, share=r) for r in range(processes)]
    for pairs in (whole, *shares):
        pairs.focus_on(open_, 0)
    for batch in ([0, 1, 2, 3, 4, 5], [6, 7, 8, 9]):
        found = [one.__getitems__(batch[r::processes]) for r, one in enumerate(shares)]
        counted = [one for one in found if one.get("weight", {}).get("forget", 1.0)]
        once = whole.__getitems__(batch)["positions"].tolist()
        assert sorted(p for one in counted for p in one["positions"].tolist()) == sorted(once)
        assert all(len(one["forget"]) == len(one["positions"]) > 0 for one in found)
        assert not any("retain" in one.get("weight", {}) for one in found)
