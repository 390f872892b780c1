"""The order of the league, and its table."""

import json
from pathlib import Path

from experiments.league import _mean, ranked, table

RESULTS = Path(__file__).parents[2] / "docs/results"


def row(cost, back=0.5):
    return {"cost": cost, "relearned": [back], "test_accuracy": [0.9], "step": [5.0], "learning_rate": 0.001}  # fmt: skip


ROWS = {"never": None, "cheap": row([0.01, 0.03]), "ties": row([0.02], back=0.25), "hamu-q": row([0.04]), "free": row([-0.1])}  # fmt: skip


def test_entries_rank_by_mean_cost_then_by_what_comes_back_and_last_if_never_there():
    assert [name for name, _ in ranked(ROWS)] == ["free", "ties", "cheap", "hamu-q", "never"]


def test_the_table_gives_the_share_of_hamus_cost_where_both_pay():
    part = {"level": 7.0, "start": {"forget": 0.1, "retain": 0.2}, "retrained_relearned": 0.0, "rows": ROWS,
            "levels": {"cheap": {"1.0": 0.5}}}  # fmt: skip
    text = table({"p": part, "p | bounded": {"rows": {"ga": row([0.06])}}})
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("|")]
    assert len({len(row) for row in rows}) == 1, "as many columns in each row"
    cells = {row[1]: row for row in rows}
    assert (cells["free"][4], cells["cheap"][4], cells["ga + bounded"][4]) == ("-", "0.50", "1.50")
    assert cells["never"][2] == "never"
    heads = rows[0]
    assert heads[-1] == "at 1", "no other level has a figure"
    assert (cells["cheap"][-1], cells["ties"][-1]) == ("+0.5000", "-")
    assert (cells["cheap"][3], cells["ties"][3]) == ("+0.0100…+0.0300", "-")


def test_a_figure_of_several_seeds_is_its_mean():
    assert [_mean(one) for one in (0.5, {"mean": 0.5, "deviation": 0.1})] == [0.5, 0.5]


def test_the_page_shows_what_was_measured():
    page = (RESULTS / "league.md").read_text().splitlines()
    assert {*table(json.loads((RESULTS / "league.json").read_text())).splitlines()} <= {*page}
