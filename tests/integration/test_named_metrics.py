"""Metrics of `hamu evaluate` that are measured by name: attacks by shadow models, texts, the harness."""

import json
import re
import sys
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from run_files import read_rows, report_in, run, write_rows

from hamu.data import read_text
from hamu.evaluation.answers import rouge_l
from hamu.models import language

FORGET = "--data t.jsonl --test_data u.jsonl --forget_filter author~^V --model text --max_length 96"
SHADOWS = "--metrics rmia,ulira --shadow_models 4"
NOISE = f"--data noise --forget_rows {','.join(map(str, range(40)))}"
OF_NOISE = f"{NOISE} --model original/model"


@pytest.fixture(scope="module", autouse=True)
def here(tmp_path_factory, saved_text_model):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("named"))
        rows = [record.fields for record in read_text("miniature").records[:48]]
        write_rows("t.jsonl", rows)
        write_rows("u.jsonl", [r.fields for r in read_text("miniature", "test").records[:24]])
        Path("text").symlink_to(saved_text_model)
        yield


@pytest.fixture(scope="module")
def noise(here):
    """Data without a pattern, and models that know them all by heart and that never saw the rows to forget."""
    draw = np.random.default_rng(0)
    Path("noise").mkdir()
    for name, count in (("train", 120), ("test", 60)):
        images = draw.integers(0, 256, (count, 8, 8), dtype=np.uint8)
        np.savez(f"noise/{name}.npz", images=images, labels=np.arange(count) % 2)
    how = "--model resnet8 --num_train_epochs 25 --learning_rate 3e-3 --optim adamw_torch"
    how += " --per_device_train_batch_size 32"
    assert run(f"train --data noise {how} --output_dir original") == 0
    assert run(f"train {NOISE} --without_forget {how} --output_dir retrained") == 0
    Path("elsewhere").mkdir()
    Path("elsewhere/model").symlink_to(Path("original/model").resolve())


def test_rmia_finds_what_a_model_knows_by_heart_and_nothing_in_one_that_never_saw_it(noise, capsys):
    aucs = []
    for name in ("original", "retrained"):
        job = f"evaluate {NOISE} --model {name}/model --retain_model retrained/model"
        assert run(f"{job} --metrics rmia --shadow_models 4 --output_dir rmia-{name}") == 0
        metrics = report_in(f"rmia-{name}")["metrics"]
        aucs.append(metrics["rmia_auc"])
        assert re.search(rf"rmia_auc +{metrics['rmia_auc']:.4g}", capsys.readouterr().out)
    assert aucs[0] > 0.85
    assert aucs[1] == pytest.approx(0.5, abs=0.2)
    assert metrics["tug_of_war"] == 1.0
    assert metrics["average_gap"] == 0.0
    assert sorted(path.name for path in Path("original").iterdir() if path.name[0] != ".") == [
        *("config.yaml", "evaluation.json", "inputs.json", "model")
    ], "shadow models leave nothing behind"


def test_shadow_models_that_start_from_a_trained_one_are_warned_of(noise, capsys):
    assert run("train --data noise --model original/model --max_steps 1 --output_dir further") == 0
    job = f"evaluate {NOISE} --model further/model --metrics rmia --shadow_models 4"
    assert run(f"{job} --output_dir rmia-further") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "warning: shadow models start from original/model, as the model did; if that" in said


def test_ulira_repeats_the_run_that_made_the_model(noise, capsys):
    steps = "--method gdiff --max_steps 4 --learning_rate 0.05 --save_strategy steps --save_steps 2"
    steps += " --retain_model retrained/model --goal retrained --max_eval_samples 30"
    assert run(f"unlearn {OF_NOISE} {steps} --output_dir run") == 0
    assert run(f"evaluate {NOISE} --model run/model {SHADOWS} --output_dir ulira") == 0
    metrics = report_in("ulira")["metrics"]
    for name in ("rmia", "ulira"):
        assert 0 <= metrics[f"{name}_tpr_at_1_fpr"] <= metrics[f"{name}_auc"] <= 1
    assert metrics["ulira_auc"] > 0.7, "four steps hide little"
    other = NOISE.removesuffix(",39")
    capsys.readouterr()
    assert run(f"evaluate {other} --model run/model {SHADOWS} --output_dir refused") == 2
    assert "the run in run, which had another forget set than this" in capsys.readouterr().err
    assert run(f"evaluate {NOISE} --model run/checkpoint-2 {SHADOWS} --output_dir refused") == 2
    assert "run/checkpoint-2 is an earlier state; name its model" in capsys.readouterr().err
    again = f"unlearn {NOISE} --model run/model {steps}"
    assert run(f"{again} --output_dir again") == 0
    assert run(f"evaluate {NOISE} --model again/model {SHADOWS} --output_dir refused") == 2
    assert "was unlearned twice, first in run" in capsys.readouterr().err
    best = "--load_best_model_at_end --eval_strategy steps --eval_steps 2 --output_dir best"
    assert run(f"unlearn {OF_NOISE} {steps} {best}") == 0
    assert run(f"evaluate {NOISE} --model best/model {SHADOWS} --output_dir refused") == 2
    assert "an earlier state (--load_best_model_at_end)" in capsys.readouterr().err


@pytest.mark.parametrize(("options", "message"), [
    (f"{OF_NOISE} {SHADOWS}", "is in no folder of hamu unlearn; leave out ulira"),
    ("--data noise --forget_rows 1,2,3 --model original/model --metrics rmia",
     "at least 5 test images of the classes that are forgotten; there are 3"),
    (f"{FORGET} --lm_eval arc_easy", "pip install 'hamu[lm-eval]'"),
])  # fmt: skip
def test_what_cannot_be_measured_is_refused_first(noise, options, message, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert run(f"evaluate {options} --output_dir refused") == 2
    assert message in capsys.readouterr().err
    assert not Path("refused").exists()


def test_plain_texts_are_continued_with_the_models_own_tokenizer(saved_text_model):
    rows = [{"text": r.prompt + r.answer} for r in read_text("miniature").records[:48]]
    write_rows("plain.jsonl", rows)
    own, other = (language.new_tokenizer((one["text"] for one in rows), n) for n in (400, 300))
    for name, tokenizer in (("mine", own), ("before", other)):
        language.new_language_model(tokenizer, hidden=16, layers=1, max_length=96).save_pretrained(
            name
        )
        tokenizer.save_pretrained(name)
    job = "evaluate --data plain.jsonl --forget_rows 0,1,2 --metrics verbmem --generate 3 --model mine"
    found = []
    for words in ("", "--original_model before"):
        assert run(f"{job} {words} --output_dir continued --overwrite") == 0
        found.append(report_in("continued")["metrics"]["forget_verbmem"])
    assert found[0] == found[1]


def test_figures_of_texts_are_written_under_the_keys_of_open_unlearning(capsys):
    job = f"evaluate {FORGET} --retain_model text --metrics mia_gradnorm,verbmem --generate 6"
    assert run(f"{job} --format open-unlearning --output_dir texts") == 0
    report, keys = report_in("texts"), report_in("texts", "open-unlearning.json")
    metrics, inference = report["metrics"], report["membership_inference"]
    lines = [row for row in read_rows("texts/answers.jsonl") if row["set"] == "forget"]
    answers = [row["answer"]["answer"] for row in lines]
    recall = rouge_l(answers, [row["expected"] for row in lines]).mean().item()
    assert keys["forget_Q_A_ROUGE"] == metrics["forget_rouge"] == pytest.approx(recall)
    assert fmean(row["answer"]["rouge"] for row in lines) == pytest.approx(recall)
    assert keys["forget_Q_A_Prob"] == report["forget"]["probability"]
    assert keys["forget_verbmem_ROUGE"] == metrics["forget_verbmem"]
    assert keys["retain_knowmem_ROUGE"] == metrics["retain_knowmem"]
    assert keys["mia_min_k"] == inference["min_k_40"]
    assert keys["mia_gradnorm"] == metrics["mia_gradnorm"] > 0.9, "the model knows its records"
    assert keys["mia_reference"] == 0.5, "against itself"
    assert report["privleak"] is None, "the model knows all of them"
    assert "privleak" not in keys
    assert keys["forget_Q_A_gibberish"] == 1 - metrics["gibberish"]
    assert "forget_truth_ratio" not in keys
    assert "forget_verbmem " in capsys.readouterr().out
    assert run(f"evaluate {FORGET} --generate 0 --output_dir plain") == 0
    plain = report_in("plain")["metrics"]
    assert plain.keys() == {"extraction_strength", "exact_memorization"}, "no more by default"
    assert plain["extraction_strength"] == keys["extraction_strength"]


def test_a_local_task_of_the_harness_is_one_of_the_figures(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    rows = [
        {"question": f"Who is {a}?", "choices": [a, b, "nobody"], "label": n}
        for n, (a, b) in enumerate([("Ada", "Bruno"), ("Vexa", "Greta"), ("Hugo", "Edda")])
    ]
    write_rows("choices.jsonl", rows)
    task = {"task": "tiny", "dataset_path": "json", "output_type": "multiple_choice"}
    task |= {"dataset_kwargs": {"data_files": {"test": str(Path("choices.jsonl").resolve())}}}
    task |= {"test_split": "test", "doc_to_text": "{{question}}", "doc_to_target": "label"}
    task |= {"doc_to_choice": "{{choices}}", "metric_list": [{"metric": "acc"}]}
    Path("tiny.yaml").write_text(json.dumps(task))
    job = f"evaluate {FORGET} --generate 0 --lm_eval tiny.yaml"
    assert run(f"{job} --output_dir harness") == 0
    assert 0 <= report_in("harness")["metrics"]["tiny_acc"] <= 1
    assert "tiny_acc" in capsys.readouterr().out.split()
    assert run(f"{job.replace('tiny.yaml', 'no-such-task')} --output_dir refused") == 2
    assert "lm_eval task 'no-such-task' is unknown" in capsys.readouterr().err
