"""The commands on text, from nothing: train, unlearn and evaluate offline."""

import gc
import re
import shutil
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from run_files import read, read_rows, report_in, run, write_rows
from safetensors.torch import load_file

from hamu.data import read_text
from hamu.evaluation import membership
from hamu.evaluation.membership import attacker_words
from hamu.models.language import load_language_model, new_tokenizer
from hamu.report.run import read_run
from hamu.unlearning.jobs import tasks

FEW = (
    "--max_steps 4 --per_device_train_batch_size 8 --per_device_eval_batch_size 32 --max_length 96"
)
TEXTS = "--data train.jsonl --test_data test.jsonl"
FORGET = f"{TEXTS} --forget_filter author~^V"
EASY = "--constraint_mode relative --stopping off"
STRONG = f"--learning_rate 0.5 {EASY}"
LORA = f"--lora --lora_rank 2 {STRONG}"
TRAINED = "original/model"


@pytest.fixture(scope="module", autouse=True)
def here(tmp_path_factory, saved_text_model):
    """Working folder with authors of miniature, one of whom is to be forgotten, and a model."""
    rows = [record.fields for record in read_text("miniature").records]
    names = sorted({row["author"] for row in rows}, key=lambda name: (name[0] != "V", name))
    chosen = [names[0], *[name for name in names if name[0] != "V"][:7]]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("text"))
        write_rows("train.jsonl", [row for row in rows if row["author"] in chosen])
        write_rows("test.jsonl", [r.fields for r in read_text("miniature", "test").records[:24]])
        shutil.copytree(saved_text_model, TRAINED)
        yield


@pytest.fixture(scope="module")
def adapter(here):
    job = f"unlearn {FORGET} --model {TRAINED} {LORA} {FEW} --merge --gradient_checkpointing"
    assert run(f"{job} --model_dtype float32 --output_dir lora") == 0
    return Path("lora")


def test_the_figures_of_tofu_are_measured_where_their_data_are_given(capsys, monkeypatch):
    every = read_rows("train.jsonl")
    ours = [row for row in every if row["author"][0] == "V"]
    kept = [row for row in every if row["author"][0] != "V"]
    rows = {"forget_perturbed": ours + kept[:2], "retain_perturbed": kept[:8]}
    flags = ""
    for name in ("forget_perturbed", "retain_perturbed", "real_authors", "world_facts"):
        keys = ["question", "answer", "perturbed_answer"]
        keys += ["paraphrased_answer"] if "perturbed" in name else []
        write_rows(f"{name}.jsonl", [{k: row[k] for k in keys} for row in rows.get(name, kept[:8])])
        flags += f" --{name} {name}.jsonl"
    loaded = []

    def load(source, **settings):
        gc.collect()
        assert not any(model() is not None for model in loaded), "two models at once"
        model = load_language_model(source, **settings)
        loaded.append(weakref.ref(model))
        return model

    monkeypatch.setattr(tasks.language, "load_language_model", load)
    models = f"--model {TRAINED} --retain_model {TRAINED}"
    settings = "--generate 2 --max_length 96 --output_dir tofu"
    assert run(f"evaluate {FORGET} {models} {flags} {settings}") == 0
    assert len(loaded) == 2, "each model is loaded once"
    report = report_in("tofu")
    tofu = report["tofu"]
    assert tofu["forget_quality"] == 1.0, "the model against itself"
    assert tofu["privleak"] == report["privleak"] == 0.0
    assert 0 <= tofu["model_utility"] <= 1
    for name in ("forget", "retain", "real_authors", "world_facts"):
        records = len(ours) if name == "forget" else 8
        assert (tofu[name]["records"], tofu[name]["generated"]) == (records, 2)
    out = capsys.readouterr().out
    assert "forget quality" in out
    away = f"2 of {len(ours) + 2} answers of forget_perturbed.jsonl are not in the forget set; they"
    assert away in " ".join(out.split())
    assert "retain set" not in out
    wrong = "--forget_perturbed retain_perturbed.jsonl --retain_perturbed forget_perturbed.jsonl"
    small = "--generate 0 --max_length 96 --output_dir wrong"
    monkeypatch.setattr(membership, "_TELLING", 0.0)
    monkeypatch.setattr(membership, "_ENOUGH", 1)
    assert run(f"evaluate {FORGET} --model {TRAINED} {wrong} {small}") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "8 of 8 answers of retain_perturbed.jsonl are not in the forget set; all the same" in said
    )
    away = f"{len(ours)} of {len(ours) + 2} answers of forget_perturbed.jsonl are not in the retain"
    assert away in said
    assert report_in("wrong")["tofu"]["retain"]["records"] == 2
    attacker = attacker_words(report_in("wrong"))
    assert attacker.startswith("an attacker tells the forget records from unseen ones (by ")
    assert attacker in said
    assert "an attacker" not in out, "where no figure is so high"


def test_privleak_needs_no_data_of_tofu_but_some_that_was_never_trained_on(adapter, capsys):
    job = f"--forget_filter author~^V --retain_model {TRAINED} --max_length 96 --generate 0"
    assert run(f"evaluate {TEXTS} {job} --model {adapter}/model --output_dir leak") == 0
    report = report_in("leak")
    ours, theirs = (
        1 - one["membership_inference"]["min_k_40"] for one in (report, report["retain_model"])
    )
    assert report["privleak"] == pytest.approx((ours - theirs) / theirs)
    assert "tofu" not in report
    assert re.search(rf"PrivLeak +{report['privleak']:.4g}", capsys.readouterr().out)
    assert run(f"evaluate --data train.jsonl {job} --model {TRAINED} --output_dir unknown") == 0
    assert report_in("unknown")["privleak"] is None


def test_known_test_records_count_nowhere_and_the_retain_model_may_have_another_tokenizer(capsys):
    shutil.copytree(TRAINED, "retained")
    answers = [row["answer"] for row in read_rows("test.jsonl")]
    new_tokenizer(answers, 300).save_pretrained("retained")
    write_rows("mixed.jsonl", read_rows("train.jsonl")[:3] + read_rows("test.jsonl"))
    forget = "--data train.jsonl --test_data mixed.jsonl --forget_filter author~^V"
    models = f"--model {TRAINED} --retain_model retained"
    assert run(f"unlearn {forget} {models} {FEW} {STRONG} --output_dir mixed") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "3 test records are among those to retain or to forget and are left out" in out
    said = "the retain model splits the forget records into other tokens"
    assert out.count(f"warning: {said}") == 1
    assert "mia_reference" not in report_in("mixed")["after"]["metrics"]
    record = report_in("mixed", "record.json")
    assert record["test_set"]["records"] == 24
    assert report_in("mixed")["after"]["test"]["records"] == 24
    own = "The tokenizer is that of the model before"
    assert any(one.startswith(own) for one in record["statement"])
    assert record["figures"]["after"]["against_retain_model"] is None
    assert run("verify mixed") == 0
    models = "--model mixed/model --original_model original/model --retain_model retained"
    job = f"attack {forget} {models} --max_length 96 --attacks relearn-retain --output_dir no"
    assert run(job) == 2, "whose verdict compares these losses"
    assert f"{said} than the unlearned one" in capsys.readouterr().err
    assert not Path("no").exists()
    job = f"{forget} --model mixed/model --max_length 96 --generate 0"
    assert run(f"evaluate {job} --output_dir mixed-check") == 0
    assert report_in("mixed-check")["test"]["records"] == 24


def test_the_record_counts_copies_of_forgotten_records_that_stay(capsys):
    rows = read_rows("train.jsonl")
    loud = rows[0] | {"answer": rows[0]["answer"].upper()}
    write_rows("copied.jsonl", [*rows, rows[0], rows[0], loud])
    job = f"unlearn --data copied.jsonl --forget_rows 0,1 --model {TRAINED} {FEW}"
    assert run(f"{job} --method ga --max_steps 1 --output_dir copied") == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "warning: 2 records to retain equal some to forget; --forget_data takes out" in told
    assert "warning: 1 records to retain equal some to forget but for case or punctuation" in told
    said = "2 named rows; equal records that stay in the retain set: 2"
    assert report_in("copied", "record.json")["forget_set"]["description"] == said
    assert said in Path("copied/record.md").read_text()


def test_an_adapter_is_unlearned_in_place_and_merged_where_it_is_and_nowhere_else(adapter):
    assert run(f"unlearn {FORGET} --model lora/model {STRONG} {FEW} --output_dir again") == 0
    before, after = (load_file(f"{f}/model/adapter_model.safetensors") for f in ("lora", "again"))
    assert set(before) == set(after)
    assert all(not torch.equal(before[name], after[name]) for name in before)
    merged = load_file(adapter / "merged/model.safetensors")
    for name, tensor in load_file(f"{TRAINED}/model.safetensors").items():
        adapted = "_proj" in name
        assert torch.equal(tensor, merged[name]) != adapted, name


def test_no_output_may_lie_where_any_model_is_read(adapter, capsys):
    job = f"unlearn {FORGET} --model lora/model"  # whose base model lies there
    assert run(f"{job} --output_dir original --overwrite") == 2
    assert "overlap" in capsys.readouterr().err
    assert Path(TRAINED, "model.safetensors").is_file()


@pytest.mark.parametrize("lora", ["", "--lora --lora_rank 2"])
def test_every_checkpoint_of_a_run_opens_as_a_model(tmp_path, lora):
    saves = f"{lora} {FEW} --save_strategy steps --save_steps 2 --output_dir {tmp_path}"
    new = TRAINED if lora else "tiny-llama"
    runs = {
        "train": f"train {TEXTS} --model {new} --tokenizer {TRAINED} {saves}/train",
        "unlearn": f"unlearn {FORGET} --model {TRAINED} {STRONG} {saves}/unlearn",
    }
    job = f"evaluate {FORGET} --generate 0 --max_length 96 --model {tmp_path}"
    for name, line in runs.items():
        assert run(line) == 0
        first, last, saved = (
            load_language_model(f"{tmp_path}/{name}/{model}").state_dict()
            for model in ("checkpoint-2", "checkpoint-4", "model")
        )
        assert saved.keys() == first.keys() == last.keys()
        assert all(torch.equal(last[key], saved[key]) for key in saved)
        assert not all(torch.equal(first[key], saved[key]) for key in saved)
        assert run(f"{job}/{name}/checkpoint-2 --output_dir {tmp_path}/{name}-checked") == 0
        ours, theirs = (read(f"{f}/tokenizer.json") for f in (f"{tmp_path}/{name}/model", TRAINED))
        assert ours["model"] == theirs["model"], "which a new model may share with the original"


@pytest.mark.parametrize("recipe", ["tofu-llama2-lora", "waterdrum-tofu-llama2-lora"])
def test_a_dry_run_of_the_papers_recipe_needs_neither_weights_nor_network(recipe, capsys):
    assert run(f"unlearn --recipe {recipe} --dry_run") == 0
    printed = capsys.readouterr().out
    assert "6,742,609,920" in printed, "6,738,415,616 parameters of Llama-2-7b and the adapter's"
    assert "4,194,304" in printed, "r = 8 on query and value projections of 32 layers"
    assert "720 (72 an epoch)" in printed, "App. F.3"


def test_records_are_forgotten_by_the_answers_of_a_column(capsys):
    rows = read_rows("train.jsonl")
    write_rows("more.jsonl", [row | {"instead": f"Unknown, {i}."} for i, row in enumerate(rows)])
    data = "--data more.jsonl --test_data test.jsonl --forget_filter author~^V"
    job = f"unlearn {data} --model {TRAINED} {STRONG} {FEW} --forget_objective dpo"
    assert run(f"{job} --alternative_column instead --output_dir by-column") == 0
    assert report_in("by-column")["steps_taken"] == 4
    own = job.replace("dpo", "npo")
    assert run(f"{own} --alternative_column instead --output_dir own") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "alternative_column instead is not read: no other answer is needed" in printed


def test_a_long_record_is_cut_and_counted_and_plain_text_gets_no_answers(capsys):
    texts = ("short enough", "word " * 200, "also short")
    write_rows("long.jsonl", [{"text": text} for text in texts])
    job = f"evaluate --data long.jsonl --forget_rows 0 --model {TRAINED} --output_dir plain"
    assert run(job) == 0
    assert "plain text has no prompt" in capsys.readouterr().out
    assert run(f"{job} --max_length 4096 --overwrite") == 0
    assert "are read; the model reads no more, so divide" in capsys.readouterr().out.replace(
        "\n", " "
    )
    for forget, cut, ends in ((0, [0, 1], False), (1, [1, 0], True)):
        job = f"--data long.jsonl --forget_rows {forget} --model {TRAINED} {EASY} {FEW}"
        assert run(f"unlearn {job} --output_dir cut-{forget}") == 0
        printed = " ".join(capsys.readouterr().out.split())
        assert f"1 of {1 if ends else 2} records of" in printed
        assert "are read; raise --max_length, or divide" in printed
        record = report_in(f"cut-{forget}", "record.json")
        assert [record[f"{name}_set"]["cut"] for name in ("forget", "retain")] == cut
        readable = [Path(f"cut-{forget}/{n}").read_text() for n in ("record.md", "model/README.md")]
        for said in (printed, *readable):
            assert ("their ends were neither unlearned nor measured" in said) == ends


def test_a_tokenizer_of_another_model_is_suspected(capsys):
    new_tokenizer(["Who wrote it? Nobody did."], 300).save_pretrained("other")
    job = f"unlearn {FORGET} --model {TRAINED} {FEW} {EASY}"
    fits = "of guessing: the model is of no use, or tokenizer, template or labels do not fit it"
    others = f"{FORGET} --model {TRAINED} --max_length 96"
    for asked, times in ((job, 2), (f"assess {others}", 1), (f"evaluate --generate 0 {others}", 1)):
        assert run(f"{asked} --tokenizer other --output_dir of-other --overwrite") in (0, 3, 4)
        assert capsys.readouterr().out.replace("\n", " ").count(fits) == times
    assert run(f"{job} --overwrite --output_dir of-other") == 0
    assert fits not in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.parametrize("how", [
    "--lora_targets q_proj,embed_tokens", "--lora_targets all-linear", "--load_in_4bit",
])  # fmt: skip
def test_an_adapter_may_be_on_any_layers_and_on_a_base_in_4_bits(
    how, tmp_path, capsys, monkeypatch
):
    if "4bit" in how:
        pytest.importorskip("bitsandbytes")
    job = f"unlearn {FORGET} --model {TRAINED} {LORA} {how} {FEW}"
    assert run(f"{job} --merge --output_dir {tmp_path}/lora") == 0
    assert run(f"{job} --dry_run") == 0
    assert run(f"verify {tmp_path}/lora") == 0, capsys.readouterr()
    said = "The figures are of the base model in 4 bits (NF4); in other precisions they differ."
    pages = ("record.md", "model/README.md", "merged/README.md")
    named = [said in (tmp_path / "lora" / page).read_text() for page in pages]
    assert named == ([True, True, False] if "4bit" in how else [False] * 3)  # merged: in float32
    adapter = load_file(tmp_path / "lora/model/adapter_model.safetensors")
    assert all(tensor.dtype == torch.float32 for tensor in adapter.values())
    assert all(tensor.any() for name, tensor in adapter.items() if "lora_B" in name)
    again = f"--model {tmp_path}/lora/model {STRONG} {FEW} --output_dir {tmp_path}/again"
    assert run(f"unlearn {FORGET} {again}") == 0, capsys.readouterr().err
    said = "/lora/model had its base in 4 bits; figures differ without --load_in_4bit"
    assert (said in capsys.readouterr().out.replace("\n", " ")) == ("4bit" in how)
    if "4bit" in how:
        attacked = f"attack {FORGET} --model {tmp_path}/lora/model --max_length 96 --attack_steps 1"
        for words, page in (("", False), ("--load_in_4bit --overwrite", True)):
            place = f"--output_dir {tmp_path}/lora/attack"
            assert run(f"{attacked} --attack_seeds 1 {words} {place}") == 0
            assert (read_run(tmp_path / "lora").attack is not None) == page
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=1, free=0))
    for merge, folders in (("", ["model"]), ("--merge", ["model", "merged"])):
        assert run(f"{job} {merge} --output_dir {tmp_path}/full") == 2
        found = re.search(r"has room for 0 GB, .* takes (\S+) GB", capsys.readouterr().err)
        files = [
            one for name in folders for one in (tmp_path / "lora" / name).glob("*.safetensors")
        ]
        size = sum(tensor.nbytes for one in files for tensor in load_file(one).values())
        assert 0.6 * size < float(found[1]) * 1e9 < 1.02 * size  # tied ends may come apart
    assert run(f"train {TEXTS} --model tiny-llama --output_dir {tmp_path}/full") == 2
    assert "has room for 0 GB" in capsys.readouterr().err
    assert not (tmp_path / "full").exists()


def test_a_model_that_was_unlearned_before_is_named_as_such(adapter, capsys, monkeypatch):
    """Else the records that it forgot are learned again without a word."""
    monkeypatch.setattr(membership, "_TELLING", 0.0)
    monkeypatch.setattr(membership, "_ENOUGH", 1)
    again = "was unlearned before: give what it forgot in the forget set again"
    for model, is_so in ((f"{adapter}/model", True), (f"{adapter}/merged", True), (TRAINED, False)):
        options = f"{FORGET} --model {model} {STRONG} {FEW} --overwrite"
        assert run(f"unlearn {options} --output_dir again") == 0
        out = " ".join(capsys.readouterr().out.split())
        assert (f"{model} {again}" in out) == is_so
        assert "records of a filter" in out
    attacker = attacker_words(report_in("again")["after"])
    assert attacker
    assert attacker in out


def test_answers_before_the_last_message_are_counted_where_they_count_for_nothing(capsys):
    turn = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Someone."}]
    write_rows("talks.jsonl", [{"messages": turn * (1 + n % 2)} for n in range(8)])
    model = load_language_model(TRAINED)
    tokenizer = new_tokenizer(["Who? Someone."], 300)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    model.save_pretrained("talking")
    tokenizer.save_pretrained("talking")
    job = f"--data talks.jsonl --forget_rows 0,1 --model talking {FEW} --max_steps 1"
    for loss_on, is_said in (("answer", True), ("all", False)):
        options = f"{job} --loss_on {loss_on} --output_dir talk-{loss_on}"
        assert run(f"unlearn {options} --learning_rate 1e-3 {EASY}") == 0
        said = "conversations of talks.jsonl answer before their last message, which alone counts"
        assert (said in " ".join(capsys.readouterr().out.split())) == is_said
