"""The record of a run and its checking: it holds as long as nothing is touched, and names what was."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from hamu.cli import main
from hamu.data import forget_class, read_images, read_text
from hamu.models.language import new_language_model, new_tokenizer
from hamu.unlearning.jobs.named_sources import NamedSources
from hamu.unlearning.record import Unavailable
from hamu.unlearning.record.inputs import row_digests, set_digest, text_digest, weights_digest
from hamu.unlearning.record.schema import schema, violations

DOCS = (Path(__file__).parents[2] / "docs/record.md").read_text(encoding="utf-8")
FAST = ["--max_steps", "3", "--constraint_mode", "relative", "--stopping", "off"]


def run(*words):
    return main([str(word) for word in words])


def strict(path):
    """A JSON file, as a reader sees it that knows no NaN."""

    def refuse(constant):
        raise AssertionError(f"{path} holds {constant}")

    return json.loads(path.read_text(), parse_constant=refuse)


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def finished_texts(tmp_path_factory):
    """The same with texts, and an adapter."""
    folder = tmp_path_factory.mktemp("texts")
    texts = read_text("miniature")
    for name, rows in (
        ("records", texts.records[:40]),
        ("holdout", read_text("miniature", "test").records[:8]),
    ):
        (folder / f"{name}.jsonl").write_text(
            "\n".join(json.dumps(dict(row.fields)) for row in rows)
        )
    torch.manual_seed(0)
    tokenizer = new_tokenizer((r.prompt + r.answer for r in texts.records), 400)
    for part in (new_language_model(tokenizer, hidden=32, layers=1), tokenizer):
        part.save_pretrained(folder / "original")
    author = texts.records[0].fields["author"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run("unlearn", "--data", "records.jsonl", "--test_data", "holdout.jsonl", "--model", "original", *FAST,
                   "--forget_filter", f"author={author}", "--lora", "--lora_rank", "2", "--merge",
                   "--learning_rate", "0.5", "--output_dir", "run") == 0  # fmt: skip
    return folder


@pytest.fixture
def images(finished_images, tmp_path, monkeypatch):
    """A copy to tamper with, which is the current folder."""
    monkeypatch.chdir(shutil.copytree(finished_images, tmp_path / "copy"))
    return Path()


@pytest.fixture
def texts(finished_texts, tmp_path, monkeypatch):
    monkeypatch.chdir(shutil.copytree(finished_texts, tmp_path / "copy"))
    return Path()


@pytest.fixture
def verify(capsys):
    """Runs the command; returns its exit code, and by statement whether it holds and why not."""

    def call(*flags):
        capsys.readouterr()
        code = run("verify", "run", *flags)
        pattern = r"^(holds|does not hold|cannot be checked) +([^:\n]+)(?:: (.*))?$"
        found = re.findall(pattern, capsys.readouterr().out, re.MULTILINE)
        return code, {statement: (word, why) for word, statement, why in found}

    return call


def wrong(found):
    return {statement for statement, (word, _) in found.items() if word == "does not hold"}


def test_the_record_of_images_says_what_was_asked_done_and_measured(images):
    record = strict(images / "run/record.json")
    assert list(violations(record, schema())) == []
    train, test = read_images("data", "train"), read_images("data", "test")
    problem = forget_class(train, test, "3")
    for name, data in problem.sets().items():
        entry = record[f"{name}_set"]
        assert (entry["source"], entry["records"]) == (
            {"test": "test.npz"}.get(name, "train.npz"),
            len(data),
        )
        assert entry["sha256"] == set_digest(row_digests(data))
    assert record["forget_set"]["chosen_by"] == "forget_class"
    assert record["settings"]["forget_class"] == {"sha256": text_digest("3")}
    assert record["models"]["before"] == record["models"]["retain_model"]
    assert record["models"]["before"] == {
        "name": "original",
        "weights": weights_digest(images / "original"),
        "adapter": None,
    }
    assert record["models"]["after"]["weights"] == weights_digest(images / "run/model")
    steps = [json.loads(line) for line in (images / "run/steps.jsonl").read_text().splitlines()]
    assert record["hardness"] == {"measured_at": "step 1"} | {
        key: steps[0][key] for key in ("kappa", "cos", "direct_threshold", "stop_threshold")
    }
    assert [record["steps"][name] for name in ("taken", "in_model", "not_taken", "ended_at")] == [
        3,
        3,
        0,
        3,
    ]
    evaluation = strict(images / "run/evaluation.json")
    assert record["promise"] == evaluation["promise"]
    for role in ("before", "after"):
        assert (
            record["figures"][role]["membership_inference"]
            == evaluation[role]["membership_inference"]
        )
        against = dict(evaluation[role]["against_retain_model"])
        assert against.pop("test_without_class").keys() == against["test"].keys(), (
            "the record has three sets"
        )
        assert record["figures"][role]["against_retain_model"] == against
        for name, figures in record["figures"][role]["sets"].items():
            for key in ("loss", "accuracy"):
                low, high = figures[f"{key}_interval"]
                assert low <= figures[key] == evaluation[role][name][key] <= high
    goal = record["goal"]
    assert (goal["kind"], goal["share"], goal["budget"], goal["lasting"]) == (
        "erased",
        0.95,
        None,
        False,
    )
    for role in ("before", "after"):
        accuracy = evaluation[role]["forget"]["accuracy"]
        assert goal[role]["records"] == len(problem.forget)
        assert goal[role]["forgotten"] == round((1 - accuracy) * len(problem.forget)), (
            "those told wrong"
        )
        assert all(one.keys() == {"loss", "target"} for one in goal[role]["worst"])
        own = evaluation[role]["retain_model"]["membership_inference"]
        assert record["figures"][role]["retain_model_membership_inference"] == own
    said = " ".join(record["statement"])
    assert f"{goal['after']['forgotten']} of {goal['after']['records']} records" in said
    assert "Whether that lasts was not tested" in said
    readable = (images / "run/record.md").read_text()
    for digest in (record["forget_set"]["sha256"], record["models"]["after"]["weights"]):
        assert digest in readable
    assert all(sentence in readable for sentence in record["statement"])


def test_neither_paths_nor_hosts_nor_users_are_named(finished_images):
    for name in ("record.json", "record.md"):
        text = (finished_images / "run" / name).read_text()
        assert not re.search(r"(^|[\s\"'`])(/|~|[A-Z]:\\)\w", text)
        assert str(finished_images.parent.name) not in text


@pytest.mark.parametrize("flags", [[], ["--no_models"]])
def test_all_holds_and_nothing_is_written(images, verify, flags):
    before = contents(images)
    code, found = verify(*flags)
    assert code == 0
    left_out = {name for name, (word, _) in found.items() if word != "holds"}
    assert len(found) == 28
    assert len(left_out) == (9 if flags else 0)
    assert contents(images) == before


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def edit_json(path, place, change):
    content = json.loads(path.read_text())
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = change(inner[place[-1]])
    path.write_text(json.dumps(content))


def change_a_weight(folder, name="model.safetensors"):
    tensors = load_file(folder / name)
    first = sorted(tensors)[0]
    tensors[first].view(-1)[0] += 1e-3
    save_file(tensors, folder / name, {"format": "pt"})


def change_a_pixel(path, label):
    with np.load(path) as arrays:
        images, labels = arrays["images"].copy(), arrays["labels"]
    place = int(np.argmax(labels == label))
    images[place, 0, 0] ^= 1
    np.savez(path, images=images, labels=labels)


FIGURES_AFTER = "the model after unlearning has the losses and accuracies recorded"
FORGOTTEN = "the model after unlearning has forgotten as many records as recorded"
COUNT = ("goal", "after", "forgotten")
CHANGE = "the figures changed from before to after as recorded"
LOSS = ("figures", "after", "sets", "forget", "loss")
TAMPERED = {
    "weights, data and a line of the log": (
        lambda at: [
            change_a_weight(at / "run/model"),
            change_a_weight(at / "original"),
            change_a_pixel(at / "data/train.npz", 3),
            change_a_pixel(at / "data/train.npz", 5),
            change_a_pixel(at / "data/test.npz", 5),
            edit(at / "run/steps.jsonl", (at / "run/steps.jsonl").read_text().splitlines()[1] + "\n", ""),
        ],
        {"the model after unlearning has the weights recorded", "the retain model has the weights recorded",
         "the model before unlearning has the weights recorded", "the forget set is the one recorded",
         "the retain set is the one recorded", "the test set is the one recorded",
         "steps.jsonl is as the run left it", "steps.jsonl has the steps recorded"},
    ),
    "steps, hardness, a setting and what was read": (
        lambda at: [
            edit_json(at / "run/record.json", ("steps", "taken"), lambda value: value + 1),
            edit_json(at / "run/record.json", ("hardness", "kappa"), lambda value: -value),
            edit_json(at / "run/record.json", ("settings", "learning_rate"), lambda value: value / 10),
            edit_json(at / "run/inputs.json", ("forget set", "records"), lambda value: value - 1),
        ],
        {"steps.jsonl has the steps recorded", "record.json and evaluation.json say the same",
         "steps.jsonl has the hardness recorded", "record.json and config.yaml name the same settings",
         "inputs.json is as the run left it", "record.json and inputs.json name the same data and models",
         "record.md says what record.json says"},
    ),
    "figures wherever they stand": (
        lambda at: [
            edit_json(at / "run/record.json", LOSS, lambda value: 9.5),
            edit_json(at / "run/evaluation.json", ("after", "forget", "loss"), lambda value: 9.5),
            *(edit_json(at / f"run/{name}.json", COUNT, lambda count: 0 if count else 1)
              for name in ("record", "evaluation")),
        ],
        {FIGURES_AFTER, FORGOTTEN, "evaluation.json is as the run left it", "record.md says what record.json says"},
    ),
    "a quantile, a change and an interval": (
        lambda at: [
            edit_json(at / "run/record.json", place, change) for place, change in (
                (("goal", "after", "loss_quantiles", "median"), lambda value: value + 1),
                (("figures", "change", "retain", "accuracy_interval"), lambda ends: [-0.5, 0.5]),
                ((*LOSS[:-1], "loss_interval"), lambda ends: [0.0, ends[1]]),
            )
        ],
        {FORGOTTEN, CHANGE, FIGURES_AFTER, "record.json and evaluation.json say the same",
         "record.md says what record.json says"},
    ),
    "the statement": (
        lambda at: edit_json(at / "run/record.json", ("statement",), lambda sentences: sentences[:1]),
        {"record.md says what record.json says"},
    ),
    "a word of the readable record": (
        lambda at: edit(at / "run/record.md", "approximate", "certified"),
        {"record.md is as the run left it", "record.md says what record.json says"},
    ),
    "files gone": (
        lambda at: [(at / "run/evaluation.json").unlink(), shutil.rmtree(at / "run/model")],
        {"evaluation.json is as the run left it", "the model after unlearning has the weights recorded"},
    ),
    "the form": (
        lambda at: edit_json(at / "run/record.json", ("steps", "taken"), str), {"record.json fits its schema"},
    ),
    "no JSON": (lambda at: (at / "run/record.json").write_text("{"), {"record.json fits its schema"}),
}  # fmt: skip


@pytest.mark.parametrize("what", TAMPERED)
def test_what_was_tampered_with_is_named(images, verify, what):
    tamper, expected = TAMPERED[what]
    tamper(images)
    needs_figures = bool({FIGURES_AFTER, FORGOTTEN, CHANGE} & expected)
    code, found = verify(*([] if needs_figures else ["--no_models"]))
    assert code == 1
    assert wrong(found) == expected


def test_what_is_no_longer_there_cannot_be_checked_and_says_why(images, verify):
    shutil.rmtree(images / "data")
    shutil.rmtree(images / "original")
    code, found = verify()
    assert code == 0
    for statement, reason in {
        "the forget set is the one recorded": "data is not here",
        "the model before unlearning has the weights recorded": "original is not here",
        FIGURES_AFTER: "data is not here",
    }.items():
        assert found[statement] == ("cannot be checked", reason)
    assert found["the model after unlearning has the weights recorded"][0] == "holds"


def test_without_its_config_a_run_is_checked_as_far_as_that_goes(images, verify):
    (images / "run/config.yaml").unlink()
    code, found = verify()
    assert code == 1
    assert wrong(found) == {"config.yaml is as the run left it"}
    assert found["the forget set is the one recorded"] == (
        "cannot be checked",
        "config.yaml is missing",
    )
    assert found["the model after unlearning has the weights recorded"][0] == "holds"


def test_a_record_of_another_version_is_not_judged_by_how_this_one_words_it(
    images, verify, monkeypatch
):
    monkeypatch.setattr("hamu.__version__", "99.0")
    code, found = verify("--no_models")
    assert code == 0
    assert found["record.md says what record.json says"][0] == "cannot be checked"


@pytest.mark.parametrize(("words", "message"), [
    ([], "required: run"),
    (["nowhere"], "nowhere has no record.json"),
    (["original"], "original has no record.json"),
    (["run", "--figures"], "unrecognized arguments: --figures"),
])  # fmt: skip
def test_a_wrong_use_is_one_line_and_exit_code_2(images, capsys, words, message):
    assert run("verify", *words) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


def test_no_record_says_anything_of_what_was_to_be_forgotten(texts, capsys):
    assert run("verify", "run") == 0
    said = capsys.readouterr().out
    said += "".join((texts / "run" / name).read_text() for name in ("record.json", "record.md"))
    author = read_text("records.jsonl").records[0].fields["author"]
    forgotten = [
        row for row in read_text("records.jsonl").records if row.fields["author"] == author
    ]
    assert len(forgotten) > 1
    for row in forgotten:
        for value in row.fields.values():
            for text in [value] if isinstance(value, str) else value:
                assert text == "train" or text.lower() not in said.lower()
        [digest] = row_digests(texts_of(row))
        assert digest not in said
    for name in author.split():
        assert name.lower() not in said.lower()
    record = strict(texts / "run/record.json")
    assert record["settings"]["forget_filter"] == {"sha256": text_digest(f"author={author}")}
    assert record["forget_set"]["records"] == len(forgotten)


def texts_of(*rows):
    return type(read_text("records.jsonl"))(tuple(rows), "", torch.arange(len(rows)))


def test_the_record_of_an_adapter_has_its_digest_and_its_base_models(texts, verify):
    models = strict(texts / "run/record.json")["models"]
    base, adapter = weights_digest(texts / "original"), weights_digest(texts / "run/model")
    assert models["before"] == {"name": "original", "weights": base, "adapter": None}
    assert models["after"] == {"name": "model", "weights": base, "adapter": adapter}
    assert models["merged"]["weights"] == weights_digest(texts / "run/merged")
    assert set(strict(texts / "run/record.json")["figures"]["after"]["sets"]["forget"]) >= {
        "probability", "probability_interval",
    }  # fmt: skip
    change_a_weight(texts / "run/model", "adapter_model.safetensors")
    change_a_weight(texts / "run/merged")
    change_a_weight(texts / "original")
    code, found = verify("--no_models")
    assert code == 1
    assert wrong(found) == {
        "the model after unlearning has the adapter recorded",
        "the model after unlearning has the base model recorded",
        "the model before unlearning has the weights recorded",
        "merged/ has the weights recorded",
    }


def test_one_character_of_a_text_is_noticed_and_white_space_at_its_ends_is_not(texts, verify):
    lines = (texts / "records.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    rows[0]["answer"] += "  "
    (texts / "records.jsonl").write_text("\n".join(map(json.dumps, reversed(rows))))
    assert verify("--no_models")[0] == 0
    rows[0]["paraphrased_answer"] += "!"
    (texts / "records.jsonl").write_text("\n".join(map(json.dumps, rows)))
    code, found = verify("--no_models")
    assert (code, wrong(found)) == (1, {"the forget set is the one recorded"})
    (texts / "records.jsonl").write_text("\n".join(lines[1:]))
    why = {name: found[name][1] for _, found in [verify("--no_models")] for name in wrong(found)}
    assert set(why) == {"the forget set is the one recorded"}
    assert "records, the record says" in why["the forget set is the one recorded"]


def test_a_method_with_one_gradient_and_without_a_log(images, verify):
    assert run("unlearn", "--data", "data", "--model", "original", "--forget_rows", "1,2", "--method", "ga",
               "--max_steps", "1", "--logging_strategy", "no", "--output_dir", "run", "--overwrite") == 0  # fmt: skip
    record = strict(images / "run/record.json")
    assert record["hardness"] is None
    assert record["promise"] is None
    assert record["steps"]["logged"] == 0
    assert record["forget_set"]["description"] == "2 named rows"
    assert list(violations(record, schema())) == []
    assert verify("--no_models")[0] == 0


def test_verify_counts_by_the_unseen_records_of_the_original_model(texts, verify):
    goal = strict(texts / "run/record.json")["goal"]
    assert goal["kind"] == "unseen"
    edit_json(texts / "run/record.json", ("goal", "before", "records"), lambda count: count + 1)
    found = verify()[1]
    assert found[FORGOTTEN] == ("holds", "")
    assert found[FORGOTTEN.replace("after", "before")][0] == "does not hold"


def test_the_hub_is_read_only_where_it_is_named_again(tmp_path, monkeypatch):
    asked = []

    def load_dataset(name, *args, **kwargs):
        asked.append(name)
        return [{"question": f"{i}?", "answer": "yes"} for i in range(3)]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    settings = {
        "data": "hub:owner/name",
        "task": "text",
        "forget_rows": "0",
        "model": "hub:owner/model",
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    sources = NamedSources(tmp_path)
    with pytest.raises(Unavailable, match="name it again: --hub hub:owner/name"):
        _ = sources.problem
    for read in (sources.weights, sources.figures):
        with pytest.raises(Unavailable, match="is of the hub"):
            read("before")
    assert asked == []
    assert len(NamedSources(tmp_path, ["hub:owner/name"]).problem.retain) == 2
    assert asked == ["owner/name"]


def test_the_docs_compute_the_same_digests_without_this_package(finished_images, finished_texts):
    names = {}
    [code] = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
    assert "hamu" not in code
    exec(code, names)
    record = strict(finished_images / "run/record.json")
    for name, role in (("original", "before"), ("run/model", "after")):
        assert names["weights"](finished_images / name) == record["models"][role]["weights"]
    with np.load(finished_images / "data/train.npz") as arrays:
        rows = [
            (image[None], label)
            for image, label in zip(arrays["images"], arrays["labels"], strict=True)
        ]
    for key, belongs in (
        ("forget_set", lambda label: label == 3),
        ("retain_set", lambda label: label != 3),
    ):
        chosen = [names["image"](image, str(label)) for image, label in rows if belongs(label)]
        assert names["whole_set"](chosen) == record[key]["sha256"]
    record = strict(finished_texts / "run/record.json")
    assert names["weights"](finished_texts / "run/model") == record["models"]["after"]["adapter"]
    holdout = [
        json.loads(line) for line in (finished_texts / "holdout.jsonl").read_text().splitlines()
    ]
    assert names["whole_set"](map(names["text"], holdout)) == record["test_set"]["sha256"]


def test_the_docs_explain_every_field():
    table = re.findall(r"^\| (`.*?) \|", DOCS, re.MULTILINE)
    named = {name for cell in table for name in re.findall(r"`(\w+)`", cell)}
    assert named == set(schema()["properties"])
