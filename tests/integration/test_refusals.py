"""Command lines and settings that are refused: one line that says what is wrong, exit code 2, nothing written."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers.training_args import OptimizerNames

from hamu.cli import main
from hamu.models import SmallResNet, SmallResNetConfig
from hamu.unlearning.jobs.task import Task

IMAGES = ["--data", "a.npz", "--forget_rows", "0,4"]
FULL = [*IMAGES, "--model", "model", "--output_dir", "out"]
TEXTS = ["--data", "miniature", "--output_dir", "out"]


@pytest.fixture
def cli(tmp_path, monkeypatch, capfd):
    """Runs a command in a folder with a little data; returns its exit code and what it said on standard error."""
    monkeypatch.chdir(tmp_path)
    images = np.random.default_rng(0).integers(0, 256, (12, 8, 8), dtype=np.uint8)
    Path("README.md").write_text("# Mine")
    np.savez("a.npz", images=images, labels=np.arange(12) % 3)

    def call(*argv):
        before = sorted(Path().rglob("*"))
        code = main(list(argv))
        assert sorted(Path().rglob("*")) == before
        return code, capfd.readouterr().err

    return call


@pytest.fixture
def image_model(tmp_path):
    """The folder of a very small classifier of these images."""
    config = SmallResNetConfig(
        depth=8, width=2, num_channels=1, num_labels=3, image_mean=[0.5], image_std=[0.3]
    )
    SmallResNet(config).save_pretrained(tmp_path / "model")


@pytest.mark.parametrize(("words", "line"), [
    (["demo", "--task", "sound"], "task 'sound' is unknown; choose image or text"),
    (["demo", "--seed", "-1"], "seed -1 must be 0 to 4294967295"),
    (["unlearn", *FULL, "--output_dir", ""], "output_dir is empty; is a shell variable unset?"),
    (["report", ""], "runs is empty; is a shell variable unset?"),
    (["evaluate", *FULL, "--generate", "-1"], "generate -1 must not be negative; 0 for no answers"),
    (["unlearn", *FULL, "--lora_dropout", "-0.5"], "lora_dropout -0.5 must be a share in [0, 1)"),
    (["unlearn", *FULL, "--lora_dropout", "1.5"], "lora_dropout 1.5 must be a share in [0, 1)"),
    (["unlearn", *FULL, "--expected_forget", "0"], "expected_forget 0 must be at least 1 record"),
    (["assess", *FULL, "--bootstrap_memory", "inf"], "bootstrap_memory inf must be a number of GB, 0 or more"),
    (["unlearn", *FULL, "--expected_retain", "-5"], "expected_retain -5 must be at least 1 record"),
    (["unlearn", *FULL, "--data_seed", "1" + 22 * "0"], f"data_seed 1{22 * '0'} must be 0 to 4294967295"),
    (["unlearn", *FULL, "--max_steps", "-3"],
     "max_steps -3 must be a number of steps; leave it out to go by epochs"),
    (["methods", "--all"], "methods takes no options; got --all"),
    (["train", *IMAGES], "name the model with --model: resnet20, tiny-llama, a folder, or hub:OWNER/NAME"),
    (["train", *TEXTS, "--model", "tiny-llama", "--lora"],
     "tiny-llama is new and trained whole; leave --lora and --merge out"),
    (["unlearn", *TEXTS, "--dry_run"],
     "a dry run needs --model, a folder or hub:OWNER/NAME, whose configuration can be read"),
    (["evaluate", *IMAGES], "name the model with --model: a folder written by `hamu train`, or hub:OWNER/NAME"),
    (["evaluate", *IMAGES, "--model", "a\0b"],
     "model 'a\\x00b' has a character that no name or text may have; leave it out"),
    (["assess", *FULL, "--dry_run"], "assess has no --dry_run, which is for hamu train and hamu unlearn; leave it out"),
    (["assess", *FULL, "--auto", "--target_forget_loss", "2", "--max_retain_increase", "1"],
     "assess has no --auto, which is for hamu unlearn; leave it out"),
    (["assess", *FULL, "--target_share", "0.9"],
     "assess has no --target_share, which is for hamu unlearn; leave it out"),
    (["compare", *FULL, "--auto"], "compare has no --auto, which is for hamu unlearn; leave it out"),
    (["compare", *FULL, "--resume"], "compare needs no --resume: the same command again goes on where it was"),
    (["compare", *FULL, "--methods", "hamu-q", "--constraints", "nan"],
     "hamu-q-cnan-lr0.0001-s42: constraint nan must be a positive number"),
    (["unlearn", *FULL, "--without_forget"],
     "unlearn has no --without_forget, by which hamu train makes the retain model; leave it out"),
    (["unlearn", *FULL, "--eval_on_start", "False"],
     "eval_on_start measures the model before unlearning, the baseline of every figure; leave it on"),
    (["unlearn", *FULL, "--save_only_model"],
     "the command has save_only_model, which has no place here: checkpoints are to go on from"),
    (["unlearn", *FULL, "--method", "gdiff", "--load_best_model_at_end", "--save_strategy", "steps",
      "--eval_strategy", "epoch"],
     'the settings do not fit together: --load_best_model_at_end requires the save and eval strategy to match, except '
     'when --save_strategy="best", but found'),
    (["unlearn", *FULL, "--optim", "sdg"], "the settings do not fit together: sdg is not a valid OptimizerNames, "
     f"please select one of {[one.value for one in OptimizerNames]}"),
    (["unlearn", *FULL, "--eval_strategy", "often"],
     "the settings do not fit together: often is not a valid IntervalStrategy, please select one of ['no', 'steps', "
     "'epoch']"),
    (["assess", *FULL, "--bootstrap_memory", "-1"], "bootstrap_memory -1.0 must be a number of GB, 0 or more"),
    (["unlearn", *FULL, "--forget_filter", "name=Ada"],
     "forget_filter is not for images; say what to forget with one of --forget_class, --forget_rows, --forget_data"),
    (["unlearn", "--recipe", "tofu-llama2-lora", "--model", "resnet20", "--data_dir", "tofu"],
     "--data_dir tofu has no effect, as hub:locuslab/TOFU:full@train and hub:locuslab/TOFU:holdout10@train and "
     "hub:locuslab/TOFU:forget10@train would not be read from there; name the files in it with --data, --forget_data "
     "and --test_data"),
    (["unlearn", *FULL, "--rho", "0.5"], "rho 0.5 mixes records into a class; leave it out with --forget_rows"),
    (["unlearn", *FULL, "--allow_missing"], "allow_missing is for --forget_data; leave it out with --forget_rows"),
    (["unlearn", *FULL, "--magic"], "unrecognized arguments: --magic; hamu unlearn --help lists the options"),
    (["unlearn", *FULL, "--methd", "hamu-q"],
     "unrecognized arguments: --methd hamu-q; did you mean --method? hamu unlearn --help lists the options"),
    (["train", "--data", "digits", "--mdoel=resnet8"],
     "unrecognized arguments: --mdoel=resnet8; did you mean --model? hamu train --help lists the options"),
    (["verify", "run", "--no_model"],
     "unrecognized arguments: --no_model; did you mean --no_models? hamu verify --help lists the options"),
    (["unlern", *FULL], "command 'unlern' is unknown; did you mean unlearn?"),
    (["unlearn", *FULL, "--method", "hamuq"], "method 'hamuq' is unknown; did you mean hamu-q?"),
    (["unlearn", *FULL, "--forget_objective", "nop"], "objective 'nop' is unknown; did you mean npo?"),
    (["unlearn", *FULL, "--recipe", "digit"], "recipe 'digit' is unknown; did you mean digits?"),
    (["unlearn", *FULL, "--seed", "x"],
     "argument --seed: invalid int value: 'x'; hamu unlearn --help lists the options"),
    (["unlearn", *FULL, "--resume", "--output_dir"],
     "argument --output_dir/--output-dir: expected one argument; hamu unlearn --help lists the options"),
])  # fmt: skip
def test_a_command_line(cli, words, line):
    assert cli(*words) == (2, f"hamu {words[0]}: {line}\n")


def test_a_class_alone_is_not_to_be_told_from_anything(cli):
    Path("cats/cat").mkdir(parents=True)
    Image.new("L", (8, 8)).save("cats/cat/0.png")
    line = "cats has one class alone, cat; a classifier needs at least two"
    assert cli("train", "--data", "cats", "--model", "resnet8") == (2, f"hamu train: {line}\n")


def test_a_run_in_the_place_of_its_model(cli, image_model):
    Path("run").mkdir()
    Path("model").rename("run/model")
    line = "hamu evaluate: run is the folder of a run; its model is run/model\n"
    for data in (IMAGES, [*TEXTS, "--forget_rows", "0"]):
        assert cli("evaluate", *data, "--model", "run") == (2, line)


@pytest.mark.parametrize(("command", "other"), [("train", "unlearn"), ("unlearn", "train")])
def test_a_run_is_resumed_by_the_command_that_began_it(cli, command, other):
    Path("run").mkdir()
    Path("run/config.yaml").write_text("seed: 1")
    began = {"train": "training set", "unlearn": "forget set"}[other]
    Path("run/inputs.json").write_text(json.dumps({began: None}))
    line = f"run holds a run of hamu {other}; resume it by that"
    assert cli(command, "--resume", "--output_dir", "run") == (2, f"hamu {command}: {line}\n")


@pytest.mark.parametrize(("content", "line"), [
    (b"- seed", "run.yaml is a list; expected settings as `key: value`"),
    (b"unlearn: fast", "unlearn in run.yaml is a single value; expected settings as `key: value`"),
    (b"seed: 1\nkeep: 2\nseed: 2", "run.yaml is not valid YAML, line 3: seed is there twice"),
    (b"? [seed]\n: 1", "run.yaml is not valid YAML, line 1: found unhashable key"),
    (b"unlearn:\n  seeds: [1]", "run.yaml has seeds under unlearn, but hamu unlearn takes no such setting"),
    (b"compare:\n  method: ga", "run.yaml has method under compare, but hamu compare takes no such setting"),
    (b"unlern:\n  seed: 1", "run.yaml has the unknown setting 'unlern'; did you mean unlearn?"),
    (b"seed: [[1], 2]", "run.yaml has nested values under seed; expected one value, or a list of them"),
    (b"seed: \xff", "run.yaml is not a text file; expected YAML"),
    (b"[" * 500, "run.yaml is nested too deeply; expected settings as `key: value`"),
    (b"seed: \x07", "run.yaml is not valid YAML: unacceptable character #x0007: special characters are not allowed"),
    (b"seed: 1\nkeep: ]", "run.yaml is not valid YAML, line 2: expected the node content, but found ']'"),
    (b"magic: 1", "run.yaml has the unknown setting 'magic'; hamu unlearn --help-all lists those there are"),
])  # fmt: skip
def test_a_file_of_settings(cli, content, line):
    Path("run.yaml").write_bytes(content)
    assert cli("unlearn", *FULL, "--config", "run.yaml") == (2, f"hamu unlearn: {line}\n")


@pytest.mark.usefixtures("image_model")
@pytest.mark.parametrize(("words", "line"), [
    (["train", "--eval_strategy", "epoch"],
     "an evaluation needs test data; give --test_data, or leave out --eval_strategy and --eval_on_start\n"),
    (["train", "--test_data", "a.npz", "--eval_strategy", "epoch", "--metric_for_best_model", "taste"],
     "metric_for_best_model 'taste' is not measured; choose one of loss, accuracy\n"),
    (["train", "--gradient_checkpointing"],
     "SmallResNet cannot recompute activations; leave out --gradient_checkpointing\n"),
    (["unlearn", "--learning_rate", "0.1", "--lr_scheduler_type", "cosine_with_min_lr"],
     "the schedule cosine_with_min_lr cannot be made: "),
    (["unlearn", "--learning_rate", "1e-3", "--optim", "adamw_torch_npu_fused"],
     "the optimizer adamw_torch_npu_fused cannot be made: "),
])  # fmt: skip
def test_settings_that_do_not_go_with_data_model_or_machine(cli, words, line):
    code, said = cli(words[0], *FULL, *words[1:])
    assert code == 2
    assert said.startswith(f"hamu {words[0]}: {line}")
    assert said.count("\n") == 1


def test_a_command_for_one_process_that_is_started_in_several(cli, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    line = "hamu assess: assess runs in one process; start it without torchrun\n"
    assert cli("assess", *FULL) == (2, line)


def test_a_signal_outside_of_training_leaves_nothing(cli, monkeypatch):
    monkeypatch.setattr(Task, "start", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    assert cli("evaluate", *FULL) == (143, "hamu evaluate: interrupted\n")
