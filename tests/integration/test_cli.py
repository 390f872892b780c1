"""The command line: a whole job on real images, and every wrong input with one clear line and nothing written."""

import itertools
import json
import re
import shutil

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file
from transformers import ViTConfig, ViTForImageClassification, pipeline

from hamu.cli import main
from hamu.data import pixel_statistics, read_images
from hamu.models import load_classifier
from hamu.unlearning.jobs.options import DataOptions
from hamu.unlearning.jobs.settings import settings_of
from hamu.unlearning.trainer import TrainConfig

FAST = ["--per_device_train_batch_size", "256", "--max_steps", "2"]


def test_train_unlearn_evaluate_from_end_to_end(cli, tmp_path):
    original = ["--recipe", "digits", "--num_train_epochs", "1"]
    assert cli("train", *original, "--output_dir", "original")[0] == 0
    assert cli("train", *original, "--without_forget", "--output_dir", "retrained")[0] == 0
    digest = (tmp_path / "original/model/model.safetensors").read_bytes()
    models = ["--model", "original/model", "--retain_model", "retrained/model"]
    code, out, err = cli(
        "unlearn",
        "--recipe",
        "digits",
        *models,
        "--num_train_epochs",
        2,
        "--output_dir",
        "unlearned",
    )
    assert (code, err) == (0, "")
    assert "forget 131 images (class 3), retain 1307, by hamu-q" in out
    assert re.search(r"peak memory 0\.\d\d GB|peak memory [1-9]\d?\.\d\d GB", out)
    assert (
        "steps: 22 taken, 0 not taken; the run ended at step 22 because all its steps are done"
        in out
    )
    run = tmp_path / "unlearned"
    assert sorted(p.name for p in run.iterdir()) == [
        "config.yaml", "evaluation.json", "inputs.json", "layers.jsonl", "model", "record.json", "record.md",
        "steps.jsonl",
    ]  # fmt: skip
    report = json.loads((run / "evaluation.json").read_text())
    assert report["after"]["forget"]["loss"] > report["before"]["forget"]["loss"]
    sets = {"retain", "forget", "test", "test_without_class"}
    assert set(report["after"]["against_retain_model"]) == sets <= set(report["after"])
    assert set(report["after"]["against_retain_model_per_class"]) == sets
    theirs = report["after"]["retain_model"]["membership_inference"]
    assert report["before"]["retain_model"]["membership_inference"] == theirs
    less = report["after"]["retain_model"]["membership_inference_difference"]
    assert less["auc"] == report["after"]["membership_inference"]["auc"] - theirs["auc"]
    said = f"membership inference against the retain model's {theirs['accuracy']:.3f} and {theirs['auc']:.3f}: accuracy"
    assert said in out
    assert [e["step"] for e in report["trajectory"]] == [0, 11, 22]
    steps = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    assert [s["step"] for s in steps] == list(range(1, 23))
    assert (tmp_path / "original/model/model.safetensors").read_bytes() == digest, (
        "the source is never written to"
    )
    before, after = (
        load_file(tmp_path / f"{n}/model/model.safetensors") for n in ("original", "unlearned")
    )
    assert not torch.equal(before["conv.weight"], after["conv.weight"])

    code, out, _ = cli(
        "evaluate", "--recipe", "digits", "--model", "unlearned/model", "--output_dir", "check"
    )
    assert code == 0
    assert "membership inference: accuracy" in out
    again = json.loads((tmp_path / "check/evaluation.json").read_text())
    assert again["forget"]["loss"] == pytest.approx(report["after"]["forget"]["loss"], rel=1e-5)
    assert again["forget"]["per_class_accuracy"].keys() == {"3"}

    # the resolved config repeats the run
    assert cli("unlearn", "--config", "unlearned/config.yaml", "--output_dir", "repeated")[0] == 0
    repeated = load_file(tmp_path / "repeated/model/model.safetensors")
    assert all(torch.equal(after[n], repeated[n]) for n in after)


def test_evaluate_counts_the_forgotten_records(cli, tmp_path, saved_model):
    rows = ["--data", "digits", "--forget_rows", "1,2,3,4,5,6,7,8", "--model", saved_model]
    code, out, _ = cli("evaluate", *rows, "--original_model", saved_model, "--output_dir", "unseen")
    assert code == 0
    goal = json.loads((tmp_path / "unseen/evaluation.json").read_text())["goal"]
    assert (goal["kind"], goal["reference"], goal["after"]["records"]) == (
        "unseen",
        "original model",
        8,
    )
    assert f"{goal['after']['forgotten']} of 8 records are forgotten" in out
    assert (
        "by the goal unseen, compared with the original model's losses on the test data; 95% wanted"
        in out
    )
    assert "losses of the forget records: lowest" in out
    assert "compared with its own losses" in cli("evaluate", *rows, "--output_dir", "own")[1]

    code, out, _ = cli(
        "evaluate",
        *rows,
        "--retain_model",
        saved_model,
        "--goal",
        "retrained",
        "--output_dir",
        "same",
    )
    assert code == 0
    goal = json.loads((tmp_path / "same/evaluation.json").read_text())["goal"]
    assert (goal["reference"], goal["after"]["forgotten"], goal["reached"]) == (
        "retain model",
        8,
        True,
    )
    auc = json.loads((tmp_path / "same/evaluation.json").read_text())["membership_inference"]["auc"]
    assert f"AUC {auc:.3f} [retain model {auc:.3f}]" in out

    flags = ["--target_forget_loss", 1e-9, "--target_share", 1, "--output_dir", "loss"]
    assert "8 of 8 records are forgotten" in cli("evaluate", *rows, *flags)[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--goal", "mean"],
            "goal 'mean' is unknown; choose one of unseen, retrained, erased, loss",
        ),
        (["--goal", "loss"], "the goal loss needs --target_forget_loss"),
        (
            ["--goal", "unseen", "--target_forget_loss", "2"],
            "target_forget_loss is of the goal loss, not unseen",
        ),
        (["--target_forget_loss", "0"], "target_forget_loss 0.0 must be a positive number"),
        (["--target_share", "2"], "target_share 2.0 must be a share"),
        (["--goal", "retrained"], "give --retain_model, or another --goal"),
    ],
)
def test_evaluate_refuses_a_goal_that_means_nothing(cli, tmp_path, saved_model, flags, message):
    settings = [
        "--data",
        "digits",
        "--forget_rows",
        "1",
        "--model",
        saved_model,
        "--output_dir",
        "out",
    ]
    code, _, err = cli("evaluate", *settings, *flags)
    assert code == 2
    assert message in err
    assert not (tmp_path / "out").exists()


def test_evaluate_says_what_to_give_where_nothing_tells_what_forgotten_means(
    cli, tmp_path, saved_model
):
    digits = read_images("digits").select(range(60))
    np.savez("alone.npz", images=digits.pixels[:, 0].numpy(), labels=digits.labels.numpy())
    code, out, _ = cli("evaluate", "--data", "alone.npz", "--forget_rows", "1", "--model", saved_model,
                       "--output_dir", "out")  # fmt: skip
    assert code == 0
    assert (
        "nothing tells when a record is forgotten; give --test_data (records never trained on), --retain_model"
        in out
    )
    assert json.loads((tmp_path / "out/evaluation.json").read_text())["goal"] is None


def test_flags_win_over_the_config_and_the_config_over_the_recipe(cli, tmp_path, saved_model):
    (tmp_path / "run.yaml").write_text(
        "learning_rate: 0.3\nunlearn:\n  constraint: 0.25\n  max_steps: 1\n"
    )
    code, _, err = cli("unlearn", "--recipe", "digits", "--config", "run.yaml", "--model", saved_model,
                       "--learning_rate", "0.07", "--output_dir", "out")  # fmt: skip
    assert (code, err) == (0, "")
    used = yaml.safe_load((tmp_path / "out/config.yaml").read_text())
    assert used["learning_rate"] == 0.07
    assert float(used["constraint"]) == 0.25
    assert used["data"] == "digits"
    assert used["max_steps"] == 1
    line = json.loads((tmp_path / "out/steps.jsonl").read_text())
    assert line["learning_rate"] == 0.07
    assert line["demand"] == pytest.approx(0.25 * line["max_demand"])


def test_a_run_that_changes_next_to_nothing_says_so(cli, saved_model):
    run = ("unlearn", "--recipe", "digits", "--model", saved_model, "--max_steps", 2)
    code, out, _ = cli(*run, "--learning_rate", 1e-6, "--output_dir", "slow")
    assert code == 0
    assert "the model has hardly moved: the forget loss was" in out
    assert "at learning rate 1e-06; `hamu assess` suggests a rate, and --auto finds one" in out
    assert "hardly moved" not in cli(*run, "--learning_rate", 0.5, "--output_dir", "fast")[1]
    spent = cli(*run, "--method", "ft", "--learning_rate", 1e-6, "--output_dir", "kept")[1]
    assert "hardly moved" not in spent, "fine-tuning has no forget side that was to move"


def test_null_takes_back_what_the_recipe_sets(tmp_path):
    (tmp_path / "run.yaml").write_text("test_data: null\n")
    options = {"recipe": "cifar10-resnet20", "config": tmp_path / "run.yaml"}
    parsed = settings_of("unlearn", options)
    data = parsed.of(DataOptions)
    assert (data.data, data.test_data) == ("train.parquet", None)
    assert "test_data" not in parsed.given


def test_numbers_and_truth_values_of_a_mapping_arrive_as_such(tmp_path):
    text = "lr_scheduler_kwargs: {min_lr: 1e-5, power: -2, steps: 010, cycle: true, last: null, one: .5}\n"
    (tmp_path / "run.yaml").write_text(text + 'optim_args: "1e-5"\n')
    found = settings_of("train", {"config": tmp_path / "run.yaml"}).given
    assert json.loads(found["lr_scheduler_kwargs"]) == {
        "min_lr": 1e-5, "power": -2, "steps": "010", "cycle": True, "last": None, "one": ".5",
    }  # fmt: skip
    assert type(found["optim_args"]) is str
    (tmp_path / "run.yaml").write_text(
        "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr: 1e-5, num_cycles: 0.5}\n"
    )
    args = settings_of("train", {"config": tmp_path / "run.yaml"}).of(TrainConfig)
    assert args.lr_scheduler_kwargs == {"min_lr": 1e-5, "num_cycles": 0.5}


def test_ones_own_folder_of_images_and_named_rows(cli, tmp_path):
    rng = np.random.default_rng(0)
    for number in range(40):
        place = tmp_path / "images" / ("left", "right")[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"{number:02}.png")
    common = ["--data", "images", "--num_train_epochs", "1"]
    assert cli("train", *common, "--model", "resnet8", "--output_dir", "original")[0] == 0
    settings = ["--constraint_mode", "relative", "--stopping", "off", "--output_dir", "unlearned"]
    code, out, err = cli(
        "unlearn", *common, "--model", "original/model", "--forget_rows", "0,7,33", *settings
    )
    assert (code, err) == (0, "")
    assert "forget 3 images (3 named rows), retain 37" in out
    assert "left out" not in out
    Image.new("RGB", (8, 8)).save(tmp_path / "images" / "loose.png")
    evaluate = [
        "--data",
        "images",
        "--forget_rows",
        "0",
        "--model",
        "original/model",
        "--output_dir",
        "again",
    ]
    code, out, _ = cli("evaluate", *evaluate)
    assert code == 0
    assert (
        out.count("warning: files of images are left out (1), first images/loose.png; only images")
        == 1
    )
    assert "membership inference: not measured" in out


def test_classes_of_a_folder_are_those_of_the_model_by_name(cli, tmp_path, saved_model, digits):
    chosen = [i for i, label in enumerate(digits[0].labels.tolist()) if label in (3, 7)][:60]
    for i in chosen:
        place = tmp_path / "images" / digits[0].classes[digits[0].labels[i]]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(digits[0].pixels[i, 0].numpy()).save(place / f"{i:04}.png")
    flags = ["--model", saved_model, "--forget_class", "7"]
    assert cli("evaluate", "--data", "images", *flags, "--output_dir", "folder")[0] == 0
    named = digits[0].select(chosen)
    np.savez(
        "named.npz", images=named.pixels[:, 0], labels=named.labels, classes=np.array(named.classes)
    )
    assert cli("evaluate", "--data", "named.npz", *flags, "--output_dir", "named")[0] == 0
    first, second = (
        json.loads((tmp_path / f"{name}/evaluation.json").read_text())
        for name in ("folder", "named")
    )
    for side in ("retain", "forget"):
        assert first[side]["loss"] == pytest.approx(second[side]["loss"], rel=1e-5)
    assert first["forget"]["per_class_accuracy"].keys() == {"7"}
    run = [
        "--max_steps",
        1,
        "--constraint_mode",
        "relative",
        "--stopping",
        "off",
        "--output_dir",
        "run",
    ]
    assert cli("unlearn", "--data", "images", *flags, *run)[0] == 0
    assert cli("verify", "run")[0] == 0
    code, _, err = cli(
        "evaluate", "--data", "images", "--model", saved_model, "--forget_class", "5"
    )
    assert (code, err) == (
        2,
        "hamu evaluate: class '5' has no records in images; choose another class\n",
    )
    (tmp_path / "images" / "10").mkdir()
    code, _, err = cli("evaluate", "--data", "images", *flags)
    assert code == 2
    assert (
        "the model numbers the classes 0, 1, 2, ..., the data 3, 7, 10, ...; both need the same"
        in err
    )


@pytest.fixture
def coloured(tmp_path):
    """Images in colours, and a transformer for them with an image processor, or without."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (40, 8, 8, 3), dtype=np.uint8)
    images[1::2] //= 2
    for name, chosen in (("train", slice(30)), ("test", slice(30, 40))):
        np.savez(tmp_path / f"{name}.npz", images=images[chosen], labels=np.arange(40)[chosen] % 2)
    config = ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, image_size=8,
                       patch_size=4, num_labels=2, attn_implementation="eager")  # fmt: skip
    ViTForImageClassification(config).save_pretrained(tmp_path / "plain")
    shutil.copytree(tmp_path / "plain", tmp_path / "prepared")
    (tmp_path / "prepared/preprocessor_config.json").write_text(
        json.dumps(
            {"image_processor_type": "ViTImageProcessor", "image_std": [0.25] * 3, "size": [8, 8]}
        )
    )
    return ["--data", "train.npz", "--test_data", "test.npz"]


ONE_STEP = ["--max_steps", "1", "--constraint_mode", "relative", "--stopping", "off"]


def test_the_image_processor_of_a_model_goes_with_it(cli, coloured, tmp_path):
    assert (
        cli(
            "train", *coloured, "--model", "prepared", "--max_steps", "1", "--output_dir", "trained"
        )[0]
        == 0
    )
    run = ["--forget_class", "1", *ONE_STEP, "--output_dir", "run"]
    assert cli("unlearn", *coloured, "--model", "trained/model", *run)[0] == 0
    for model in ("trained/model", "run/model"):
        classify = pipeline("image-classification", model)
        assert list(classify.image_processor.image_std) == [0.25] * 3
        assert len(classify(Image.new("RGB", (9, 9)))) == 2
        assert json.loads((tmp_path / model / "config.json").read_text())["image_std"] == [0.25] * 3


def test_a_model_without_statistics_takes_those_of_all_training_data(cli, coloured, tmp_path):
    losses = []
    for number, forget in enumerate((["--forget_class", "1"], ["--forget_rows", "0,1"])):
        flags = ["--model", "plain", *forget, "--output_dir", f"evaluated-{number}"]
        code, out, _ = cli("evaluate", *coloured, "--retain_model", "plain", *flags)
        said = "the model does not say how images are normalised; the mean and standard deviation of train.npz are used"
        assert (code, out.count(said)) == (0, 1)
        losses.append(
            json.loads((tmp_path / f"evaluated-{number}/evaluation.json").read_text())["test"][
                "loss"
            ]
        )
    assert losses[0] == losses[1]
    run = ["--forget_class", "1", *ONE_STEP, "--output_dir", "run"]
    assert cli("unlearn", *coloured, "--model", "plain", *run)[0] == 0
    config = json.loads((tmp_path / "run/model/config.json").read_text())
    assert (config["image_mean"], config["image_std"]) == pixel_statistics(read_images("train.npz"))
    assert cli("verify", "run")[0] == 0


def test_a_dry_run_on_images_counts_what_the_run_would_have(cli, tmp_path, saved_model):
    parameters = sum(p.numel() for p in load_classifier(str(saved_model)).parameters())

    def plan(*words):
        code, out, _ = cli(*words, *DIGITS, "--dry_run")
        assert code == 0
        assert list(tmp_path.iterdir()) == []
        assert f"{parameters:,}" in out
        rows = dict(re.findall(r"([a-z][a-z:, ]*?) ([\d.,]+)", out))
        return {name: float(value.replace(",", "")) for name, value in rows.items()}

    new = plan(
        "train",
        "--model",
        "resnet8",
        "--num_train_epochs",
        "2",
        "--per_device_train_batch_size",
        "100",
    )
    assert (new["training images"], new["images in a step"], new["steps"]) == (1438, 100, 30)
    assert new["memory: weights"] == pytest.approx(4 * parameters / 1e6, abs=0.05)
    job = [
        "unlearn",
        "--model",
        saved_model,
        "--forget_class",
        "3",
        "--method",
        "kl",
        "--per_device_train_batch_size",
    ]
    one, four = (plan(*job, size) for size in ("50", "200"))
    assert one["retain images"] + one["forget images"] == 1438
    assert one["memory: gradients"] == pytest.approx(2 * one["memory: weights"], abs=0.1), (
        "one of each side"
    )
    assert one["memory: original model"] == one["memory: weights"], "which KL compares with"
    assert four["memory: activations"] == pytest.approx(4 * one["memory: activations"], abs=0.2)
    assert one["memory: activations"] > 50 * 8 * 8 * 16 * 4 / 1e6, (
        "more than the first layer of so many images"
    )


def test_methods_prints_every_method(cli):
    code, out, _ = cli("methods")
    assert code == 0
    for name in ("hamu-q", "hamu-u", "ft", "ga", "gdiff", "kl", "scrub", "gru", "pcgrad"):
        assert f" {name} " in out


@pytest.mark.parametrize("command", ["train", "unlearn", "evaluate"])
def test_help_shows_what_matters_and_help_all_the_rest(cli, capfd, command):
    for flag, hidden in (("--help", False), ("--help-all", True)):
        with pytest.raises(SystemExit) as stop:
            main([command, flag])
        assert stop.value.code == 0
        out = capfd.readouterr().out
        assert "--forget_class" in out
        assert "--learning_rate" in out
        assert ("--adam_beta1" in out) == hidden


@pytest.mark.parametrize(
    "command",
    ["assess", "compare", "demo", "evaluate", "report", "train", "unlearn", "verify"],
)
def test_help_has_one_layout(capsys, command):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    usage, _, about, *lines = capsys.readouterr().out.splitlines()
    assert usage.startswith(f"usage: hamu {command} ")
    assert usage.endswith(" [--flag value ...]")
    assert about.strip()
    options = [line for line in lines if re.match("  --", line)]
    assert len(options) >= 3
    for line, below in itertools.pairwise(lines):
        if re.match("  --", line):
            assert re.fullmatch(r"  --\w+( \S+)?( \[.+\])?", line)
            assert re.match(r"        \S", below), f"{line} is not explained"


def copy_of(saved_model, tmp_path):
    return shutil.copytree(saved_model, tmp_path / "model")


def nan_weights(saved_model, tmp_path):
    from hamu.models import load_classifier

    model = load_classifier(str(saved_model))
    with torch.no_grad():
        model.conv.weight[0, 0, 0, 0] = torch.nan
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def occupied(saved_model, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    return saved_model


def colour_images(saved_model, tmp_path):
    np.savez(
        tmp_path / "a.npz", images=np.zeros((20, 8, 8, 3), np.uint8), labels=np.arange(20) % 10
    )
    return saved_model


def too_many_classes(saved_model, tmp_path):
    np.savez(tmp_path / "a.npz", images=np.zeros((24, 8, 8), np.uint8), labels=np.arange(24) % 12)
    return saved_model


def unreadable_image(saved_model, tmp_path):
    for name in "ab":
        (tmp_path / "images" / name).mkdir(parents=True)
        Image.new("L", (8, 8)).save(tmp_path / "images" / name / "1.png")
    (tmp_path / "images" / "b" / "2.png").write_bytes(b"\x89PNG")
    return saved_model


def other_retain_model(saved_model, tmp_path):
    config = ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, image_size=8,
                       patch_size=4, num_channels=1, num_labels=12)  # fmt: skip
    ViTForImageClassification(config).save_pretrained(tmp_path / "retain")
    return saved_model


def bad_yaml(saved_model, tmp_path):
    (tmp_path / "run.yaml").write_text("constraint: [")
    return saved_model


def misspelt_yaml(saved_model, tmp_path):
    (tmp_path / "run.yaml").write_text("constrant: 0.5")
    return saved_model


def as_it_is(saved_model, tmp_path):
    return saved_model


DIGITS = ["--data", "digits"]
CLASS = [*DIGITS, "--forget_class", "3"]


@pytest.mark.parametrize(
    ("prepare", "flags", "message"),
    [
        (
            as_it_is,
            ["--data", "nowhere", "--forget_class", "3"],
            "nowhere is neither a file nor a folder",
        ),
        (as_it_is, [*CLASS, "--model", "nowhere"], "nowhere is not a saved model"),
        (as_it_is, ["--forget_class", "3"], "name the training data with --data"),
        (as_it_is, DIGITS, "say what to forget with one of --forget_class"),
        (as_it_is, [*CLASS, "--forget_rows", "1"], "got --forget_class and --forget_rows"),
        (as_it_is, [*DIGITS, "--forget_class", "cow"], "class 'cow' does not exist in digits"),
        (
            as_it_is,
            [*DIGITS, "--forget_rows", ""],
            "forget_rows is empty; is a shell variable unset?",
        ),
        (as_it_is, [*DIGITS, "--forget_rows", "4,4"], "row 4 is named twice"),
        (
            as_it_is,
            [*DIGITS, "--forget_rows", "1438"],
            "row 1438 is not in digits, which has rows 0 to 1437",
        ),
        (as_it_is, [*DIGITS, "--forget_data", "digits"], "nothing is left to retain"),
        (as_it_is, [*CLASS, "--constraint", "0"], "constraint 0.0 must be a positive number"),
        (as_it_is, [*CLASS, "--constraint", "-1"], "constraint -1.0 must be a positive number"),
        (
            as_it_is,
            [*CLASS, "--constraint", "50"],
            "no step can be taken: the constraint 50 cannot be met",
        ),
        (as_it_is, [*CLASS, "--method", "magic"], "method 'magic' is unknown"),
        (
            as_it_is,
            [*CLASS, "--recipe", "magic"],
            "recipe 'magic' is unknown; choose one of cifar10-resnet20, digits",
        ),
        (as_it_is, [*CLASS, "--config", "magic.yaml"], "the config file magic.yaml does not exist"),
        (as_it_is, [*CLASS, "--learning_rate", "fast"], "invalid float value: 'fast'"),
        (as_it_is, [*CLASS, "--magic", "1"], "--magic"),
        (as_it_is, [*CLASS, "--optim", "magic"], "magic"),
        (bad_yaml, [*CLASS, "--config", "run.yaml"], "run.yaml is not valid YAML"),
        (
            misspelt_yaml,
            [*CLASS, "--config", "run.yaml"],
            "unknown setting 'constrant'; did you mean constraint?",
        ),
        (nan_weights, CLASS, "weights that are not finite, first in conv.weight"),
        (occupied, CLASS, "the output folder out is in use"),
        (occupied, [*CLASS, "--overwrite"], "holds thesis.txt, which is not of a run"),
        (
            colour_images,
            ["--data", "a.npz", "--forget_class", "3"],
            "1 channels, those of a.npz have 3",
        ),
        (
            too_many_classes,
            ["--data", "a.npz", "--forget_class", "3"],
            "label 11 of a.npz is out of range",
        ),
        (
            unreadable_image,
            ["--data", "images", "--forget_class", "a"],
            "2.png of images is not a readable image",
        ),
        (
            other_retain_model,
            [*CLASS, "--retain_model", "retain"],
            "has 10 classes, the retain model retain 12; both",
        ),
        (copy_of, [*CLASS, "--output_dir", "model/inside"], "the source model overlap"),
    ],
)
def test_a_wrong_input_ends_in_one_clear_line_and_writes_nothing(
    cli, tmp_path, saved_model, prepare, flags, message
):
    model = prepare(saved_model, tmp_path)
    model = model.relative_to(tmp_path) if model.is_relative_to(tmp_path) else model
    before = sorted(tmp_path.rglob("*"))
    code, _, err = cli("unlearn", "--model", model, "--output_dir", "out", *FAST, *flags)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("words", [
    *([name, "--data", "nowhere.npz", "--forget_class", "1", "--model", "nowhere"]
      for name in ("assess", "unlearn", "compare", "evaluate")),
    ["train", "--data", "nowhere.npz", "--model", "resnet8"],
    ["demo"],
])  # fmt: skip
def test_an_output_folder_that_cannot_be_made_is_refused_before_data_are_read(cli, tmp_path, words):
    (tmp_path / "file").write_text("mine")
    for place, why in (
        ("file/out", f"cannot be made: {tmp_path}/file is a file"),
        ("", "output_dir is empty"),
    ):
        code, _, err = cli(*words, "--output_dir", place)
        assert (code, err.count("\n")) == (2, 1)
        assert why in err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_earlier_run_is_replaced_only_on_request(cli, tmp_path, saved_model):
    job = ["unlearn", "--recipe", "digits", "--model", saved_model, "--output_dir", "out", *FAST]
    assert cli(*job)[0] == 0
    assert cli(*job)[0] == 2
    code, _, _ = cli(*job, "--overwrite", "--max_steps", "1")
    assert code == 0
    assert len((tmp_path / "out/steps.jsonl").read_text().splitlines()) == 1


def test_an_earlier_run_outlives_a_replacement_that_cannot_take_a_step(cli, tmp_path, saved_model):
    job = [
        "unlearn",
        "--data",
        "digits",
        "--forget_class",
        "3",
        "--model",
        saved_model,
        "--output_dir",
        "runs/out",
        *FAST,
    ]
    impossible = ["--constraint", "50"]
    assert cli(*job, *impossible)[0] == 2
    assert list(tmp_path.iterdir()) == [], "not even an empty folder stays"
    assert cli(*job, "--constraint_mode", "relative")[0] == 0
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    code, _, err = cli(*job, *impossible, "--overwrite")
    assert code == 2
    assert "cannot be met" in err
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_an_earlier_training_outlives_one_that_diverges(cli, tmp_path):
    job = [
        "train",
        "--data",
        "digits",
        "--model",
        "resnet8",
        "--output_dir",
        "out",
        "--max_steps",
        "2",
    ]
    assert cli(*job)[0] == 0
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    code, _, err = cli(*job, "--optim", "sgd", "--learning_rate", "1e30", "--overwrite")
    assert code == 2
    assert "training diverged" in err
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_a_model_that_has_overflowed_is_not_saved(cli, tmp_path, saved_model):
    too_much = ["--method", "ga", "--learning_rate", "1e30", "--weight_decay", "1e30"]
    code, _, err = cli(
        "unlearn", *CLASS, "--model", saved_model, *too_much, *FAST, "--output_dir", "out"
    )
    assert code == 2
    assert err.endswith(" is not finite; lower --learning_rate 1e+30 or choose another method\n")
    assert "unlearning diverged: " in err
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.yaml",
        "inputs.json",
        "layers.jsonl",
        "steps.jsonl",
    ]


def test_a_model_of_finite_weights_whose_losses_have_overflowed_is_not_saved(
    cli, tmp_path, saved_model
):
    too_much = ["--method", "ga", "--learning_rate", "1e12", "--max_steps", "1"]
    code, _, err = cli("unlearn", *CLASS, "--model", saved_model, *too_much, "--output_dir", "out")
    assert code == 2
    assert (
        "unlearning diverged: retain_loss is not finite; lower --learning_rate 1000000000000.0 or"
        in err
    )
    assert not {"model", "record.json", "evaluation.json"} & {
        path.name for path in (tmp_path / "out").iterdir()
    }
    too_much = [
        "--optim",
        "sgd",
        "--learning_rate",
        "1e12",
        "--max_steps",
        "1",
        "--max_grad_norm",
        "0",
    ]
    code, _, err = cli(
        "train", *CLASS[:2], "--model", saved_model, *too_much, "--output_dir", "trained"
    )
    assert code == 2
    assert "training diverged: " in err
    assert " is not finite; lower --learning_rate 1000000000000.0" in err
    assert not (tmp_path / "trained").exists()


def test_a_model_that_has_become_worse_than_guessing_is_said_to_be_of_no_use(cli, saved_model):
    job = [
        "unlearn",
        *CLASS,
        "--model",
        saved_model,
        "--method",
        "ga",
        "--max_steps",
        "1",
        "--output_dir",
        "out",
    ]
    code, out, _ = cli(*job, "--learning_rate", "10")
    assert code == 0
    assert "above the 2.30 of guessing; lower --learning_rate 10, or end such a run by" in " ".join(
        out.split()
    )
    assert "of guessing" not in cli(*job, "--learning_rate", "1e-4", "--overwrite")[1]


def test_an_unknown_command_is_named(cli):
    code, _, err = cli("forget")
    assert code == 2
    assert "command 'forget' is unknown; choose one of demo" in err
    assert cli()[0] == 0
    assert cli("--version")[1].startswith("hamu 0.")
