"""Command lines and settings that are refused: one line, exit code 2, nothing written."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from small_models import save_small_classifier

import hamu.cli
from hamu.cli import main
from hamu.unlearning.jobs.tasks import Task

IMAGES = ["--data", "a.npz", "--forget_rows", "0,4"]
FULL = [*IMAGES, "--model", "model", "--output_dir", "out"]
TEXTS = ["--data", "miniature", "--output_dir", "out"]


def table(text):
    """Pairs of a command line and the message that refuses it."""
    return [line.split(" => ") for line in text.strip().splitlines()]


@pytest.fixture
def cli(tmp_path, monkeypatch, capfd):
    """Runs a command in a folder with a little data; returns its message."""
    monkeypatch.chdir(tmp_path)
    images = np.random.default_rng(0).integers(0, 256, (12, 8, 8), dtype=np.uint8)
    Path("README.md").write_text("# Mine")
    np.savez("a.npz", images=images, labels=np.arange(12) % 3)

    def call(*argv, code=2):
        before = sorted(Path().rglob("*"))
        assert main(list(argv)) == code
        assert sorted(Path().rglob("*")) == before
        err = capfd.readouterr().err
        assert err.startswith(f"hamu {argv[0]}: ")
        assert err.count("\n") == 1
        return err

    return call


@pytest.fixture
def image_model(tmp_path):
    """The folder of a very small classifier of these images."""
    save_small_classifier(tmp_path / "model")


@pytest.mark.parametrize(("line", "message"), table("""
demo --task sound => task 'sound' is unknown; choose image or text
demo --seed -1 => seed -1 must be 0 to 4294967295
unlearn --output_dir= => output_dir is empty; is a shell variable unset?
evaluate --generate -1 => generate -1 must be at least 0
evaluate --goal mean => goal 'mean' is unknown; choose one of unseen, retrained, erased, loss
unlearn --lora_dropout 1.5 => lora_dropout 1.5 must be at least 0 and below 1
unlearn --expected_forget 0 => expected_forget 0 must be at least 1
methods --all => methods takes no options; got --all
train --data a.npz => name the model with --model: resnet20, tiny-llama, or a saved one
train --data miniature --model tiny-llama --lora => is new and trained whole; leave --lora and
unlearn --data miniature --dry_run => a dry run needs --model, a folder or hub:OWNER/NAME
evaluate --data a.npz => name the model with --model: one of hamu train, or hub:OWNER
evaluate --model a\0b => model 'a\\x00b' has a character that no text may have
assess --dry_run => assess has no --dry_run, which is for hamu train and hamu unlearn; leave it out
assess --auto --target_forget_loss 2 => assess has no --auto, which is for hamu unlearn; leave it
compare --resume => compare has no --resume, as the same command again goes on where it was; leave
unlearn --without_forget => has no --without_forget, which is for hamu train; leave it out
unlearn --eval_on_start False => eval_on_start measures the baseline of every figure; leave it on
unlearn --save_only_model => has save_only_model, which has no place here: give --resume and the --output_dir of a run
unlearn --optim sdg => the settings do not fit together: sdg is not a valid OptimizerNames, please
unlearn --forget_filter name=Ada => say what to forget of images with one of --forget_class, --forget_rows, --forget_data; got --forget_rows
unlearn --rho 0.5 => rho is for --forget_class; leave it out with --forget_rows
unlearn --magic => unrecognized arguments: --magic; hamu unlearn --help lists the options
unlearn --methd hamu-q => --methd hamu-q; did you mean --method? hamu unlearn --help lists the
verify run --no_model => unrecognized arguments: --no_model; did you mean --no_models?
unlern => command 'unlern' is unknown; did you mean unlearn?
unlearn --method hamuq => method 'hamuq' is unknown; did you mean hamu-q?
unlearn --recipe digit => recipe 'digit' is unknown; did you mean digits?
unlearn --seed x => argument --seed: invalid int value: 'x'; hamu unlearn --help lists the options
unlearn --resume --output_dir => argument --output_dir/--output-dir: expected one argument;
"""))  # fmt: skip
def test_a_command_line(cli, line, message):
    command, *words = line.split(" ")
    if command in ("unlearn", "assess", "evaluate", "compare") and "--data" not in words:
        words = [*FULL, *words]
    assert message in cli(command, *words)


def test_a_recipe_of_the_hub_takes_no_folder_of_data(cli):
    line = "unlearn --recipe tofu-llama2-lora --model resnet20 --data_dir tofu"
    message = "--data_dir tofu has no effect on hub:locuslab/TOFU:full@train and hub:locuslab/"
    assert message in cli(*line.split())


def test_a_class_alone_is_not_to_be_told_from_anything(cli):
    Path("cats/cat").mkdir(parents=True)
    Image.new("L", (8, 8)).save("cats/cat/0.png")
    line = "cats has one class alone, cat; a classifier needs at least two"
    assert line in cli("train", "--data", "cats", "--model", "resnet8")


def test_another_answer_to_an_image(cli, image_model):
    line = "the forget objective idk needs another answer to each forget record, which images have"
    by_hand = ["--model", "model", "--forget_objective", "idk", "--max_steps", "1"]
    assert line in cli("unlearn", *IMAGES, *by_hand, "--output_dir", "run")
    assert not Path("run").exists()


def test_a_run_in_the_place_of_its_model(cli, image_model):
    Path("run").mkdir()
    Path("model").rename("run/model")
    for data in (IMAGES, [*TEXTS, "--forget_rows", "0"]):
        line = "run is not a saved model: it has no config.json"
        assert line in cli("evaluate", *data, "--model", "run")


@pytest.mark.parametrize(("command", "other"), [("train", "unlearn"), ("unlearn", "train")])
def test_a_run_is_resumed_by_the_command_that_began_it(cli, command, other):
    Path("run").mkdir()
    Path("run/config.yaml").write_text("seed: 1")
    began = {"train": "training set", "unlearn": "forget set"}[other]
    Path("run/inputs.json").write_text(json.dumps({began: None}))
    line = f"run holds a run of hamu {other}; resume it by that"
    assert line in cli(command, "--resume", "--output_dir", "run")


@pytest.mark.parametrize(("content", "message"), table("""
- seed => run.yaml holds no settings; expected lines of `key: value`
unlearn: fast => unlearn in run.yaml holds no settings; expected lines of `key: value`
seed: 1|keep: 2|seed: 2 => run.yaml is not valid YAML, line 3: seed is there twice
? [seed]|: 1 => run.yaml is not valid YAML, line 1: found unhashable key
unlearn:|  seeds: [1] => run.yaml has the unknown setting 'seeds' under unlearn; did you mean seed?
compare:|  method: ga => run.yaml has the unknown setting 'method' under compare; did you mean methods?
unlern:|  seed: 1 => run.yaml has the unknown setting 'unlern'; did you mean unlearn?
seed: [[1], 2] => run.yaml has nested values under seed; give one value, or a list
seed: \xff => run.yaml is not valid YAML: unacceptable character #x00ff: invalid start byte
seed: \x07 => run.yaml is not valid YAML: unacceptable character #x0007: special characters are
seed: 1|keep: ] => run.yaml is not valid YAML, line 2: expected the node content, but found ']'
magic: 1 => run.yaml has the unknown setting 'magic'; see hamu unlearn --help-all
"""))  # fmt: skip
def test_a_file_of_settings(cli, content, message):
    Path("run.yaml").write_bytes(content.replace("|", "\n").encode("latin1"))
    assert message in cli("unlearn", *FULL, "--config", "run.yaml")


def test_a_file_of_settings_without_an_end(cli):
    Path("run.yaml").write_text("[" * 500)
    assert "run.yaml is not valid YAML: maximum recursion" in cli(
        "unlearn", *FULL, "--config", "run.yaml"
    )


@pytest.mark.usefixtures("image_model")
@pytest.mark.parametrize(("line", "message"), table("""
evaluate --goal retrained => give --retain_model, or another --goal
train --eval_strategy epoch => an evaluation needs test data; give --test_data, or leave out --eval_
train --gradient_checkpointing => SmallResNet cannot recompute activations; leave out --gradient_c
unlearn --method ga --lr_scheduler_type cosine_with_min_lr => the schedule cosine_with_min_lr cannot
unlearn --method ga --optim adamw_torch_npu_fused => the optimizer adamw_torch_npu_fused cannot be
train --test_data a.npz --eval_strategy epoch --metric_for_best_model taste => 'taste' is not measur
"""))  # fmt: skip
def test_settings_that_do_not_go_with_data_model_or_machine(cli, line, message):
    command, *words = line.split()
    assert message in cli(command, *FULL, *words)


def test_a_command_for_one_process_that_is_started_in_several(cli, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    line = "assess: assess runs in one process; start it without torchrun"
    assert line in cli("assess", *FULL)


def test_a_signal_outside_of_training_leaves_nothing(cli, monkeypatch):
    monkeypatch.setattr(Task, "start", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    assert cli("evaluate", *FULL, code=143) == "hamu evaluate: interrupted\n"


def test_ctrl_c_ends_a_command_with_130_and_one_line(cli, monkeypatch):
    def broken_off(argv, screen):
        raise KeyboardInterrupt

    monkeypatch.setattr(hamu.cli, "_methods", broken_off)
    assert cli("methods", code=130) == "hamu methods: interrupted\n"
