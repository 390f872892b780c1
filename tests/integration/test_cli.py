"""The command line: whole jobs on images (what it refuses: test_refusals; texts: test_text_commands)."""

import itertools
import json
import re
import shlex
import shutil
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image
from run_files import contents, read_rows, report_in
from small_models import small_vision_transformer
from transformers import DeiTConfig, DeiTForImageClassificationWithTeacher, pipeline

from hamu.cli import main
from hamu.data import pixel_statistics, read_images
from hamu.files import file_digest
from hamu.models import load_classifier
from hamu.unlearning import controller
from hamu.unlearning.jobs.options import DataOptions
from hamu.unlearning.jobs.settings import settings_of
from hamu.unlearning.run_folder import RunFolder

FAST = "--per_device_train_batch_size 256 --max_steps 2"
CLASS = "--data digits --forget_class 3"
EASY = "--constraint_mode relative --stopping off"


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


@pytest.fixture
def unlearn(few_digits, saved_model):
    return f"unlearn --data {few_digits} --forget_class 3 --model {saved_model}"


def test_train_unlearn_evaluate_from_end_to_end(done, tmp_path, few_digits):
    recipe = f"--recipe digits --data {few_digits}"
    original = f"train {recipe} --num_train_epochs 4"
    done(f"{original} --output_dir original")
    done(f"{original} --without_forget --output_dir retrained")
    source = contents(tmp_path / "original")
    out = done(
        f"unlearn {recipe} --model original/model --retain_model retrained/model "
        "--num_train_epochs 2 --output_dir unlearned"
    )
    assert "forget 28 images (class 3), retain 272, by hamu-q" in out
    assert "warning" not in out
    assert "steps: 6 taken, 0 not taken; the run ended at step 6 because all" in out
    report = report_in(tmp_path / "unlearned")
    before, after = report["before"], report["after"]
    assert after["forget"]["loss"] > before["forget"]["loss"]
    theirs = after["retain_model"]["membership_inference"]
    assert before["retain_model"]["membership_inference"] == theirs
    less = after["retain_model"]["membership_inference_difference"]
    assert less["auc"] == after["membership_inference"]["auc"] - theirs["auc"]
    assert re.search(rf"membership AUC +[\d.]+ +[\d.]+ +{theirs['auc']:.4g}", out)
    assert [e["step"] for e in report["trajectory"]] == [0, 3, 6]
    assert [step["step"] for step in read_rows("unlearned/steps.jsonl")] == list(range(1, 7))
    assert contents(tmp_path / "original") == source, "the source is never written to"
    check = f"evaluate {recipe} --model unlearned/model --retain_model original/model"
    out = done(f"{check} --output_dir check")
    assert "the retain model original/model was trained on other records than the retain" in out
    shutil.copytree("original/model", "theirs/model")
    (tmp_path / "theirs/inputs.json").write_text("[]")  # a file of another program
    check = check.replace("original/model", "theirs/model")
    assert "was trained on other" not in done(f"{check} --output_dir of_theirs")
    further = f"train {recipe} --num_train_epochs 1 --without_forget --output_dir further/run"
    assert "warning: original/model was trained on other" in done(
        f"{further} --model original/model"
    )
    assert "membership accuracy" in out
    larger = done(f"evaluate {recipe} --model original/model --image_size 12 --output_dir larger")
    assert "warning: the model original/model was trained on other records than " in larger
    assert ", or images of another size, by its inputs.json" in larger
    assert "was trained on other" not in done(
        f"evaluate {recipe} --model retrained/model --output_dir of_retrained"
    )
    again = report_in(tmp_path / "check")["forget"]
    assert again["loss"] == pytest.approx(after["forget"]["loss"], rel=1e-5)
    assert again["per_class_accuracy"].keys() == {"3"}

    # the resolved config repeats the run
    done("unlearn --config unlearned/config.yaml --output_dir repeated")
    digests = {file_digest(path) for path in tmp_path.glob("*/model/model.safetensors")}
    assert len(digests) == 3, "the original, the retrained and the unlearned one"


@pytest.mark.parametrize(("command", "work"), [
    ("train --model resnet8", "tasks.ImageTask.fitted"),
    ("assess --model MODEL --forget_class 3", "measure.assess_model"),
    ("evaluate --model MODEL --forget_class 3", "tasks.ImageTask.fitted"),
])  # fmt: skip
def test_no_other_run_can_take_the_folder_while_a_command_works(
    sh, few_digits, saved_model, monkeypatch, tmp_path, command, work
):
    """Else the one that ends second would find a run in its place, and lose its work."""
    begin = lambda *given, **how: RunFolder("out")  # noqa: E731
    monkeypatch.setattr(f"hamu.unlearning.jobs.{work}", begin)
    line = f"{command.replace('MODEL', str(saved_model))} --data {few_digits} --output_dir out"
    code, _, err = sh(line)
    assert (code, "a process that a run left behind, is using out; wait" in err) == (2, True)
    assert list(tmp_path.iterdir()) == []


def test_evaluate_counts_the_forgotten_records(done, tmp_path, few_digits, saved_model):
    job = f"evaluate --data {few_digits} --forget_rows 1,2,3,4,5,6,7,8 --model {saved_model}"
    out = done(f"{job} --original_model {saved_model} --output_dir unseen")
    goal = report_in(tmp_path / "unseen")["goal"]
    assert [goal["kind"], goal["reference"]] == ["unseen", "original model"]
    assert f"{goal['after']['forgotten']} of 8 records are forgotten by the goal unseen" in out
    out = done(f"{job} --retain_model {saved_model} --goal retrained --output_dir same")
    assert "is also one of the models that are compared with it: no comparison" in out
    report = report_in(tmp_path / "same")
    goal, auc = report["goal"], report["membership_inference"]["auc"]
    assert [goal["reference"], goal["after"]["forgotten"]] == ["retain model", 8]
    assert re.search(rf"membership AUC +{auc:.4g} +{auc:.4g}", out)


def test_evaluate_without_data_or_model_to_compare_with_states_no_goal(done, tmp_path, saved_model):
    digits = read_images("digits").select(range(60))
    np.savez("alone.npz", images=digits.pixels[:, 0].numpy(), labels=digits.labels.numpy())
    job = f"evaluate --data alone.npz --forget_rows 1 --model {saved_model} --output_dir out"
    out = done(job)
    assert "give --test_data (records never trained on), --retain_model" in out
    assert re.search("membership AUC +not measured", out)
    assert report_in(tmp_path / "out")["goal"] is None


@pytest.mark.parametrize(("method", "warning"), [
    (f"hamu-q --learning_rate 1e-6 {EASY}", "at learning rate 1e-06; take more steps, or a higher rate (`hamu assess` suggests one, --auto finds one)"),
    ("ft --learning_rate 1e-6", ""),  # which has no forget loss to raise
    ("ga --learning_rate 10", "above the 2.30 of guessing; lower --learning_rate 10, or end such a run by"),
])  # fmt: skip
def test_a_run_that_moves_too_little_or_too_far_warns(done, unlearn, method, warning):
    out = done(f"{unlearn} --method {method} --max_steps 1 --output_dir out")
    assert warning in out
    assert ("the model has hardly moved: the forget loss was" in out) == ("hamu-q" in method)
    assert ("of guessing" in out) == ("ga" in method)
    is_worse = "than the model before the run; the model saved is the last" in out
    assert is_worse or "ga" not in method


def test_a_run_by_goal_that_keeps_no_step_says_so(done, unlearn, monkeypatch):
    monkeypatch.setattr(controller, "first_rate", lambda parameters: 1.0)
    out = done(f"{unlearn} --max_steps 3 --output_dir out")
    assert "no step brought a better model: the one saved is that before the run" in out


def test_a_file_takes_back_what_the_recipe_sets_and_its_mappings_keep_their_kinds(tmp_path):
    (tmp_path / "run.yaml").write_text(
        "test_data: null\nlr_scheduler_type: cosine\nseed: 010\noptim_args: '1e-5'\n"
        "lr_scheduler_kwargs: {min_lr: 1e-5, steps: 010, cycle: true, last: null}\n"
    )
    options = {"recipe": "cifar10-resnet20", "config": tmp_path / "run.yaml"}
    parsed = settings_of("unlearn", options)
    data, given = parsed.of(DataOptions), parsed.given
    assert (data.data, data.test_data, "test_data" in given) == ("train.parquet", None, False)
    assert (given["seed"], given["optim_args"]) == (10, "1e-5")
    expected = {"min_lr": 1e-5, "steps": "010", "cycle": True, "last": None}
    assert json.loads(given["lr_scheduler_kwargs"]) == expected


def test_classes_of_a_folder_are_those_of_the_model_by_name(done, tmp_path, saved_model, digits):
    labels = digits[0].labels.tolist()
    named = digits[0].select([i for i, label in enumerate(labels) if label in (3, 7)][:60])
    for number, (image, label) in enumerate(zip(named.pixels[:, 0], named.labels, strict=True)):
        folder = tmp_path / "images" / named.classes[label]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.asarray(image)).save(folder / f"{number:04}.png")
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


@pytest.fixture
def coloured(tmp_path):
    """Images in colours, and a transformer for them with an image processor, or without."""
    images = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), dtype=np.uint8)
    images[1::2] //= 2
    for name, chosen in (("train", slice(30)), ("test", slice(30, 40))):
        np.savez(tmp_path / f"{name}.npz", images=images[chosen], labels=np.arange(40)[chosen] % 2)
    small_vision_transformer().save_pretrained(tmp_path / "plain")
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


def test_an_image_processor_that_makes_other_images_is_refused_or_named(sh, coloured, tmp_path):
    whole = f"evaluate {coloured} --model prepared --forget_class 1 --output_dir"
    for number, (processor, code, said) in enumerate((
        ({"image_processor_type": "ViTImageProcessor", "size": [8, 8]}, 0, ""),
        ({"image_processor_type": "ViTImageProcessor", "size": [16, 16]}, 2,
         "hamu evaluate: the image processor of prepared makes images of 16x16 of those of "
         "train.npz, 8x8; give --image_size 16, or take away its preprocessor_config.json"),
        ({"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 8}}, 0,
         "warning: the image processor of prepared crops, resizes or normalises otherwise"),
    )):  # fmt: skip
        (tmp_path / "prepared/preprocessor_config.json").write_text(json.dumps(processor))
        found, out, err = sh(f"{whole} out-{number}")
        assert found == code
        assert said in out + err
        assert (out + err).count("the image processor of") == bool(said)
    processor = {"image_processor_type": "ViTImageProcessor", "size": [8, 8], "resample": 3}
    (tmp_path / "prepared/preprocessor_config.json").write_text(json.dumps(processor))
    for more, is_said in (("", False), ("--image_size 8", True)):
        assert ("not resize bilinearly" in sh(f"{whole} out{more[-1:]} {more}")[1]) == is_said


def test_a_classifier_with_another_loss_or_none_is_trained_by_cross_entropy(done, tmp_path):
    few = {"num_channels": 1, "num_labels": 10}
    vit = small_vision_transformer(**few)
    deit = DeiTForImageClassificationWithTeacher(DeiTConfig(**vit.config.to_dict() | few))
    losses = []
    for kind, model in ((None, vit), ("multi_label_classification", vit), (None, deit)):
        model.config.problem_type = kind
        model.save_pretrained("start")
        job = (
            "train --data digits --model start --learning_rate 0.1 --gradient_accumulation_steps 2"
        )
        done(f"{job} --eval_strategy epoch --num_train_epochs 1 --output_dir trained --overwrite")
        losses.append(report_in(tmp_path / "trained")["train_loss"])
    assert losses[0] == losses[1]
    assert losses[2] < 2.3, "that of guessing"


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
        assert out.strip().endswith("--gradient_accumulation_steps"), "a ResNet has no other way"
        assert f"{parameters:,}" in out
        rows = dict(re.findall(r"([a-z][a-z:, ]*?) ([\d.,]+)", out))
        return {name: float(value.replace(",", "")) for name, value in rows.items()}

    settings = "--num_train_epochs 2 --per_device_train_batch_size 100"
    new = plan(f"train --data digits --model resnet8 {settings}")
    assert (new["training images"], new["images in a step"], new["steps"]) == (1438, 100, 30)
    whole = plan(f"train --data digits --model resnet8 {settings} --dataloader_drop_last")
    assert whole["steps"] == 28
    assert new["memory: weights"] == pytest.approx(4 * parameters / 1e6, abs=0.05)
    job = f"unlearn {CLASS} --model {saved_model} --method kl --per_device_train_batch_size"
    one, four = (plan(f"{job} {size}") for size in (50, 200))
    assert one["retain images"] + one["forget images"] == 1438
    weights, activations = one["memory: weights"], one["memory: activations"]
    assert one["memory: gradients"] == pytest.approx(2 * weights, abs=0.1), "one of each side"
    by_goal = plan(f"unlearn {CLASS} --model {saved_model}")
    assert by_goal["steps"] == 400
    assert by_goal["memory: copies of what is trained"] == pytest.approx(2 * weights, abs=0.1)
    checked = plan(f"{job} 50 --optim adamw_torch")
    assert checked["memory: copies of what is trained"] == pytest.approx(2 * weights, abs=0.1)
    assert one["memory: original model"] == weights, "which KL compares with"
    assert four["memory: activations"] == pytest.approx(4 * activations, abs=0.2)


def test_a_dry_run_on_images_tells_where_activations_can_be_recomputed(done, sh, saved_model):
    small_vision_transformer(num_channels=1, num_labels=10).save_pretrained("vit")
    job = f"unlearn {CLASS} --dry_run --gradient_checkpointing --model"
    out = " ".join(done(f"{job} vit").split())
    assert "128 images, none recomputed" in out
    assert out.endswith(", --gradient_checkpointing")
    assert "SmallResNet cannot recompute activations" in sh(f"{job} {saved_model}")[2]


@pytest.mark.parametrize("command", ["unlearn", "report"])
def test_help_has_one_layout(capsys, command):
    assert main([command, "--help"]) == 0
    usage, _, about, *lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"usage: hamu {command} .*\[--flag value \.\.\.\]", usage)
    assert about.strip()
    options = [pair for pair in itertools.pairwise(lines) if pair[0].startswith("  --")]
    assert len(options) >= 3
    for line, below in options:
        assert re.fullmatch(r"  --\w+( \S+)?( \[.+\])?", line)
        assert re.match(r"        \S", below), f"{line} is not explained"
    names = [line.split()[0] for line, _ in options]
    assert len({*names}) == len(names), "a switch that is on is listed once"
    assert "--adam_beta1" not in names
    main([command, "--help-all"])
    assert ("--adam_beta1" in capsys.readouterr().out) == (command == "unlearn")


DIVERGED = r"diverged: .* is not finite; lower --learning_rate 1"
FULL = "No space left on device; make room, and give the same command again"


@pytest.mark.parametrize(("failing", "why"), [
    ("--learning_rate 1e30 --weight_decay 1e30 --optim sgd", DIVERGED),  # weights are not finite,
    ("--learning_rate 1e12 --max_steps 1 --max_grad_norm 0 --optim sgd", DIVERGED),  # or losses alone
    ("--max_steps 1", FULL), ("--save_strategy steps --save_steps 1", FULL),
])  # fmt: skip
def test_a_run_that_fails_leaves_the_one_that_it_was_to_replace(
    sh, done, tmp_path, unlearn, few_digits, monkeypatch, failing, why
):
    train = f"train --data {few_digits} --model resnet8 --max_steps 2 --output_dir out"
    jobs = [f"{unlearn} --method ga {FAST} --output_dir run", train]
    for job in jobs:
        done(job)
    before = contents(tmp_path)
    if why == FULL:  # the model is written first, then a run gives way
        full = Mock(side_effect=OSError(28, "No space left on device"))
        for place in ("run_folder.save_model", "trainer.resumable.save_model"):
            monkeypatch.setattr(f"hamu.unlearning.{place}", full)
    for job in jobs:
        code, _, err = sh(f"{job} {failing} --overwrite")
        assert code == 2
        assert re.search(why, err)
        assert contents(tmp_path) == before


EVALUATE = "evaluate --data {} --forget_class 3 --retain_model {} --output_dir out"


@pytest.mark.parametrize("rho", [0, 0.75])
def test_the_test_set_without_the_class_is_measured_whether_all_or_part_of_it_goes(
    rho, done, few_digits, saved_model
):
    done(f"{EVALUATE.format(few_digits, saved_model)} --model {saved_model} --rho {rho}")
    found = report_in("out")
    whole, rest = found["test"], found["test_without_class"]
    assert whole["per_class_loss"].keys() - rest["per_class_loss"].keys() == {"3"}
    assert 0 < whole["samples"] - rest["samples"] < whole["samples"]
    differences = found["retain_model"]["membership_inference_difference"]
    assert differences == {"accuracy": 0.0, "auc": 0.0}


def test_figures_that_are_not_finite_are_null(done, few_digits, saved_model, tmp_path):
    """JSON knows no NaN: readers other than Python's stop at it."""
    model = load_classifier(str(saved_model))
    with torch.no_grad():
        model.classifier.weight.mul_(1e38)
    model.save_pretrained(tmp_path / "huge")
    done(f"{EVALUATE.format(few_digits, saved_model)} --model huge")
    text, found = (tmp_path / "out/evaluation.json").read_text(), report_in("out")
    assert not {"NaN", "Infinity"} & set(re.findall(r"\w+", text))
    assert found["forget"]["loss"] is None
    assert found["forget"]["accuracy"] is not None
    assert found["against_retain_model"]["forget"]["loss_difference"] is None
    assert found["membership_inference"] is None
