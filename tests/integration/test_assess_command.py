"""`hamu assess`: exit codes for scripts, what it leaves behind, what it never touches."""

import re

import numpy as np
import pytest
from run_files import contents, read

from hamu.data import read_images

QUICK = ("--assess_batches", "1", "--curvature_samples", "0")


@pytest.fixture
def assess(cli, saved_model):
    """Assesses the trained ResNet-8; returns the exit code, assess.json and the screen."""

    def call(*flags):
        fixed = ("--recipe", "digits", "--learning_rate", "0.005", "--model", saved_model)
        code, out, err = cli("assess", *fixed, "--overwrite", "--output_dir", "assess", *flags)
        return code, read("assess/assess.json"), out + err

    return call


def test_the_exit_code_is_the_verdict(assess):
    code, found, screen = assess("--rho", "0.5")
    assert code == found["verdict"]["code"] == 0
    assert "raise the forget loss without raising the retain loss" in screen
    code, found, screen = assess("--rho", "1", "--constraint", "0.99", *QUICK[2:])
    assert code == 3
    assert found["hamu-q"]["regime"] == "unavoidable"
    assert "this demand has a price: it will cost about" in screen


def test_it_leaves_its_files_and_the_model_as_it_was(assess, tmp_path, saved_model):
    before = contents(saved_model)
    _, found, screen = assess("--method", "hamu-u")
    names = sorted(p.name for p in (tmp_path / "assess").glob("[!.]*"))
    assert names == ["assess.json", "config.yaml", "frontier.png"]
    assert contents(saved_model) == before
    assert found["method"] == "hamu-u"
    assert len(found["blocks"]) == 23
    assert found["epochs_of_passes"] <= 3
    assert len(found["conflicts"]["forget"]["top"]) == 20
    assert "trusted up to" in screen


def test_rows_of_a_second_file_are_told_from_those_of_the_data(cli, few_digits, saved_model):
    some = read_images(str(few_digits)).select([40, 41, 42])
    np.savez("gone.npz", images=some.pixels[:, 0].numpy(), labels=some.labels.numpy())
    words = ("assess", "--data", few_digits, "--model", saved_model, *QUICK, "--constraint_mode")
    _, out, _ = cli(*words, "relative", "--forget_data", "gone.npz", "--output_dir", "out")
    hardest = r"forget records hardest against the retain gradient, by row of gone\.npz: [012] \("
    assert re.search(hardest, out)
    assert re.search(r"retain records hardest against the forget gradient, by row: \d+ \(", out)


def test_it_names_the_loss_assessed_and_that_of_the_run_where_it_is_another(assess):
    _, found, screen = assess(*QUICK)
    assert found["loss"] == "cross_entropy"
    assert set(found["objectives_of_the_run"].values()) == {"cross_entropy"}
    assert "another loss" not in screen
    assert "curvature: not measured" in screen
    _, other, screen = assess(*QUICK, "--forget_objective", "npo")
    assert "assessed with cross-entropy on both sides, but hamu-q has another loss: npo" in screen
    assert other["objectives_of_the_run"]["forget"] == "npo"
    assert other["hamu-q"] == found["hamu-q"]
    _, other, screen = assess(*QUICK, "--method", "scrub")
    assert "but scrub has another loss: scrub_retain to retain, kl_to_original to forget." in screen
