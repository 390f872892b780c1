"""The command line: whole jobs on images, and wrong inputs with one clear line and nothing written."""

import itertools
import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from run_files import contents
from safetensors.torch import load_file
from transformers import ViTConfig, ViTForImageClassification, pipeline

from hamu.cli import main
from hamu.data import pixel_statistics, read_images
from hamu.models import load_classifier
from hamu.unlearning.jobs.options import DataOptions
from hamu.unlearning.jobs.settings import settings_of

FAST = "--per_device_train_batch_size 256 --max_steps 2"
CLASS = "--data digits --forget_class 3"
EASY = "--constraint_mode relative --stopping off"
TINY_VIT = dict.fromkeys(["hidden_size", "intermediate_size", "image_size"], 8)
TINY_VIT |= dict.fromkeys(["num_hidden_layers", "num_attention_heads"], 1)
TINY_VIT |= {"patch_size": 4, "attn_implementation": "eager"}


@pytest.fixture
def sh(cli):
    """Runs a command line in an empty folder; returns exit code, output and standard error."""
    return lambda line: cli(*shlex.split(line))


@pytest.fixture
def done(sh):
    """Runs a command line that must succeed without a word on standard error; returns its output."""

    def call(line):
        code, out, err = sh(line)
        assert (code, err) == (0, "")
        return out

    return call


def report_in(folder):
    return json.loads((folder / "evaluation.json").read_text())


def test_train_unlearn_evaluate_from_end_to_end(done, tmp_path):
    original = "train --recipe digits --num_train_epochs 1"
    done(f"{original} --output_dir original")
    done(f"{original} --without_forget --output_dir retrained")
    source = contents(tmp_path / "original")
    out = done(
        "unlearn --recipe digits --model original/model --retain_model retrained/model "
        "--num_train_epochs 2 --output_dir unlearned"
    )
    assert "forget 131 images (class 3), retain 1307, by hamu-q" in out
    assert "steps: 22 taken, 0 not taken; the run ended at step 22 because all" in out
    run = tmp_path / "unlearned"
    files = ".hamu config.yaml evaluation.json inputs.json layers.jsonl model record.json record.md"
    assert sorted(p.name for p in run.iterdir()) == [*files.split(), "steps.jsonl"]
    report = report_in(run)
    before, after = report["before"], report["after"]
    assert after["forget"]["loss"] > before["forget"]["loss"]
    sets = {"retain", "forget", "test", "test_without_class"}
    assert set(after["against_retain_model"]) == sets <= set(after)
    assert set(after["against_retain_model_per_class"]) == sets
    theirs = after["retain_model"]["membership_inference"]
    assert before["retain_model"]["membership_inference"] == theirs
    less = after["retain_model"]["membership_inference_difference"]
    assert less["auc"] == after["membership_inference"]["auc"] - theirs["auc"]
    assert re.search(rf"membership AUC +[\d.]+ +[\d.]+ +{theirs['auc']:.4g}", out)
    assert [e["step"] for e in report["trajectory"]] == [0, 11, 22]
    steps = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    assert [s["step"] for s in steps] == list(range(1, 23))
    assert contents(tmp_path / "original") == source, "the source is never written to"
    weights = {
        name: load_file(tmp_path / name / "model/model.safetensors")
        for name in ("original", "unlearned")
    }
    assert not torch.equal(*(one["conv.weight"] for one in weights.values()))

    out = done("evaluate --recipe digits --model unlearned/model --output_dir check")
    assert "membership accuracy" in out
    again = report_in(tmp_path / "check")["forget"]
    assert again["loss"] == pytest.approx(after["forget"]["loss"], rel=1e-5)
    assert again["per_class_accuracy"].keys() == {"3"}

    # the resolved config repeats the run
    done("unlearn --config unlearned/config.yaml --output_dir repeated")
    repeated = load_file(tmp_path / "repeated/model/model.safetensors")
    assert all(torch.equal(weights["unlearned"][n], repeated[n]) for n in repeated)


def test_evaluate_counts_the_forgotten_records(sh, done, tmp_path, saved_model):
    job = f"evaluate --data digits --forget_rows 1,2,3,4,5,6,7,8 --model {saved_model}"
    out = done(f"{job} --original_model {saved_model} --output_dir unseen")
    goal = report_in(tmp_path / "unseen")["goal"]
    forgotten = goal["after"]["forgotten"]
    assert (goal["kind"], goal["reference"]) == ("unseen", "original model")
    assert goal["after"]["records"] == 8
    assert f"{forgotten} of 8 records are forgotten" in out
    assert "by the goal unseen, compared with" in out
    assert "the original model's losses on the test data; 95% wanted" in out
    assert "losses of the forget records: lowest" in out
    assert "compared with its own losses" in sh(f"{job} --output_dir own")[1]

    out = done(f"{job} --retain_model {saved_model} --goal retrained --output_dir same")
    report = report_in(tmp_path / "same")
    goal, auc = report["goal"], report["membership_inference"]["auc"]
    assert (goal["reference"], goal["after"]["forgotten"]) == ("retain model", 8)
    assert goal["reached"]
    assert re.search(rf"membership AUC +{auc:.4g} +{auc:.4g}", out)

    by_loss = "--target_forget_loss 1e-9 --target_share 1 --output_dir loss"
    assert "8 of 8 records are forgotten" in sh(f"{job} {by_loss}")[1]


def test_evaluate_without_data_or_model_to_compare_with_states_no_goal(done, tmp_path, saved_model):
    digits = read_images("digits").select(range(60))
    np.savez("alone.npz", images=digits.pixels[:, 0].numpy(), labels=digits.labels.numpy())
    job = f"evaluate --data alone.npz --forget_rows 1 --model {saved_model} --output_dir out"
    out = done(job)
    assert "give --test_data (records never trained on), --retain_model" in out
    assert report_in(tmp_path / "out")["goal"] is None


def test_flags_win_over_the_config_and_the_config_over_the_recipe(done, tmp_path, saved_model):
    (tmp_path / "run.yaml").write_text(
        "learning_rate: 0.3\nunlearn:\n  constraint: 0.25\n  max_steps: 1\n"
    )
    done(
        f"unlearn --recipe digits --config run.yaml --model {saved_model} --learning_rate 0.07 "
        "--output_dir out"
    )
    used = yaml.safe_load((tmp_path / "out/config.yaml").read_text())
    assert (used["learning_rate"], used["data"], used["max_steps"]) == (0.07, "digits", 1)
    assert float(used["constraint"]) == 0.25
    line = json.loads((tmp_path / "out/steps.jsonl").read_text())
    assert line["learning_rate"] == 0.07
    assert line["demand"] == pytest.approx(0.25 * line["max_demand"])


@pytest.mark.parametrize(
    ("method", "rate", "warning"),
    [
        ("hamu-q", "1e-6", "at learning rate 1e-06; `hamu assess` suggests a rate, and --auto"),
        ("ft", "1e-6", None),  # which has no forget loss to raise
        ("ga", "10", "above the 2.30 of guessing; lower --learning_rate 10, or end such a run by"),
    ],
)
def test_a_run_that_moves_too_little_or_too_far_warns(done, saved_model, method, rate, warning):
    out = done(
        f"unlearn {CLASS} --model {saved_model} --method {method} --learning_rate {rate} "
        f"--max_steps 1 {EASY if method == 'hamu-q' else ''} --output_dir out"
    )
    assert warning is None or warning in out
    assert ("the model has hardly moved: the forget loss was" in out) == (method == "hamu-q")
    assert ("of guessing" in out) == (method == "ga")


def test_null_takes_back_what_the_recipe_sets(tmp_path):
    (tmp_path / "run.yaml").write_text("test_data: null\n")
    options = {"recipe": "cifar10-resnet20", "config": tmp_path / "run.yaml"}
    parsed = settings_of("unlearn", options)
    data = parsed.of(DataOptions)
    assert (data.data, data.test_data) == ("train.parquet", None)
    assert "test_data" not in parsed.given


def test_numbers_and_truth_values_of_a_mapping_arrive_as_such(tmp_path):
    (tmp_path / "run.yaml").write_text(
        "lr_scheduler_kwargs: {min_lr: 1e-5, steps: 010, cycle: true, last: null, one: .5}\n"
        'optim_args: "1e-5"\n'
    )
    found = settings_of("train", {"config": tmp_path / "run.yaml"}).given
    texts = {"steps": "010", "one": ".5"}
    expected = {"min_lr": 1e-5, "cycle": True, "last": None} | texts
    assert json.loads(found["lr_scheduler_kwargs"]) == expected
    assert type(found["optim_args"]) is str


def save_images(folder, pixels, names):
    for number, (image, name) in enumerate(zip(pixels, names, strict=True)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.asarray(image)).save(folder / name / f"{number:04}.png")


def test_ones_own_folder_of_images_and_named_rows(done, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), dtype=np.uint8)
    save_images(tmp_path / "images", pixels, ["left", "right"] * 20)
    images = "--data images --num_train_epochs 1"
    done(f"train {images} --model resnet8 --output_dir original")
    job = f"unlearn {images} --model original/model --forget_rows 0,7,33 {EASY} --output_dir run"
    out = done(job)
    assert "forget 3 images (3 named rows), retain 37" in out
    flags = "--data images --forget_rows 0 --model original/model --output_dir again"
    out = done(f"evaluate {flags}")
    assert re.search("membership AUC +not measured", out)


def test_classes_of_a_folder_are_those_of_the_model_by_name(
    sh, done, tmp_path, saved_model, digits
):
    labels = digits[0].labels.tolist()
    named = digits[0].select([i for i, label in enumerate(labels) if label in (3, 7)][:60])
    names = [named.classes[label] for label in named.labels]
    save_images(tmp_path / "images", named.pixels[:, 0], names)
    classes = np.array(named.classes)
    np.savez("named.npz", images=named.pixels[:, 0], labels=named.labels, classes=classes)
    flags = f"--model {saved_model} --forget_class 7"
    for data, out in (("images", "folder"), ("named.npz", "named")):
        done(f"evaluate --data {data} {flags} --output_dir {out}")
    first, second = (report_in(tmp_path / name) for name in ("folder", "named"))
    for side in ("retain", "forget"):
        assert first[side]["loss"] == pytest.approx(second[side]["loss"], rel=1e-5)
    assert first["forget"]["per_class_accuracy"].keys() == {"7"}
    done(f"unlearn --data images {flags} --max_steps 1 {EASY} --output_dir run")
    done("verify run")
    code, _, err = sh(f"evaluate --data images --model {saved_model} --forget_class 5")
    assert (code, err) == (
        2,
        "hamu evaluate: class '5' does not exist in images; choose of 3, 7\n",
    )
    (tmp_path / "images" / "3").rename(tmp_path / "images" / "10")
    code, _, err = sh(f"evaluate --data images {flags}")
    assert code == 2
    assert "the model names its classes 0, 1, ..., the data 7, 10, ...;" in err


@pytest.fixture
def coloured(tmp_path):
    """Images in colours, and a transformer for them with an image processor, or without."""
    images = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), dtype=np.uint8)
    images[1::2] //= 2
    for name, chosen in (("train", slice(30)), ("test", slice(30, 40))):
        np.savez(tmp_path / f"{name}.npz", images=images[chosen], labels=np.arange(40)[chosen] % 2)
    config = ViTConfig(**TINY_VIT, num_labels=2)
    ViTForImageClassification(config).save_pretrained(tmp_path / "plain")
    shutil.copytree(tmp_path / "plain", tmp_path / "prepared")
    processor = {"image_processor_type": "ViTImageProcessor", "size": [8, 8]}
    processor["image_std"] = [0.25] * 3
    (tmp_path / "prepared/preprocessor_config.json").write_text(json.dumps(processor))
    return "--data train.npz --test_data test.npz"


ONE_STEP = f"--forget_class 1 --max_steps 1 {EASY} --output_dir run"


def test_the_image_processor_of_a_model_goes_with_it(done, coloured, tmp_path):
    done(f"train {coloured} --model prepared --max_steps 1 --output_dir trained")
    done(f"unlearn {coloured} --model trained/model {ONE_STEP}")
    for model in ("trained/model", "run/model"):
        classify = pipeline("image-classification", model)
        assert list(classify.image_processor.image_std) == [0.25] * 3
        assert len(classify(Image.new("RGB", (9, 9)))) == 2
        assert json.loads((tmp_path / model / "config.json").read_text())["image_std"] == [0.25] * 3


def test_a_model_without_statistics_takes_those_of_all_training_data(sh, done, coloured, tmp_path):
    losses = []
    for number, forget in enumerate(("--forget_class 1", "--forget_rows 0,1")):
        flags = f"--model plain --retain_model plain {forget} --output_dir evaluated-{number}"
        code, out, _ = sh(f"evaluate {coloured} {flags}")
        said = "the mean and standard deviation of train.npz are used"
        assert (code, out.count(said)) == (0, 1)
        losses.append(report_in(tmp_path / f"evaluated-{number}")["test"]["loss"])
    assert losses[0] == losses[1]
    done(f"unlearn {coloured} --model plain {ONE_STEP}")
    config = json.loads((tmp_path / "run/model/config.json").read_text())
    assert (config["image_mean"], config["image_std"]) == pixel_statistics(read_images("train.npz"))
    done("verify run")


def test_a_dry_run_on_images_counts_what_the_run_would_have(done, tmp_path, saved_model):
    parameters = sum(p.numel() for p in load_classifier(str(saved_model)).parameters())

    def plan(line):
        out = done(f"{line} --dry_run")
        assert list(tmp_path.iterdir()) == []
        assert f"{parameters:,}" in out
        rows = dict(re.findall(r"([a-z][a-z:, ]*?) ([\d.,]+)", out))
        return {name: float(value.replace(",", "")) for name, value in rows.items()}

    settings = "--num_train_epochs 2 --per_device_train_batch_size 100"
    new = plan(f"train --data digits --model resnet8 {settings}")
    assert (new["training images"], new["images in a step"], new["steps"]) == (1438, 100, 30)
    assert new["memory: weights"] == pytest.approx(4 * parameters / 1e6, abs=0.05)
    job = f"unlearn {CLASS} --model {saved_model} --method kl --per_device_train_batch_size"
    one, four = (plan(f"{job} {size}") for size in (50, 200))
    assert one["retain images"] + one["forget images"] == 1438
    weights, activations = one["memory: weights"], one["memory: activations"]
    assert one["memory: gradients"] == pytest.approx(2 * weights, abs=0.1), "one of each side"
    assert one["memory: original model"] == weights, "which KL compares with"
    assert four["memory: activations"] == pytest.approx(4 * activations, abs=0.2)
    assert activations > 50 * 8 * 8 * 16 * 4 / 1e6, "more than the first layer of so many images"


@pytest.mark.parametrize(
    "command", ["assess", "compare", "demo", "evaluate", "report", "train", "unlearn", "verify"]
)
def test_help_has_one_layout(capsys, command):
    def help_of(flag):
        assert main([command, flag]) == 0
        return capsys.readouterr().out

    short = help_of("--help")
    usage, _, about, *lines = short.splitlines()
    assert usage.startswith(f"usage: hamu {command} ")
    assert usage.endswith(" [--flag value ...]")
    assert about.strip()
    options = [line for line in lines if re.match("  --", line)]
    assert len(options) >= 3
    for line, below in itertools.pairwise(lines):
        if re.match("  --", line):
            assert re.fullmatch(r"  --\w+( \S+)?( \[.+\])?", line)
            assert re.match(r"        \S", below), f"{line} is not explained"
    if command in ("train", "unlearn", "evaluate"):
        for flag in ("--forget_class", "--learning_rate"):
            assert flag in short
        assert "--adam_beta1" not in short
        assert "--adam_beta1" in help_of("--help-all")


def copied_model(model):
    shutil.copytree(model, "model")


def nan_weights(saved_model):
    model = load_classifier(str(saved_model))
    with torch.no_grad():
        model.conv.weight[0, 0, 0, 0] = torch.nan
    model.save_pretrained("model")


def colour_arrays(_):
    np.savez("a.npz", images=np.zeros((20, 8, 8, 3), np.uint8), labels=np.arange(20) % 10)


def other_retain_model(_):
    ViTForImageClassification(ViTConfig(**TINY_VIT, num_channels=1, num_labels=12)).save_pretrained(
        "retain"
    )


def occupied(_):
    Path("out").mkdir()
    Path("out/thesis.txt").write_text("mine")


@pytest.mark.parametrize(("prepare", "flags", "message"), [
    (None, "--data nowhere --forget_class 3", "nowhere is neither a file nor a folder"),
    (None, f"{CLASS} --model nowhere", "nowhere is not a saved model"),
    (None, "--forget_class 3", "name the training data with --data"),
    (None, "--data digits", "say what to forget of images with one of --forget_class"),
    (None, f"{CLASS} --forget_rows 1", "got --forget_class and --forget_rows"),
    (None, f"{CLASS} --constraint 50", "no step can be taken: the constraint 50 cannot be met"),
    (None, f"{CLASS} --config magic.yaml", "the config file magic.yaml does not exist"),
    (nan_weights, f"{CLASS} --model model", "weights that are not finite, first in conv.weight"),
    (occupied, CLASS, "the output folder out is in use"),
    (occupied, f"{CLASS} --overwrite", "holds thesis.txt, which is not of a run"),
    (colour_arrays, "--data a.npz --forget_class 3", "1 channels, those of a.npz have 3"),
    (other_retain_model, f"{CLASS} --retain_model retain", "10 classes, the retain model retain 12"),
    (copied_model, f"{CLASS} --model model --output_dir model/inside", "the source model overlap"),
])  # fmt: skip
def test_a_wrong_input_ends_in_one_clear_line_and_writes_nothing(
    sh, tmp_path, saved_model, prepare, flags, message
):
    if prepare is not None:
        prepare(saved_model)
    before = sorted(tmp_path.rglob("*"))
    code, _, err = sh(f"unlearn --model {saved_model} --output_dir out {FAST} {flags}")
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert sorted(tmp_path.rglob("*")) == before


NOWHERE = "--data nowhere.npz --forget_class 1 --model nowhere"


@pytest.mark.parametrize("line", [
    *(f"{command} {NOWHERE}" for command in ("assess", "unlearn", "compare", "evaluate")),
    "train --data nowhere.npz --model resnet8", "demo",
])  # fmt: skip
def test_an_output_folder_that_cannot_be_made_is_refused_before_data_are_read(sh, tmp_path, line):
    (tmp_path / "file").write_text("mine")
    for place, why in (
        ("file/out", "cannot be made: Not a directory"),
        ("''", "output_dir is empty"),
    ):
        code, _, err = sh(f"{line} --output_dir {place}")
        assert (code, err.count("\n")) == (2, 1)
        assert why in err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_earlier_run_is_replaced_on_request_and_by_a_run_that_takes_steps(
    sh, done, tmp_path, saved_model
):
    job = f"unlearn {CLASS} --model {saved_model} --output_dir runs/out {FAST}"
    assert sh(f"{job} --constraint 50")[0] == 2
    assert list(tmp_path.iterdir()) == [], "not even an empty folder stays"
    done(f"{job} {EASY}")
    before = contents(tmp_path)
    for more, why in (
        (EASY, "holds a run; choose another"),
        ("--constraint 50 --overwrite", "cannot be met"),
    ):
        code, _, err = sh(f"{job} {more}")
        assert code == 2
        assert why in err
        assert contents(tmp_path) == before
    done(f"{job} {EASY} --overwrite --max_steps 1")
    assert len((tmp_path / "runs/out/steps.jsonl").read_text().splitlines()) == 1


def test_an_earlier_training_outlives_one_that_diverges(sh, done, tmp_path):
    job = "train --data digits --model resnet8 --output_dir out --max_steps 2"
    done(job)
    before = contents(tmp_path)
    # of weights that are not finite, and of finite weights whose losses are not
    for more in ("--learning_rate 1e30", "--learning_rate 1e12 --max_steps 1 --max_grad_norm 0"):
        code, _, err = sh(f"{job} --optim sgd {more} --overwrite")
        assert code == 2
        assert "training diverged: " in err
        assert " is not finite; lower --learning_rate 1" in err
        assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (f"--learning_rate 1e30 --weight_decay 1e30 {FAST}", "lower --learning_rate 1e+30"),
        ("--learning_rate 1e12 --max_steps 1", "retain_loss is not finite; lower --learning_rate"),
    ],
)
def test_a_model_whose_weights_or_losses_have_overflowed_is_not_saved(
    sh, tmp_path, saved_model, settings, line
):
    job = f"unlearn {CLASS} --model {saved_model} --method ga --output_dir out {settings}"
    code, _, err = sh(job)
    assert code == 2
    assert "unlearning diverged: " in err
    assert line in err
    left = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert left == [".hamu", "config.yaml", "inputs.json", "layers.jsonl", "steps.jsonl"]
