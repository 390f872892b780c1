"""`hamu assess`: exit codes for scripts, what it leaves behind, what it never touches."""

import json

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from hamu.assess import assess_model
from hamu.cli import main
from hamu.core.forward import predict_logits
from hamu.core.objectives import CrossEntropy, Scored
from hamu.data import TextCollator, encode, read_images, read_text
from hamu.data.images import collate
from hamu.models import load_classifier
from hamu.models.language import load_language_model, load_tokenizer

DIGITS = ["--recipe", "digits"]
CONSTRAINT = ["--constraint_mode", "relative"]


@pytest.fixture
def assess(tmp_path, capsys, saved_model):
    """Assesses the trained ResNet-8; returns the exit code, assess.json and the screen."""

    def call(*flags, source=DIGITS):
        out = tmp_path / "assess"
        code = main(
            [
                "assess",
                *source,
                "--learning_rate",
                "0.005",
                "--model",
                str(saved_model),
                "--output_dir",
                str(out),
                "--overwrite",
                *flags,
            ]
        )
        found = (
            json.loads((out / "assess.json").read_text())
            if (out / "assess.json").exists()
            else None
        )
        captured = capsys.readouterr()
        return code, found, " ".join((captured.out + captured.err).split())

    return call


def test_the_exit_code_is_the_verdict(assess):
    code, found, screen = assess("--rho", "0.5")
    assert code == 0
    assert "can improve both" in screen
    assert found["verdict"]["code"] == 0
    code, found, screen = assess("--rho", "1", "--constraint", "0.99")
    assert code == 3
    assert found["hamu-q"]["regime"] == "unavoidable"
    assert "will cost about" in screen


def test_any_step_hurts_when_the_forget_data_are_copies_of_the_retain_data(assess, tmp_path):
    """The paper's extreme example: what is forgotten and what stays are the same images."""
    digits = read_images("digits")
    images, labels = (x.numpy()[:200] for x in (digits.pixels.movedim(1, 3), digits.labels))
    np.savez(
        tmp_path / "twice.npz",
        images=np.concatenate([images, images]),
        labels=np.concatenate([labels, labels]),
    )
    rows = ",".join(map(str, range(200)))
    source = ["--data", str(tmp_path / "twice.npz"), "--forget_rows", rows, *CONSTRAINT]
    code, found, screen = assess(source=source)
    assert code == 4, screen
    assert "It will be very hard, do not start: " in screen.partition("‖g_r‖")[0]
    assert "stop: next to nothing is free" in screen or "stop: every step must hurt" in screen
    assert found["hamu-q"]["cos"] == pytest.approx(1, abs=1e-3)


def test_what_it_leaves_behind(assess, tmp_path, saved_model):
    before = {p.name: p.read_bytes() for p in saved_model.iterdir() if p.is_file()}
    _, found, screen = assess("--method", "hamu-u")
    assert sorted(p.name for p in (tmp_path / "assess").iterdir()) == [
        ".hamu",
        "assess.json",
        "config.yaml",
        "frontier.png",
    ]
    assert {p.name: p.read_bytes() for p in saved_model.iterdir() if p.is_file()} == before
    assert found["method"] == "hamu-u"
    assert len(found["blocks"]) == 23
    assert found["epochs_of_passes"] <= 3
    assert len(found["conflicts"]["forget"]["top"]) == 20
    assert "trusted up to" in screen


def test_it_says_which_loss_is_assessed_and_that_of_the_run_where_it_is_another(assess):
    quick = ("--assess_batches", "1", "--curvature_samples", "0")
    _, found, screen = assess(*quick)
    assert (found["loss"], found["objectives_of_the_run"]) == (
        "cross_entropy", {"retain": "cross_entropy", "forget": "cross_entropy"}
    )  # fmt: skip
    assert "another loss" not in screen
    assert "curvature: not measured" in screen
    _, other, screen = assess(*quick, "--forget_objective", "npo")
    assert (
        "assessed with cross-entropy on both sides, but hamu-q has another loss: npo to forget."
        in screen
    )
    assert other["objectives_of_the_run"]["forget"] == "npo"
    assert other["hamu-q"] == found["hamu-q"]
    _, other, screen = assess(*quick, "--method", "scrub")
    assert "but scrub has another loss: scrub_retain to retain, kl_to_original to forget." in screen


def test_wrong_options_are_one_line(assess):
    assert assess("--assess_batches", "0")[::2] == (
        2,
        "hamu assess: most_batches (--assess_batches) 0 must be at least 1",
    )
    code, found, screen = assess("--curvature_samples", "-1")
    assert (code, found) == (2, None)
    assert "0 for no curvature" in screen


def test_the_adapter_of_a_language_model(tmp_path, saved_text_model):
    data = ["--data", "miniature", "--max_length", "96", "--per_device_train_batch_size", "32"]
    problem = [*data, "--model", str(saved_text_model), "--forget_filter", "author~^V"]
    problem += ["--constraint_mode", "relative", "--assess_batches", "2"]
    assert main(["assess", *problem, "--lora", "--lora_rank", "2", "--curvature_samples", "4",
                 "--output_dir", str(tmp_path / "lora")]) in (0, 3, 4)  # fmt: skip
    found = json.loads((tmp_path / "lora/assess.json").read_text())
    assert found["curvature"]["largest_eigenvalue"] > 0
    assert all("lora" in block["name"] for block in found["blocks"])


@pytest.mark.parametrize("kind", ["image", "text"])
def test_records_in_conflict_are_those_of_backward_passes_on_trained_networks(
    kind, saved_model, saved_text_model, problem
):
    """A trained network bends: with too long a step the two forward passes would rank its records at random."""
    if kind == "image":
        model, data, collator = load_classifier(str(saved_model)), problem, collate
        retain, forget = data.retain, data.forget.select(range(40))
    else:
        tokenizer, model = (
            load_tokenizer(str(saved_text_model)),
            load_language_model(str(saved_text_model)),
        )
        texts = encode(read_text("miniature"), tokenizer, 96)
        retain, forget, collator = (
            texts.select(range(40, 100)),
            texts.select(range(24)),
            TextCollator(0),
        )
    found = assess_model(
        model, retain, forget, collate=collator, batch_size=64, curvature_samples=0
    )
    parameters = [p for p in model.parameters() if p.requires_grad]
    model.eval()

    def gradient(records):
        batch = collator(records) if kind == "text" else records
        scored = Scored.of(predict_logits(model, batch), batch["labels"])
        total = CrossEntropy().total(scored, None)
        return torch.autograd.grad(total, parameters), len(scored.labels)

    everything = (
        [retain[i] for i in range(len(retain))]
        if kind == "text"
        else retain.__getitems__(range(len(retain)))
    )
    direction, count = gradient(everything)
    exact, predictions = {}, 0
    for i in range(len(forget)):
        grads, n = gradient([forget[i]] if kind == "text" else forget.__getitems__([i]))
        predictions += n
        exact[i] = (
            sum(
                (a.double() * b.double()).sum().item()
                for a, b in zip(grads, direction, strict=True)
            )
            / count
        )
    values = dict(
        zip(
            found.conflicts["forget"].rows.tolist(),
            found.conflicts["forget"].values.tolist(),
            strict=True,
        )
    )
    ours = [values[row] for row in forget.rows.tolist()]
    theirs = [exact[i] * len(forget) / predictions for i in range(len(forget))]
    assert spearmanr(ours, theirs).statistic >= 0.99
    raw = found.hamu_q.kappa / found.clip[0] / found.clip[1]
    assert sum(ours) / len(ours) == pytest.approx(raw, rel=0.05)
