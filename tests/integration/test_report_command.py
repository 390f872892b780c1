"""`hamu report`: from real runs on images and texts, and all that can be wrong; only the page is written."""

import json
import os
import shutil
import stat

import pytest
from report_examples import NASTY, write_run

from hamu.cli import main
from hamu.data import read_text
from hamu.models.language import new_language_model, new_tokenizer

FAST = [
    "--max_steps",
    "3",
    "--constraint_mode",
    "relative",
    "--stopping",
    "off",
    "--learning_rate",
    "0.1",
]


def run(*words):
    return main([str(word) for word in words])


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def finished_texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    texts = read_text("miniature")
    rows = [dict(row.fields) for row in texts.records[:24]]
    rows[0] |= {"question": f"Who? {NASTY}", "answer": NASTY}
    (folder / "records.jsonl").write_text("\n".join(map(json.dumps, rows)))
    holdout = [dict(row.fields) for row in read_text("miniature", "test").records[:8]]
    (folder / "holdout.jsonl").write_text("\n".join(map(json.dumps, holdout)))
    tokenizer = new_tokenizer((r.prompt + r.answer for r in texts.records), 400)
    for part in (new_language_model(tokenizer, hidden=32, layers=1, max_length=256), tokenizer):
        part.save_pretrained(folder / "original")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run("unlearn", "--data", "records.jsonl", "--test_data", "holdout.jsonl", "--model", "original", *FAST,
                   "--forget_rows", "0,1,2", "--optim", "adamw_torch", "--output_dir", "run") == 0  # fmt: skip
    return folder


@pytest.fixture
def images(finished_images, tmp_path, monkeypatch):
    shutil.copytree(finished_images, tmp_path / "images")
    monkeypatch.chdir(tmp_path / "images")
    return tmp_path / "images"


@pytest.fixture
def texts(finished_texts, tmp_path, monkeypatch):
    shutil.copytree(finished_texts, tmp_path / "texts")
    monkeypatch.chdir(tmp_path / "texts")
    return tmp_path / "texts"


def refused(capsys, *words):
    capsys.readouterr()
    assert run("report", *words) == 2
    err = capsys.readouterr().err
    assert err.startswith("hamu report: ")
    assert err.count("\n") == 1
    return err


def test_a_run_on_images_becomes_one_page(images, capsys):
    before = contents(images)
    assert run("report", "run", "--contents") == 0
    said = capsys.readouterr()
    assert "the report is in run/report.html" in " ".join(said.out.split())
    after = contents(images)
    page = after.pop(images / "run/report.html").decode()
    assert after == before, "only the page is written"
    for title in ("What was gained", "Trajectory", "Accuracy by class", "Losses", "Hardness", "Branches", "cosθ",
                  "‖Δw‖", "Promise and reality", "Confusion before", "Embedding after", "changed most", "changed least",
                  "Scores after", "ROC of the attack", "The record"):  # fmt: skip
        assert title in page
    assert page.count("Not here") == page.count("Not here: attack.json") == 1
    assert page.count('class="picture"') >= 6
    mode = (images / "run/report.html").stat().st_mode
    assert stat.S_IMODE(mode) == 0o600, "it holds contents"
    assert run("report", "run") == 0, "a page may be replaced"
    assert 'class="picture"' not in (images / "run/report.html").read_text(), (
        "by default it holds figures alone"
    )
    assert stat.S_IMODE((images / "run/report.html").stat().st_mode) != 0o600
    assert run("verify", "run", "--no_models") == 0, "a report breaks no record"


@pytest.mark.parametrize(("spoil", "name"), [
    (lambda at: shutil.copytree(at / "run/model", at / "original", dirs_exist_ok=True), "original model"),
    (lambda at: shutil.copytree(at / "original", at / "run/model", dirs_exist_ok=True), "model after"),
    (lambda at: shutil.copy(at / "data/test.npz", at / "data/train.npz"), "forget set"),
])  # fmt: skip
def test_what_is_not_that_of_the_run_any_more_is_not_asked(images, capsys, spoil, name):
    spoil(images)
    assert run("report", "run", "--contents") == 0
    assert f"the {name} is not that of the run any more" in " ".join(
        capsys.readouterr().out.split()
    )
    page = (images / "run/report.html").read_text()
    assert f"the {name} is not that of the run any more" in page
    assert "Confusion before" not in page


@pytest.mark.parametrize("record", ["{}", '{"models": null}', '{"mod'])
def test_a_record_that_cannot_be_read_is_noted_and_the_models_are_asked(images, record):
    (images / "run/record.json").write_text(record)
    assert run("report", "run") == 0
    page = (images / "run/report.html").read_text()
    assert "Confusion after" in page
    assert "record.json" in page[page.index("Notes") :]


def test_runs_that_do_not_compare_are_said_to(images, capsys):
    shutil.copytree(images / "run", images / "other")
    assert run("report", "run", "other", "--no_models", "--output", "both.html") == 0
    assert "do not all compare" not in (images / "both.html").read_text()
    inputs = json.loads((images / "other/inputs.json").read_text())
    inputs["test set"]["sha256"] = "0" * 64
    (images / "other/inputs.json").write_text(json.dumps(inputs))
    assert run("report", "run", "other", "--no_models", "--output", "both.html") == 0
    told = "These runs do not all compare: other had another test set than run."
    assert told in (images / "both.html").read_text()
    (images / "other/inputs.json").write_text("[]")
    assert run("report", "run", "other", "--no_models", "--output", "both.html") == 0
    assert (
        "does not say what that run has read: it holds something else"
        in (images / "both.html").read_text()
    )


def test_a_run_on_texts_shows_answers_and_says_none_of_them_elsewhere(texts, capsys):
    capsys.readouterr()
    assert run("report", "run", "--answers", "3", "--contents") == 0
    said = capsys.readouterr()
    assert "Who?" not in said.out + said.err
    page = (texts / "run/report.html").read_text()
    assert page.count('class="prompt"') == 6
    assert "Who? &lt;/script&gt;&lt;script&gt;" in page
    assert "Probability of each record" in page
    assert "Min-K%" in page
    assert run("report", "run") == 0
    page = (texts / "run/report.html").read_text()
    assert "Who?" not in page
    assert 'class="prompt"' not in page
    assert "prompts and answers: --contents shows them" in page


def test_without_data_or_models_the_rest_is_shown_and_what_is_missing_is_named(images, capsys):
    shutil.rmtree(images / "original")
    assert run("report", "run") == 0
    assert (
        "a model or the data cannot be read; the command prints why"
        in (images / "run/report.html").read_text()
    )
    assert run("report", "run", "--contents") == 0
    assert "left out what the models say: original is not here" in " ".join(
        capsys.readouterr().out.split()
    )
    page = (images / "run/report.html").read_text()
    assert "Not here: confusion, embeddings" in page
    assert "original is not here" in page
    for title in ("Trajectory", "Accuracy by class", "Losses", "‖Δw‖", "The record"):
        assert title in page
    assert run("report", "run", "--no_models") == 0
    assert "--no_models leaves it out" in (images / "run/report.html").read_text()


def test_several_runs_share_a_page(images, texts, capsys):
    both = images.parent / "both.html"
    assert run("report", images / "run", texts / "run", "--output", both, "--no_models") == 0
    page = both.read_text()
    assert "All runs" in page
    assert page.count('<article class="run"') == 2
    err = refused(capsys, images / "run", texts / "run")
    assert "2 folders are named: say where their common page goes, with --output FILE.html" in err


def test_a_link_in_place_of_the_page_stays_and_leads_to_it(tmp_path):
    write_run(tmp_path / "run")
    (tmp_path / "shared").mkdir()
    (tmp_path / "link.html").symlink_to("shared/page.html")
    for _ in range(2):
        assert (
            run("report", tmp_path / "run", "--no_models", "--output", tmp_path / "link.html") == 0
        )
        assert (tmp_path / "link.html").is_symlink()
        assert "What was gained" in (tmp_path / "shared/page.html").read_text()


def test_wrong_input_is_one_line_and_writes_nothing(images, capsys):
    before = contents(images)
    (images / "mine.html").write_text("mine")
    os.mkfifo(images / "pipe.html")
    for name, content in (("demo/summary.json", "{}"), ("compare/comparison.json", "{}")):
        (images / name).parent.mkdir()
        (images / name).write_text(content)
    for words, said in (
        (["demo"], "demo/summary.json is not that of a demo; name the --output_dir"),
        (
            ["compare"],
            "the comparison in compare has no run yet; wait until its first one has begun",
        ),
        (["gone"], "there is no folder gone; name the --output_dir of a `hamu unlearn`"),
        (["data"], "data holds no run: it has neither steps.jsonl nor evaluation.json"),
        (
            ["run", "--output", "nowhere/x.html"],
            "the folder nowhere of --output is not there; make it",
        ),
        (
            ["run", "--output", "data"],
            "data is there and is not a report",
        ),
        (
            ["run", "--output", "pipe.html"],
            "pipe.html is there and is not a report",
        ),
        (
            ["run", "--output", "mine.html"],
            "mine.html is there and is not a report; choose another --output",
        ),
        (["run", "--samples", "0"], "samples 0 must be at least 1"),
        (["run", "--answers", "-1"], "answers -1 must be at least 0"),
        (["run", "--samples", "many"], "argument --samples: invalid int value: 'many'"),
        ([], "the following arguments are required: RUN"),
    ):
        assert said in refused(capsys, *words)
    for name in ("demo", "compare"):
        assert len(list((images / name).iterdir())) == 1
        shutil.rmtree(images / name)
    assert contents(images) == before | {images / "mine.html": b"mine"}
