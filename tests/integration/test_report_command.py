"""`hamu report`: from real runs on images and texts, and wrong input; only the page is written."""

import errno
import os
import shutil
import stat

import pytest
from report_examples import write_run
from run_files import contents, run

from hamu.unlearning import jobs


def page_of(*words):
    """The page of run/, after the command has succeeded."""
    assert run(f"report run {' '.join(words)}") == 0
    with open("run/report.html", encoding="utf-8") as file:
        return file.read()


def refused(capsys, *words):
    capsys.readouterr()
    assert run(f"report {' '.join(words)}") == 2
    err = capsys.readouterr().err
    assert err.startswith("hamu report: ")
    assert err.count("\n") == 1
    return err


def test_a_run_on_images_becomes_one_page(images, capsys):
    before = contents(images)
    page = page_of("--contents")
    assert "the report is in run/report.html" in " ".join(capsys.readouterr().out.split())
    after = contents(images)
    after.pop(images / "run/report.html")
    assert after == before, "only the page is written"
    titles = "Trajectory|Accuracy by class|Losses|Hardness|cosθ|‖Δw‖|Promise and reality|Confusion before"
    titles += "|Embedding after|further metric|changed most|changed least|Scores after|ROC of the attack|The record"
    for title in titles.split("|"):
        assert title in page
    assert page.count("Not here") == page.count("Not here: attack.json") == 1
    assert page.count('class="picture"') >= 6
    mode = (images / "run/report.html").stat().st_mode
    assert stat.S_IMODE(mode) == 0o600, "it holds contents"
    assert 'class="picture"' not in page_of(), "by default it holds figures alone"
    assert stat.S_IMODE((images / "run/report.html").stat().st_mode) != 0o600
    assert run("verify run --no_models") == 0, "a report breaks no record"


def exchange(one, other):
    os.rename(one, "kept")
    os.rename(other, one)
    os.rename("kept", other)


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        (lambda: shutil.copytree("original", "run/model", dirs_exist_ok=True), "model after"),
        (lambda: exchange("data/test.npz", "data/train.npz"), "forget set"),
    ],
)
def test_inputs_that_have_changed_since_the_run_are_not_observed(images, capsys, changed, name):
    changed()
    page, words = page_of("--contents"), f"the {name} is not that of the run any more"
    assert words in " ".join(capsys.readouterr().out.split())
    assert words in page
    assert "Confusion before" not in page


def test_several_runs_share_a_page(images, capsys):
    shutil.copytree("run", "other")
    assert run("report run other --no_models --output both.html") == 0
    page = (images / "both.html").read_text()
    assert page.count('<article class="run"') == 2
    assert "do not all compare" not in page
    words = "name the place of the page of 2 folders with --output FILE"
    assert words in refused(capsys, "run", "other")


def test_a_run_on_texts_shows_answers_on_its_page_alone(texts, capsys):
    capsys.readouterr()
    page = page_of("--answers", "6", "--contents")
    said = capsys.readouterr()
    assert "Who?" not in said.out + said.err
    assert page.count('class="prompt"') == 12
    for shown in ("Who? &lt;/script&gt;&lt;script&gt;", "Probability of each record", "Min-K%"):
        assert shown in page
    assert "prompts and answers: --contents shows them" in page_of()


def test_without_data_or_models_the_rest_is_shown(images, capsys):
    shutil.rmtree(images / "original")
    assert "a model or the data cannot be read; the command prints why" in page_of()
    page = page_of("--contents")
    words = "left out what the models say: original is not here"
    assert words in " ".join(capsys.readouterr().out.split())
    shown = ("Trajectory", "Accuracy by class", "Losses", "‖Δw‖", "The record")
    for words in ("Not here: confusion, embeddings", "original is not here", *shown):
        assert words in page
    assert "--no_models leaves it out" in page_of("--no_models")


def test_a_link_in_place_of_the_page_stays_and_leads_to_it(tmp_path):
    write_run(tmp_path / "run")
    (tmp_path / "shared").mkdir()
    link = tmp_path / "link.html"
    link.symlink_to("shared/page.html")
    for _ in range(2):
        assert run(f"report {tmp_path}/run --no_models --output {link}") == 0
        assert link.is_symlink()
        assert "What was gained" in (tmp_path / "shared/page.html").read_text()


def test_one_run_is_named_with_or_without_a_list(tmp_path):
    write_run(tmp_path / "run")
    for named in (tmp_path / "run", f"{tmp_path}/run", [tmp_path / "run"]):
        assert jobs.report(named, no_models=True) == tmp_path / "run/report.html"


def test_wrong_input_is_one_line_and_writes_nothing(images, capsys):
    (images / "mine.html").write_text("mine")
    (images / "compare").mkdir()
    (images / "compare/comparison.json").write_text("{}")
    before = contents(images)
    os.mkfifo(images / "pipe.html")
    for words, said in (
        (
            "compare",
            "the comparison in compare has no run to show: none has begun yet, or all have failed",
        ),
        ("gone", "there is no folder gone; name the --output_dir of a `hamu unlearn`"),
        ("data", "data holds no run: it has neither steps.jsonl nor record.json"),
        ("run --output nowhere/x.html", "the folder nowhere of --output is not there"),
        ("run --output data", "data is there and is not a report"),
        ("run --output pipe.html", "pipe.html is there and is not a report"),
        ("run --output mine.html", "mine.html is there and is not a report; choose another"),
        ("run --samples 0", "samples 0 must be at least 1"),
        ("run --answers -1", "answers -1 at least 0"),
    ):
        assert said in refused(capsys, *words.split())
    (images / "pipe.html").unlink()
    assert contents(images) == before


def test_a_full_disk_is_named_with_the_page_and_the_way_out(images, capsys, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("hamu.unlearning.jobs.review.write_whole", full)
    said = refused(capsys, "run")
    assert "cannot be written to run/report.html: " in said
    assert said.endswith("No space left on device; make room, or choose another --output\n")
