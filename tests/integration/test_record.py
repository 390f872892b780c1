"""The record of a run and its checks: all hold until something is changed, which they name."""

import json
import re
import shutil
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from run_files import contents, run
from safetensors.torch import load_file, save_file

from hamu.data import read_images, read_text
from hamu.report.run import read_run
from hamu.unlearning.jobs.review import NamedSources
from hamu.unlearning.record import schema, violations
from hamu.unlearning.record.inputs import row_digests, text_digest, weights_digest
from hamu.unlearning.record.verify import Unavailable

DOCS = (Path(__file__).parents[2] / "docs/record.md").read_text(encoding="utf-8")


def strict(path):
    """A JSON file, as a reader sees it that knows no NaN."""
    return json.loads(path.read_text(), parse_constant=pytest.fail)


@pytest.fixture
def verify(capsys):
    """Runs the command; returns its exit code, and by statement whether it holds and why not."""

    def call(*flags):
        capsys.readouterr()
        code = run(f"verify run {' '.join(flags)}")
        pattern = r"^(holds|does not hold|cannot be checked) +([^:\n]+)(?:: (.*))?$"
        found = re.findall(pattern, capsys.readouterr().out, re.MULTILINE)
        return code, {statement: (word, why) for word, statement, why in found}

    return call


def wrong(found):
    return {statement for statement, (word, _) in found.items() if word == "does not hold"}


def test_the_record_of_images_says_what_was_asked_done_and_measured(images):
    """What `verify` compares with the files and the data is not repeated here."""
    record, evaluation = (strict(images / f"run/{name}.json") for name in ("record", "evaluation"))
    assert record["forget_set"]["chosen_by"] == "forget_class"
    assert record["settings"]["forget_class"] == {"sha256": text_digest("3")}
    assert record["models"]["before"] == record["models"]["retain_model"]
    assert (record["models"]["before"]["name"], record["hardness"]["measured_at"]) == (
        "original",
        "step 1",
    )
    goal, told = record["goal"], {"kind": "erased", "share": 0.95, "budget": None, "lasting": False}
    assert goal.items() >= told.items()
    for role in ("before", "after"):
        figures, measured = record["figures"][role], evaluation[role]
        of_retain_model = measured["retain_model"]["membership_inference"]
        assert figures["retain_model_membership_inference"] == of_retain_model
        assert figures["against_retain_model"].keys() == figures["sets"].keys()
        for name, found in figures["sets"].items():
            for key in ("loss", "accuracy"):
                # All of a set may be right, which has no spread.
                low, high = found[f"{key}_interval"] or 2 * [found[key]]
                assert low <= found[key] == measured[name][key] <= high
        assert goal[role]["records"] == measured["forget"]["samples"]
        assert all(one.keys() == {"loss", "target"} for one in goal[role]["worst"])
    rows = [one["row"] for one in evaluation["goal"]["before"]["worst"]]
    assert {int(read_images("digits").labels[row]) for row in rows} == {3}
    said, readable = record["statement"], (images / "run/record.md").read_text()
    assert f"{goal['after']['forgotten']} of {goal['after']['records']} records" in " ".join(said)
    for text in (record["forget_set"]["sha256"], record["models"]["after"]["weights"], *said):
        assert text in readable


def test_neither_paths_nor_records_are_named(finished_texts):
    """That no file has words of a forgotten record is in test_security."""
    digests = row_digests(read_text(str(finished_texts / "records.jsonl")))
    for name in ("record.json", "record.md"):
        text = (finished_texts / "run" / name).read_text()
        assert not re.search(r"(^|[\s\"'`])(/|~|[A-Z]:\\)\w", text)
        assert str(finished_texts.parent.name) not in text
        assert not any(digest in text for digest in digests)


@pytest.mark.parametrize("flags", [[], ["--no_models"]])
def test_all_holds_and_nothing_is_written(images, verify, flags):
    before = contents(images)
    code, found = verify(*flags)
    assert code == 0
    left_out = {name for name, (word, _) in found.items() if word != "holds"}
    assert len(found) == 33
    assert len(left_out) == (11 if flags else 0)
    assert contents(images) == before


def changed(name, *place, by):
    """Change a value in a JSON file of the run."""
    path = Path(f"run/{name}.json")
    content = inner = json.loads(path.read_text())
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = by(inner[place[-1]])
    path.write_text(json.dumps(content))


def rewritten(name, by):
    Path(name).write_text(by(Path(name).read_text()))


def weight(*names):
    for name in names:
        tensors = load_file(name)
        tensors[min(tensors)].view(-1)[0] += 1e-3
        save_file(tensors, name, {"format": "pt"})


def pixel(name, *classes):
    """Change a pixel of an image of each class."""
    with np.load(name) as arrays:
        images, labels = arrays["images"].copy(), arrays["labels"]
    for label in classes:
        images[int(np.argmax(labels == label)), 0, 0] ^= 1
    np.savez(name, images=images, labels=labels)


def has_weights(model):
    return f"the {model} has the weights recorded"


def is_recorded(side):
    return f"the {side} set is the one recorded"


def is_as_left(name):
    return f"{name} is as the run left it"


AFTER = "model after unlearning"
FIGURES_AFTER = f"the {AFTER} has the losses and accuracies recorded"
FORGOTTEN = f"the {AFTER} has forgotten as many records as recorded"
FORGOTTEN_BEFORE = "the model before unlearning has forgotten as many records as recorded"
CHANGE = "the figures changed from before to after as recorded"
STATED = "what record.json states follows from it"
READABLE = "record.md says what record.json says"
EVALUATED = "record.json and evaluation.json say the same"
SCHEMA = "record.json fits its schema"
GOAL = "the goal is as set, and whether it is reached follows from its counts"
RETRAINED_AUC = f"the {AFTER} has the retain model's membership inference recorded"
COUNT = ("goal", "after", "forgotten")
SET = ("figures", "after", "sets", "forget")


def tamper_with_weights_and_data():
    weight("run/model/model.safetensors", "original/model.safetensors")
    pixel("data/train.npz", 3, 5)
    pixel("data/test.npz", 5)


def tamper_with_steps_hardness_a_setting_and_what_was_read():
    changed("record", "steps", "taken", by=lambda value: value + 1)
    changed("record", "hardness", "kappa", by=lambda value: -value)
    changed("record", "settings", "learning_rate", by=lambda value: value / 10)
    changed("inputs", "forget set", "records", by=lambda value: value - 1)


def tamper_with_figures_wherever_they_stand():
    for name, loss in (("record", (*SET, "loss")), ("evaluation", ("after", "forget", "loss"))):
        changed(name, *loss, by=lambda value: 9.5)
        changed(name, *COUNT, by=lambda count: 0 if count else 1)


def tamper_with_a_quantile_a_change_and_an_interval():
    changed("record", "goal", "after", "loss_quantiles", "median", by=lambda value: value + 1)
    changed("record", "figures", "change", "retain", "accuracy_interval", by=lambda _: [0, 0])
    changed("record", *SET, "loss_interval", by=lambda ends: [0.0, ends[1]])


def tamper_with_the_retain_models_auc():
    place = "figures", "after", "retain_model_membership_inference", "auc"
    changed("record", *place, by=lambda auc: auc + 0.1)


def lose_a_line_of_the_log_as_a_resumed_run_may():
    lines = Path("run/steps.jsonl").read_text().splitlines(keepends=True)
    Path("run/steps.jsonl").write_text("".join([lines[0], *lines[2:]]))
    for name in ("logged", "logged_taken"):
        changed("record", "steps", name, by=lambda count: count - 1)


def claim_more_steps_than_are_logged():
    for name in ("ended_at", "taken", "in_model"):
        changed("record", "steps", name, by=lambda count: 1000)


def claim_that_the_worst_are_nearly_there():
    place = "goal", "before", "worst"
    changed("record", *place, by=lambda worst: [one | {"loss": one["loss"] + 0.1} for one in worst])


def remove_files():
    Path("run/evaluation.json").unlink()
    shutil.rmtree("run/model")


def _without_last_line(text):
    return text[: text[:-1].rindex("\n") + 1]


TAMPERED = [
    (tamper_with_weights_and_data,
     {*map(has_weights, (AFTER, "model before unlearning", "retain model")),
      *map(is_recorded, ("forget", "retain", "test"))}),
    (tamper_with_steps_hardness_a_setting_and_what_was_read,
     {"steps.jsonl has the steps recorded", "steps.jsonl has the hardness recorded",
      "record.json and config.yaml agree on the settings given",
      "record.json and inputs.json name the same data and models", is_as_left("inputs.json"), EVALUATED, READABLE}),
    (tamper_with_figures_wherever_they_stand,
     {FIGURES_AFTER, FORGOTTEN, is_as_left("evaluation.json"), READABLE, STATED}),
    (partial(changed, "record", "goal", "share", by=lambda share: share / 2),
     {GOAL, EVALUATED, READABLE}),
    (partial(changed, "record", "goal", "budget", by=lambda budget: 0.5),
     {GOAL, EVALUATED, READABLE, STATED}),
    (partial(changed, "record", "goal", "after", "too_high", by=lambda count: count + 1), {FORGOTTEN, EVALUATED}),
    (tamper_with_a_quantile_a_change_and_an_interval,
     {FORGOTTEN, CHANGE, FIGURES_AFTER, EVALUATED, READABLE}),
    (partial(changed, "record", "statement", by=lambda said: said[:1]), {READABLE, STATED}),
    (partial(rewritten, "run/record.md", lambda text: text.replace("approximate", "certified")),
     {is_as_left("record.md"), READABLE}),
    (partial(rewritten, "run/steps.jsonl", _without_last_line),
     {is_as_left("steps.jsonl"), "steps.jsonl has the steps recorded"}),
    (lose_a_line_of_the_log_as_a_resumed_run_may, {is_as_left("steps.jsonl")}),
    (claim_more_steps_than_are_logged, {"steps.jsonl has the steps recorded", EVALUATED, READABLE, STATED}),
    (claim_that_the_worst_are_nearly_there, {FORGOTTEN_BEFORE, EVALUATED}),
    (remove_files, {is_as_left("evaluation.json")}),
    (partial(changed, "record", "goal", "lasting", by=lambda _: True), {GOAL, EVALUATED, READABLE, STATED}),
    (partial(changed, "record", "goal", "loss", by=lambda _: 0.2), {GOAL, EVALUATED, READABLE}),
    (partial(changed, "record", "promise", "judged", by=lambda count: count - 1),
     {"steps.jsonl has the promise recorded", EVALUATED, READABLE}),
    (partial(changed, "record", "forget_set", "chosen_by", by=lambda _: "forget_data"),
     {is_recorded("forget"), READABLE}),
    (tamper_with_the_retain_models_auc, {RETRAINED_AUC, EVALUATED, READABLE}),
    (partial(rewritten, "run/evaluation.json", lambda text: '["other"]'),
     {is_as_left("evaluation.json"), EVALUATED}),
    (partial(changed, "record", "files", by=lambda names: {n: d for n, d in names.items() if n != "steps.jsonl"}),
     {is_as_left("steps.jsonl")}),
    (partial(changed, "record", "hardness", by=lambda _: None), {"steps.jsonl has the hardness recorded", READABLE}),
    (partial(changed, "record", "figures", "change", "retain", "loss_interval", by=lambda ends: ends[:1]), {READABLE}),
    (partial(changed, "record", "figures", "change", by=lambda sets: sets.pop("test") and sets), {READABLE}),
    (partial(changed, "record", "steps", "taken", by=str), {SCHEMA}),
    (partial(rewritten, "run/record.json", lambda text: text[1:]), {SCHEMA}),
]  # fmt: skip


@pytest.mark.parametrize(("tamper", "expected"), TAMPERED)
def test_what_was_tampered_with_is_named(images, verify, tamper, expected):
    tamper()
    needs_figures = bool(
        {FIGURES_AFTER, FORGOTTEN, FORGOTTEN_BEFORE, CHANGE, RETRAINED_AUC} & expected
    )
    code, found = verify(*([] if needs_figures else ["--no_models"]))
    assert (code, wrong(found)) == (1, expected)


def test_classes_named_otherwise_after_the_run_are_said_of_the_model_after(images, verify):
    names = json.loads((images / "run/model/config.json").read_text())["id2label"]
    path, swapped = images / "run/model/config.json", {**names, "0": names["1"], "1": names["0"]}
    content = json.loads(path.read_text()) | {"id2label": swapped}
    path.write_text(json.dumps(content | {"label2id": {v: int(k) for k, v in swapped.items()}}))
    found = wrong(verify()[1])
    assert FIGURES_AFTER in found
    assert not any("the model before" in one for one in found)


def test_a_report_names_what_changed_after_the_run(images):
    note = "evaluation.json is not as the run left it (hamu verify): its figures may be wrong"
    assert note not in read_run(images / "run").notes
    changed("evaluation", "after", "forget", "loss", by=lambda loss: loss + 1)
    assert note in read_run(images / "run").notes


def test_what_is_no_longer_there_cannot_be_checked_and_says_why(images, verify, monkeypatch):
    monkeypatch.setattr("hamu.__version__", "99.0")  # its words may be others
    for name in ("data", "original"):
        shutil.rmtree(images / name)
    code, found = verify()
    assert code == 0
    unchecked = ("cannot be checked", "data is not here")
    assert found[is_recorded("forget")] == found[FIGURES_AFTER] == unchecked
    before = found[has_weights("model before unlearning")]
    assert before == ("cannot be checked", "original is not here")
    assert found[READABLE][0] == "cannot be checked"
    assert found[has_weights(AFTER)][0] == "holds"
    (images / "run/config.yaml").unlink()
    code, found = verify()
    assert (code, wrong(found)) == (1, {is_as_left("config.yaml")})
    assert found[is_recorded("forget")] == ("cannot be checked", "config.yaml is missing")


def test_images_that_a_table_lists_cannot_be_checked_once_they_are_gone(images, verify):
    (images / "pictures").mkdir()
    lines = ["file_name,label"]
    for n in range(8):
        Image.new("L", (8, 8), 30 * n).save(images / f"pictures/{n}.png")
        lines.append(f"pictures/{n}.png,{n}")
    (images / "list.csv").write_text("\n".join(lines))
    where = "--data list.csv --data_dir . --image_size 8 --model original"
    by_hand = "--learning_rate 0.1 --max_steps 1 --max_grad_norm 0 --constraint_mode relative"
    assert run(f"unlearn {where} --forget_rows 0,1 {by_hand} --output_dir run --overwrite") == 0
    code, found = verify()
    assert (code, wrong(found)) == (0, set())
    shutil.rmtree(images / "pictures")
    code, found = verify()
    assert (code, found[is_recorded("forget")][0]) == (0, "cannot be checked")
    (images / "list.csv").unlink()
    code, found = verify()
    assert (code, found[is_recorded("forget")]) == (
        0,
        ("cannot be checked", "list.csv is not here"),
    )


def test_the_record_of_an_adapter_has_its_digest_and_its_base_models(texts, verify):
    record = strict(texts / "run/record.json")
    models, figures = record["models"], record["figures"]["after"]["sets"]["forget"]
    base, adapter = weights_digest(texts / "original"), weights_digest(texts / "run/model")
    assert models["before"] == {"name": "original", "weights": base, "adapter": None}
    assert models["after"] == {"name": "model", "weights": base, "adapter": adapter}
    assert models["merged"]["weights"] == weights_digest(texts / "run/merged")
    assert figures.keys() >= {"probability", "probability_interval"}
    names = ("run/model/adapter_model", "run/merged/model", "original/model")
    weight(*(f"{name}.safetensors" for name in names))
    assert wrong(verify("--no_models")[1]) == {
        *(f"the {AFTER} has the {part} recorded" for part in ("adapter", "base model")),
        *(has_weights("model before unlearning"), "merged/ has the weights recorded"),
    }
    changed("record", "forget_set", "cut", by=lambda count: count + 1)
    shutil.rmtree(texts / "run/merged")
    found = verify()[1]
    assert found["as many texts are cut as recorded"][0] == "does not hold"
    assert found["merged/ has the weights recorded"] == ("cannot be checked", "merged/ is not here")


def test_one_character_of_a_text_and_a_missing_one_are_noticed(texts, verify):
    lines = (texts / "records.jsonl").read_text().splitlines()
    other = lines[0].replace("small town", "small tovn", 1)
    for content in ([*lines[1:], other], lines[1:]):
        (texts / "records.jsonl").write_text("\n".join(content))
        code, found = verify("--no_models")
        assert (code, wrong(found)) == (1, {is_recorded("forget")})
    assert "records: the record says" in found[is_recorded("forget")][1]


def test_a_method_with_one_gradient_without_a_log_and_with_a_sample(images, verify, capsys):
    words = "--forget_rows 0,1,2,3,4,5,6,7,8,9 --method ga --max_steps 1 --max_eval_samples 8 --overwrite"
    words += " --logging_strategy no --constraint 0.3 --output_dir run"
    capsys.readouterr()
    assert run(f"unlearn --data data --model original {words}") == 0
    said = capsys.readouterr().out
    assert "without effect with ga: constraint\n" in said
    assert "demand" not in said, "there was none"
    record = strict(images / "run/record.json")
    assert (record["hardness"], record["promise"], record["steps"]["logged"]) == (None, None, 0)
    assert record["forget_set"]["description"] == "10 named rows"
    assert "constraint" not in record["settings"]
    assert list(violations(record, schema())) == []
    assert (record["goal"]["after"]["records"], record["goal"]["sampled_from"]) == (8, 10)
    assert "of 8 records, drawn from 10, " in (images / "run/record.md").read_text()
    assert verify("--no_models")[0] == 0


def test_verify_counts_by_the_unseen_records_of_the_original_model(texts, verify):
    assert strict(texts / "run/record.json")["goal"]["kind"] == "unseen"
    changed("record", "goal", "before", "records", by=lambda count: count + 1)
    found = verify()[1]
    assert found[FORGOTTEN] == ("holds", "")
    assert found[FORGOTTEN.replace("after", "before")][0] == "does not hold"
    changed("record", *COUNT, by=lambda count: 0 if count else 1)
    changed(
        "record", "figures", "after", "sets", "retain", "accuracy", by=lambda value: value - 0.01
    )
    found = verify()[1]
    assert found[FORGOTTEN][0] == found[FIGURES_AFTER][0] == "does not hold"


def test_the_hub_is_read_only_where_it_is_named_again(tmp_path, monkeypatch):
    asked = []

    def load_dataset(name, *args, **kwargs):
        asked.append(name)
        return [{"question": f"{i}?", "answer": "yes"} for i in range(3)]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    settings = {"data": "hub:owner/name", "task": "text", "forget_rows": "0"}
    settings["model"] = "hub:owner/model"
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    sources = NamedSources(tmp_path)
    with pytest.raises(Unavailable, match="name it again: --hub hub:owner/name"):
        _ = sources.problem
    for read in (partial(sources.digest, part="weights"), sources.figures):
        with pytest.raises(Unavailable, match="is of the hub"):
            read("before")
    assert asked == []
    with pytest.raises(Unavailable, match="name it again"):
        _ = NamedSources(tmp_path, "hub:owner/name-large").problem
    assert asked == []
    for hub in (["hub:owner/name"], "hub:owner/name"):
        assert len(NamedSources(tmp_path, hub).problem.retain) == 2
    assert asked == ["owner/name"] * 2


@pytest.mark.parametrize(("setting", "why"), [
    ("model: hub:no/model", "the model hub:no/model cannot be loaded: "),
    ("load_in_4bit: true", "4-bit weights need bitsandbytes: "),
])  # fmt: skip
def test_a_hub_or_a_library_that_is_not_here_speaks_against_no_record(
    texts, verify, monkeypatch, setting, why
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    name = setting.partition(":")[0]
    rewritten("run/config.yaml", lambda text: re.sub(f"(?m)^{name}:.*\n", "", text) + setting)
    found = verify("--hub hub:no/model")[1]
    assert found[CHANGE][0] == "cannot be checked"
    assert found[CHANGE][1].startswith(why)
    agree = "record.json and config.yaml agree on the settings given"
    assert wrong(found) == {is_as_left("config.yaml"), agree}


def test_a_saved_adapter_that_another_device_measured_was_in_half_precision(texts):
    rewritten("run/config.yaml", lambda text: text.replace("lora: true\n", ""))
    assert NamedSources(Path("run")).precision() == "float32"
    changed("record", "environment", "device", by=lambda _: "xpu")
    assert NamedSources(Path("run")).precision() == "half precision"


def test_the_docs_compute_the_same_digests_without_this_package(finished_images, finished_texts):
    names = {}
    [code] = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
    assert "hamu" not in code
    exec(code, names)
    of_images, of_texts = (
        strict(folder / "run/record.json") for folder in (finished_images, finished_texts)
    )
    for name, role in (("original", "before"), ("run/model", "after")):
        digest = names["weights"](finished_images / name)
        assert digest == of_images["models"][role]["weights"]
    with np.load(finished_images / "data/train.npz") as arrays:
        rows = list(zip(arrays["images"][:, None], arrays["labels"], strict=True))
    for side in ("forget", "retain"):
        chosen = [row for row in rows if (row[1] == 3) == (side == "forget")]
        digests = [names["image"](image, str(label)) for image, label in chosen]
        assert names["whole_set"](digests) == of_images[f"{side}_set"]["sha256"]
    assert names["weights"](finished_texts / "run/model") == of_texts["models"]["after"]["adapter"]
    lines = (finished_texts / "holdout.jsonl").read_text().splitlines()
    holdout = [names["text"](json.loads(line)) for line in lines]
    assert names["whole_set"](holdout) == of_texts["test_set"]["sha256"]


def test_the_docs_explain_every_field():
    table = re.findall(r"^\| (`.*?) \|", DOCS, re.MULTILINE)
    named = {name for cell in table for name in re.findall(r"`(\w+)`", cell)}
    assert named == set(schema()["properties"])
