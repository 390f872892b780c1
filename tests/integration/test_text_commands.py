"""The commands on text, from nothing: train, unlearn, evaluate on the bundled miniature, and what can be wrong."""

import gc
import json
import math
import weakref
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from hamu.cli import main
from hamu.data import read_text
from hamu.models.language import load_language_model
from hamu.report.tables import privleak_line
from hamu.unlearning.jobs import text_task
from hamu.unlearning.jobs.text_task import TextTask

FEW = ["--max_steps", "4", "--per_device_train_batch_size", "8", "--per_device_eval_batch_size", "32",
       "--max_length", "96"]  # fmt: skip
FORGET = ["--data", "miniature", "--forget_filter", "author~^V"]
LORA = [
    "--lora",
    "--lora_rank",
    "2",
    "--learning_rate",
    "0.5",
    "--constraint_mode",
    "relative",
    "--stopping",
    "off",
]


def run(*words):
    return main([str(word) for word in words])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text") / "original"
    assert (
        run("train", "--data", "miniature", "--model", "tiny-llama", *FEW, "--output_dir", folder)
        == 0
    )
    return folder / "model"


@pytest.fixture(scope="module")
def adapter(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("text") / "lora"
    code = run("unlearn", *FORGET, "--model", trained, *LORA, *FEW, "--merge", "--gradient_checkpointing",
               "--output_dir", folder)  # fmt: skip
    assert code == 0
    return folder


def test_a_model_is_trained_unlearned_and_evaluated_offline(trained, tmp_path, capsys):
    unlearned, check = tmp_path / "unlearned", tmp_path / "check"
    assert run("unlearn", *FORGET, "--model", trained, *FEW, "--constraint_mode", "relative", "--stopping", "off",
               "--output_dir", unlearned) == 0  # fmt: skip
    steps = [json.loads(line) for line in (unlearned / "steps.jsonl").read_text().splitlines()]
    assert len(steps) == 4
    assert all(step["taken"] for step in steps)
    assert run("evaluate", *FORGET, "--model", unlearned / "model", "--original_model", trained, "--generate", "3",
               "--max_length", "96", "--output_dir", check) == 0  # fmt: skip
    report = json.loads((check / "evaluation.json").read_text())
    assert set(report["membership_inference"]) == {"loss", "zlib", "min_k", "min_k_plus_plus"}
    lines = [json.loads(line) for line in (check / "answers.jsonl").read_text().splitlines()]
    assert [line["set"] for line in lines] == ["forget"] * 3 + ["retain"] * 3
    page = (check / "answers.html").read_text()
    for line in lines:
        assert {"before", "after"} <= set(line)
        assert line["expected"].replace("'", "&#39;") in page
    assert "miniature" not in capsys.readouterr().err


def test_the_figures_of_tofu_are_measured_where_their_data_are_given(
    trained, tmp_path, capsys, monkeypatch
):
    rows = [record.fields for record in read_text("miniature").select(range(8)).records]
    named = {}
    for name in ("forget_perturbed", "retain_perturbed", "real_authors", "world_facts"):
        keys = ["question", "answer", "perturbed_answer"]
        keys += ["paraphrased_answer"] if "perturbed" in name else []
        lines = [json.dumps({key: row[key] for key in keys}) for row in rows]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
        named |= {f"--{name}": tmp_path / f"{name}.jsonl"}
    words = [str(word) for pair in named.items() for word in pair]
    check = tmp_path / "check"
    loaded = []

    def load(source, **settings):
        gc.collect()
        assert not any(model() is not None for model in loaded), "two models at once"
        model = load_language_model(source, **settings)
        loaded.append(weakref.ref(model))
        return model

    monkeypatch.setattr(text_task, "load_language_model", load)
    assert run("evaluate", *FORGET, "--model", trained, "--retain_model", trained, *words, "--generate", "2",
               "--max_length", "96", "--output_dir", check) == 0  # fmt: skip
    assert len(loaded) == 2, "each model is loaded once"
    tofu = json.loads((check / "evaluation.json").read_text())["tofu"]
    assert tofu["forget_quality"] == 1.0, "the model against itself"
    assert tofu["privleak"] == 0.0
    assert json.loads((check / "evaluation.json").read_text())["privleak"] == 0.0
    assert 0 <= tofu["model_utility"] <= 1
    for name in ("forget", "retain", "real_authors", "world_facts"):
        assert (tofu[name]["records"], tofu[name]["generated"]) == (8, 2)
    assert "forget quality" in capsys.readouterr().out


def test_privleak_needs_no_data_of_tofu(trained, adapter, tmp_path, capsys):
    check = tmp_path / "check"
    words = [
        "evaluate",
        *FORGET,
        "--model",
        adapter / "model",
        "--retain_model",
        trained,
        "--max_length",
        "96",
    ]
    assert run(*words, "--output_dir", check) == 0
    report = json.loads((check / "evaluation.json").read_text())
    ours, theirs = (
        1 - one["membership_inference"]["min_k"] for one in (report, report["retain_model"])
    )
    assert report["privleak"] == pytest.approx((ours - theirs) / theirs)
    assert "tofu" not in report
    assert f"PrivLeak (0 is ideal): {report['privleak']:+.4f}" in capsys.readouterr().out


def test_privleak_is_unknown_without_data_that_was_never_trained_on(trained, tmp_path, capsys):
    data = tmp_path / "data.jsonl"
    data.write_text(
        "\n".join(json.dumps({"question": f"number {i}?", "answer": "yes"}) for i in range(6))
    )
    check = tmp_path / "check"
    assert run("evaluate", "--data", data, "--forget_rows", "0,1", "--model", trained, "--retain_model", trained,
               "--generate", "0", "--output_dir", check) == 0  # fmt: skip
    assert json.loads((check / "evaluation.json").read_text())["privleak"] is None
    assert (
        "PrivLeak: not measured (it needs membership inference of both models)"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(("ours", "theirs", "expected"), [
    (0.9, 0.5, -0.8), (0.5, 0.5, 0.0), (0.5, 1.0, None), (None, 0.5, None), (0.5, None, None),
    (math.inf, 0.5, None), (0.5, math.inf, None),
])  # fmt: skip
def test_privleak_of_any_two_models_is_a_figure_or_unknown(ours, theirs, expected, monkeypatch):
    inference = {"": ours, "retain": theirs}
    inference = {
        name: None if auc is None else {"loss": 0.5, "min_k": None if auc == math.inf else auc}
        for name, auc in inference.items()
    }
    monkeypatch.setattr(
        text_task,
        "text_report",
        lambda predictions, texts: {"membership_inference": inference[predictions]},
    )
    monkeypatch.setattr(text_task, "further_figures", lambda predictions, reference: {})
    problem = SimpleNamespace(sets=dict)
    report = TextTask.report(None, "", problem, "retain", None)
    assert report["privleak"] == (None if expected is None else pytest.approx(expected))
    why = (
        "divides by"
        if theirs == 1
        else "needs membership inference"
        if expected is None
        else "0 is ideal"
    )
    assert why in privleak_line(report)


def test_unlearning_by_adapter_moves_every_tensor_of_it_and_nothing_else(trained, adapter):
    saved = load_file(adapter / "model" / "adapter_model.safetensors")
    assert len(saved) == 2 * 2 * 4, (
        "two matrices for the query and value projection of each of four layers"
    )
    for name, tensor in saved.items():
        assert tensor.abs().sum() > 0, f"{name} did not move"
    merged = load_file(adapter / "merged" / "model.safetensors")
    for name, before in load_file(trained / "model.safetensors").items():
        adapted = "q_proj" in name or "v_proj" in name
        assert torch.equal(before, merged[name]) != adapted, name


def test_an_adapter_is_unlearned_in_place_and_merges_to_the_same_model(trained, adapter, tmp_path):
    again = tmp_path / "again"
    code = run("unlearn", *FORGET, "--model", adapter / "model", "--learning_rate", "0.5", "--constraint_mode",
               "relative", "--stopping", "off", *FEW, "--output_dir", again)  # fmt: skip
    assert code == 0
    before, after = (load_file(f / "model" / "adapter_model.safetensors") for f in (adapter, again))
    assert set(before) == set(after)
    assert all(not torch.equal(before[name], after[name]) for name in before)
    ids = torch.arange(40, 60)[None]
    with torch.no_grad():
        separate = load_language_model(str(adapter / "model")).eval()(input_ids=ids).logits
        merged = load_language_model(str(adapter / "merged")).eval()(input_ids=ids).logits
    torch.testing.assert_close(separate, merged, rtol=1e-4, atol=1e-5)


def test_no_output_may_lie_where_any_model_is_read(trained, adapter, capsys):
    whole = trained.parent
    for words in (
        ["evaluate", *FORGET, "--model", adapter / "model", "--original_model", trained],
        ["unlearn", *FORGET, "--model", adapter / "model"],  # the base model that the adapter names
    ):
        assert run(*words, "--output_dir", whole, "--overwrite") == 2
        assert "overlap" in capsys.readouterr().err
        assert (trained / "model.safetensors").is_file()


def test_an_adapter_without_its_tokenizer_or_its_weights(adapter, tmp_path, capsys):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (bare / name).write_bytes((adapter / "model" / name).read_bytes())
    job = [
        "unlearn",
        *FORGET,
        "--model",
        bare,
        "--constraint_mode",
        "relative",
        "--stopping",
        "off",
        *FEW,
    ]
    assert run(*job, "--output_dir", tmp_path / "out") == 0, "the base model's tokenizer serves"
    (bare / "adapter_model.safetensors").unlink()
    capsys.readouterr()
    assert run(*job, "--output_dir", tmp_path / "out2") == 2
    assert "has no adapter_model.safetensors" in capsys.readouterr().err


def test_what_was_to_be_forgotten_is_readable_for_its_owner_alone(trained, tmp_path):
    check = tmp_path / "check"
    assert (
        run("evaluate", *FORGET, "--model", trained, "--generate", "2", "--output_dir", check) == 0
    )
    assert (check / "answers.jsonl").stat().st_mode & 0o077 == 0


def test_plain_text_is_evaluated_without_answers(trained, tmp_path, capsys):
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps({"text": f"some text, number {i}"}) for i in range(6)))
    job = [
        "evaluate",
        "--data",
        data,
        "--forget_rows",
        "0,1",
        "--model",
        trained,
        "--output_dir",
        tmp_path / "check",
    ]
    assert run(*job) == 0
    assert "plain text has no prompt" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--data", "nowhere.jsonl", "--forget_rows", "0"],
            "nowhere.jsonl is neither a file nor a folder",
        ),
        (["--data", "miniature", "--forget_filter", "author=Nobody"], "the forget set is empty"),
        (["--data", "miniature", "--forget_filter", "writer=X"], "has no column writer"),
        (
            ["--data", "miniature", "--forget_filter", "author"],
            "cannot be read; write COLUMN=VALUE",
        ),
        (["--data", "miniature", "--forget_filter", "author~."], "nothing is left to retain"),
        (["--data", "miniature", "--forget_rows", "9999"], "row 9999 is not in"),
        (["--data", "miniature"], "say what to forget with one of"),
        ([*FORGET, "--max_length", "5"], "has no answer token among its first 5 tokens"),
        ([*FORGET, "--question_template", "Q:"], "must have {question} in it"),
        ([*FORGET, "--loss_on", "some"], "loss_on 'some' is unknown"),
        ([*FORGET, "--model_dtype", "bfloat16"], "would be trained in half precision"),
        (
            [*FORGET, "--method", "ga", "--max_retain_loss", "1"],
            "no effect with ga, which has no retain pass",
        ),
        ([*FORGET, "--model_dtype", "int3"], "model_dtype 'int3' is unknown"),
        ([*FORGET, "--lora", "--lora_rank", "0"], "lora_rank 0 must be at least 1"),
        ([*FORGET, "--lora", "--lora_targets", "nothing"], "the adapter does not fit the model"),
        ([*FORGET, "--forget_objective", "mpo"], "objective 'mpo' is unknown"),
        (
            [*FORGET, "--target_forget_loss", "-1"],
            "target_forget_loss -1.0 must be a positive number",
        ),
        ([*FORGET, "--task", "sound"], "task 'sound' is unknown"),
        ([*FORGET, "--merge"], "there is no adapter to merge"),
    ],
)
def test_a_wrong_input_is_one_line_and_nothing_is_written(
    words, message, trained, tmp_path, capsys
):
    folder = tmp_path / "out"
    assert run("unlearn", "--model", trained, *words, *FEW[:2], "--output_dir", folder) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert len(printed.strip().splitlines()) == 1
    assert not folder.exists()


@pytest.mark.parametrize("lora", [(), ("--lora", "--lora_rank", "2")])
def test_every_checkpoint_of_a_run_opens_as_a_model(trained, tmp_path, capsys, lora):
    saves = [*FEW, "--save_strategy", "steps", "--save_steps", "2"]
    runs = {
        "train": [
            "train",
            "--data",
            "miniature",
            "--model",
            trained if lora else "tiny-llama",
            *lora,
            *saves,
        ],
        "unlearn": ["unlearn", *FORGET, "--model", trained, *LORA[3:], *lora, *saves],
    }
    for name, words in runs.items():
        assert run(*words, "--output_dir", tmp_path / name) == 0
        losses = []
        for model in ("checkpoint-2", "checkpoint-4", "model"):
            out = tmp_path / f"{name}-{model}"
            job = [
                "evaluate",
                *FORGET,
                "--model",
                tmp_path / name / model,
                "--generate",
                "0",
                "--max_length",
                "96",
            ]
            assert run(*job, "--output_dir", out) == 0, capsys.readouterr().err
            losses.append(json.loads((out / "evaluation.json").read_text())["retain"]["loss"])
        assert losses[0] != losses[1] == losses[2]
    (tmp_path / "train/model").rename(tmp_path / "elsewhere")
    assert run(*job, "--model", tmp_path / "train", "--output_dir", tmp_path / "no") == 2
    assert (
        f"resume it, or give its newest checkpoint, {tmp_path}/train/checkpoint-4"
        in capsys.readouterr().err
    )


def test_the_first_wrong_line_of_a_file_is_named(trained, tmp_path, capsys):
    data = tmp_path / "data.jsonl"
    data.write_text('{"question": "a?", "answer": "b"}\n{"question": "c?", "ans')
    assert (
        run(
            "unlearn",
            "--model",
            trained,
            "--data",
            data,
            "--forget_rows",
            "0",
            "--output_dir",
            tmp_path / "o",
        )
        == 2
    )
    assert f"line 2 of {data} cannot be read as JSON" in capsys.readouterr().err


@pytest.mark.parametrize("recipe", ["tofu-llama2-lora", "waterdrum-tofu-llama2-lora"])
def test_a_dry_run_of_the_papers_recipe_needs_neither_weights_nor_network(recipe, capsys):
    assert run("unlearn", "--recipe", recipe, "--dry_run") == 0
    printed = capsys.readouterr().out
    assert "6,742,609,920" in printed, (
        "6,738,415,616 parameters of Llama-2-7b and those of the adapter"
    )
    assert "4,194,304" in printed, "r = 8 on query and value projections of 32 layers"
    assert "720 (72 an epoch)" in printed, "App. F.3"


def test_a_retain_model_may_share_the_originals_tokenizer(trained, tmp_path):
    words = [
        "--model",
        "tiny-llama",
        "--tokenizer",
        trained,
        "--without_forget",
        "--output_dir",
        tmp_path / "retain",
    ]
    assert run("train", *FORGET, *words, *FEW) == 0
    ours, theirs = (
        (folder / "tokenizer.json").read_bytes() for folder in (tmp_path / "retain/model", trained)
    )
    assert ours == theirs


def test_records_to_forget_that_are_not_in_the_data_are_counted(trained, tmp_path, capsys):
    rows = [{"question": f"number {i}?", "answer": "yes, indeed"} for i in range(8)]
    for name, chosen in (
        ("data", rows),
        ("gone", [rows[0], {"question": "number  1?", "answer": "yes, indeed"}]),
    ):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, chosen)))
    files = ["--data", tmp_path / "data.jsonl", "--forget_data", tmp_path / "gone.jsonl"]
    relative = ["--constraint_mode", "relative", "--stopping", "off"]
    job = ["unlearn", *files, "--model", trained, *relative, *FEW, "--output_dir", tmp_path / "out"]
    assert run(*job) == 2
    err = capsys.readouterr().err
    assert "1 of 2 records of gone.jsonl are not in" in err
    assert "give --allow_missing" in err
    assert "number" not in err
    assert not (tmp_path / "out").exists()
    assert run(*job, "--allow_missing") == 0
    assert "1 of 2 records to forget are not found" in " ".join(capsys.readouterr().out.split())
    assert "1 of them found in the training data" in (tmp_path / "out/record.json").read_text()


def test_a_run_that_ends_before_its_first_step_leaves_an_earlier_one(trained, tmp_path, capsys):
    job = [
        "unlearn",
        *FORGET,
        "--model",
        trained,
        "--constraint_mode",
        "relative",
        "--stopping",
        "off",
        *FEW,
    ]
    job += ["--output_dir", tmp_path / "out"]
    assert run(*job) == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    capsys.readouterr()
    saving = ("--save_strategy", "steps", "--save_steps", "1")  # a checkpoint would replace it
    assert run(*job, "--overwrite", "--max_retain_loss", "0.01", *saving) == 2
    printed = capsys.readouterr().err
    assert "no step was taken, the model is as it was: the retain loss of a step" in printed
    assert run(*job[:-2], "--output_dir", tmp_path / "new", "--constraint", "1e6", "--constraint_mode", "absolute",
               "--on_infeasible", "skip", "--max_steps", "2", *saving) == 2  # fmt: skip
    printed = capsys.readouterr().err
    assert (
        "no step was taken, the model is as it was: 2 tried, and the last one skipped as the constraint 1e+06"
        in printed
    )
    assert not (tmp_path / "new").exists()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_long_record_is_cut_and_counted(trained, tmp_path, capsys):
    data = tmp_path / "data.jsonl"
    rows = [{"text": "short enough"}, {"text": "word " * 200}, {"text": "also short"}]
    data.write_text("\n".join(map(json.dumps, rows)))
    assert run("unlearn", "--model", trained, "--data", data, "--forget_rows", "0", "--constraint_mode", "relative",
               "--stopping", "off", *FEW, "--output_dir", tmp_path / "out") == 0  # fmt: skip
    assert "1 of 2 records of" in capsys.readouterr().out
    record = json.loads((tmp_path / "out/record.json").read_text())
    assert [record[f"{name}_set"]["cut"] for name in ("forget", "retain")] == [0, 1]
    assert "longer than what the model was given" not in (tmp_path / "out/record.md").read_text()
    assert run("unlearn", "--model", trained, "--data", data, "--forget_rows", "1", "--constraint_mode", "relative",
               "--stopping", "off", *FEW, "--output_dir", tmp_path / "cut") == 0  # fmt: skip
    record = json.loads((tmp_path / "cut/record.json").read_text())
    assert record["forget_set"]["cut"] == 1
    assert (
        "1 of the 1 records to be forgotten are longer than what the model was given; their ends were"
        in ((tmp_path / "cut/record.md").read_text())
    )


@pytest.mark.parametrize("targets", ["q_proj,embed_tokens", "q_proj,lm_head", "all-linear"])
def test_an_adapter_may_be_on_the_embeddings_the_head_or_all_layers(
    targets, trained, tmp_path, capsys
):
    lora = [*LORA, "--lora_targets", targets]
    assert (
        run(
            "unlearn",
            *FORGET,
            "--model",
            trained,
            *lora,
            *FEW,
            "--merge",
            "--output_dir",
            tmp_path / "lora",
        )
        == 0
    )
    assert run("unlearn", *FORGET, "--model", trained, *lora, *FEW, "--dry_run") == 0
    assert run("verify", tmp_path / "lora") == 0, capsys.readouterr()
    again = [
        "--model",
        tmp_path / "lora/model",
        *LORA[3:],
        *FEW,
        "--output_dir",
        tmp_path / "again",
    ]
    assert run("unlearn", *FORGET, *again) == 0, capsys.readouterr().err
