"""Live figures: what a tracker gets of a run, and what not; the line of the progress bar."""

import io
import json
import math
import sys
from pathlib import Path

import pytest
from rich.console import Console
from transformers import TrainerCallback, TrainerState
from transformers.integrations import integration_utils

from hamu import UnlearnConfig
from hamu.cli import main
from hamu.unlearning.trainer.logs import ProgressBar, figures_line

OF_EVERY_STEP = {
    *("kappa", "cos", "direct_threshold", "stop_threshold", "demand", "clipped_demand"),
    *("free_limit", "max_demand", "direct_share", "criterion_met", "rounding", "promise_kept"),
    *("trust", "taken", "stopped", "grad_norm", "learning_rate", "epoch"),
    *(f"{side}_{figure}" for side in ("retain", "forget") for figure in ("loss", "norm")),
    *(
        f"{kind}_{side}_change"
        for kind in ("promised", "first_order", "realised")
        for side in ("retain", "forget")
    ),
}


class Listener(TrainerCallback):
    """Stands in for a tracker; remembers all that it is given."""

    seen: list

    def on_train_begin(self, args, state, control, **kwargs):
        self.seen.append(("begin", state.global_step, args.to_dict(), kwargs))
        json.loads(args.to_json_string())

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.append(("log", state.global_step, logs, kwargs))

    def on_train_end(self, args, state, control, **kwargs):
        self.seen.append(("end", state.global_step, {}, kwargs))


@pytest.fixture
def listened(monkeypatch, tmp_path):
    """Events that a listener in W&B's place is given; it is installed, whatever is."""
    Listener.seen = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "wandb", Listener)
    monkeypatch.setattr(integration_utils, "is_wandb_available", lambda: True)
    for name in ("WANDB_CONSOLE", "WANDB_DISABLE_GIT", "WANDB_DISABLE_CODE"):
        monkeypatch.setenv(name, "as the user wants it")  # so that it is restored
        monkeypatch.delenv(name)
    return Listener.seen


def logged(seen):
    return [(step, figures) for kind, step, figures, _ in seen if kind == "log"]


@pytest.fixture
def unlearn(saved_model, few_digits, tmp_path, monkeypatch):
    """Runs three steps of the command into out, and returns its exit code."""
    monkeypatch.chdir(tmp_path)

    def call(*more, out="out", report_to="wandb"):
        job = "unlearn --recipe digits --max_steps 3 --stopping off --check_steps 1"
        job += " --constraint_mode relative --per_device_train_batch_size 64 --max_eval_samples 64"
        words = (*job.split(), "--data", few_digits, "--model", saved_model)
        return main([*map(str, words), "--output_dir", str(out), "--report_to", report_to, *more])

    return call


def test_a_tracker_gets_every_figure_and_no_data_no_place_and_no_name(
    listened, unlearn, saved_model, tmp_path
):
    words = ("--forget_class", "3", "--run_name", "my run")
    assert unlearn(*words, out=tmp_path / "of Jane Doe") == 0
    settings = listened[0][2]
    expected = {"method": "hamu-q", "constraint_mode": "relative", "max_steps": 3}
    assert expected.items() <= settings.items()
    shown = {name for name, value in settings.items() if value is not None}
    assert not shown & {"output_dir", "run_name", "hub_token"}
    sent = json.dumps([(settings, figures) for _, _, figures, _ in listened])
    for secret in ("Jane", str(tmp_path), str(saved_model), "forget_class", "my run"):
        assert secret not in sent
    for *_, further in listened:
        assert set(further) == {"model"}, "no data loader, tokenizer or optimizer"
        assert list(vars(further["model"])) == ["num_parameters"]
    assert listened[0][3]["model"].num_parameters() > 0
    assert [kind for kind, *_ in listened] == ["begin", *["log"] * 6, "end"]
    steps = {step: figures for step, figures in logged(listened) if "taken" in figures}
    assert sorted(steps) == [1, 2, 3]
    for figures in steps.values():
        assert set(figures) == OF_EVERY_STEP
        assert all(isinstance(value, int | float) for value in figures.values())
        assert (figures["taken"], figures["stopped"]) == (1.0, 0.0)
    evaluations = [step for step, figures in logged(listened) if "eval_forget_gain" in figures]
    assert evaluations == [0, 3], "the evaluation before the first step too, as of step 0"
    known = set().union(*(figures for _, figures in logged(listened)))
    assert not known & {"train_loss", "total_flos"}
    listened.clear()
    assert unlearn("--eval_strategy", "no") == 0
    step, figures = logged(listened)[-1]
    after = json.loads(Path("out/evaluation.json").read_text())["after"]
    assert figures["eval_forget_loss"] == pytest.approx(after["forget"]["loss"])
    assert (step, listened[-1][0]) == (3, "end"), "figures after the last step come before the end"


def test_a_tracker_ends_if_what_comes_after_training_fails(listened, unlearn, monkeypatch, capsys):
    monkeypatch.setattr("hamu.unlearning.jobs.training.first_not_finite", lambda model: "conv")
    assert unlearn() == 2
    assert [kind for kind, *_ in listened].count("end") == 1


def test_the_command_line_is_not_left_for_trackers_to_find(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["hamu", "unlearn", "--forget_filter", "author=Jane Doe"])
    assert main() == 2
    assert "name the model with --model" in capsys.readouterr().err
    assert sys.argv == ["hamu", "unlearn"]


def test_a_tracker_hears_nothing_of_a_run_that_took_no_step_or_was_refused(
    listened, unlearn, tmp_path, capsys, monkeypatch
):
    assert unlearn("--constraint_mode", "absolute", "--constraint", "1e9") == 2
    assert "no step can be taken" in capsys.readouterr().err
    monkeypatch.setenv("WANDB_LOG_MODEL", "end")
    assert unlearn() == 2
    assert "unset WANDB_LOG_MODEL" in capsys.readouterr().err
    assert listened == []
    assert not (tmp_path / "out").exists()


def test_no_tracker_unless_it_is_named_but_ones_own(
    listened, unlearn, monkeypatch, model, trainer_of
):
    monkeypatch.setattr(integration_utils, "is_kubeflow_available", lambda: True)
    monkeypatch.setattr("transformers.integrations.is_kubeflow_available", lambda: True)
    assert unlearn(report_to="none") == 0
    assert listened == []
    assert UnlearnConfig(output_dir="out").report_to == [], "transformers adds kubeflow by itself"
    own = Listener()
    assert own in trainer_of(model, callbacks=[own]).callback_handler.callbacks


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("trackio", "trackio: it is not installed; pip install trackio, or leave it out"),
        ("wandb,mlflow", "mlflow: it is not installed; pip install mlflow, or leave it out"),
        ("all", "'all' is unknown; name some of tensorboard, wandb, mlflow, trackio, or none"),
    ],
)
def test_a_tracker_that_is_not_there_is_one_line_before_anything_is_written(
    listened, monkeypatch, tmp_path, capsys, asked, message
):
    for name in ("trackio", "mlflow"):
        monkeypatch.setattr(integration_utils, f"is_{name}_available", lambda: False)
    for command, model in (("unlearn", "nowhere"), ("train", "resnet8")):
        words = [command, "--recipe", "digits", "--model", model, "--output_dir", "out"]
        assert main([*words, "--report_to", asked]) == 2
        assert capsys.readouterr().err == f"hamu {command}: report_to {message}\n"
    assert not any(tmp_path.iterdir())


def test_tensorboard_files_lie_with_the_run_and_go_with_it(unlearn, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert unlearn(report_to="tensorboard") == 0
    assert unlearn("--overwrite", report_to="tensorboard") == 0
    [events] = (tmp_path / "out/tensorboard").iterdir()
    found = EventAccumulator(str(events)).Reload()
    lines = [json.loads(line) for line in (tmp_path / "out/steps.jsonl").read_text().splitlines()]
    for name in ("kappa", "stop_threshold", "retain_loss", "realised_forget_change"):
        shown = [(event.step, event.value) for event in found.Scalars(f"train/{name}")]
        assert shown == [(line["step"], pytest.approx(line[name], rel=1e-6)) for line in lines]
    assert [event.step for event in found.Scalars("eval/forget_gain")] == [0, 3]
    assert str(tmp_path).encode() not in events.read_bytes()
    assert main(["verify", "out", "--no_models"]) == 0


def test_training_is_reported_too(listened, few_digits):
    job = f"train --data {few_digits} --model resnet8 --max_steps 2 --logging_steps 1"
    assert main([*job.split(), "--output_dir", "original", "--report_to", "wandb"]) == 0
    losses = [(step, figures["loss"]) for step, figures in logged(listened) if "loss" in figures]
    assert [step for step, _ in losses] == [1, 2]
    assert all(math.isfinite(loss) for _, loss in losses)


def test_a_line_has_the_losses_and_how_hard_the_step_was():
    figures = {"retain_loss": 1.234e-5, "forget_loss": 2.0, "kappa": 1.234, "cos": 0.25}
    assert figures_line(figures).endswith("forget 2        cosθ 0.25"), "there is no threshold"
    figures |= {"stop_threshold": 1.0, "clipped_demand": 0.5, "free_limit": 0.4}
    assert figures_line(figures) == "retain 1.23e-05 forget 2        κ/κ₂ 1.23 q/q₀ 1.25"
    figures |= {"forgotten_share": 0.9996, "retain_rise": 0.00123}  # of a run by goal
    assert figures_line(figures) == "forgotten 99.9% retain +0.0012 κ/κ₂ 1.23 q/q₀ 1.25"
    assert figures_line({"eval_forget_loss": 2.0}) == ""


def test_the_bar_gives_the_screen_back_however_training_ends():
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True)
    hidden, shown = "\x1b[?25l", "\x1b[?25h"

    def interrupted():
        with ProgressBar(console, "hamu-q") as bar:
            bar.on_train_begin(None, TrainerState(max_steps=3), None)
            assert (hidden in screen.getvalue(), shown in screen.getvalue()) == (True, False)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert screen.getvalue().count(shown) == 1
    before = screen.getvalue()
    with ProgressBar(console, "hamu-q"):  # and where it never began, it leaves nothing
        pass
    assert screen.getvalue() == before
