"""TOFU on a tiny Llama: forget10 by ten methods from the same start, after the paper's Table 3, and its hardness.

    D=TOFU
    hamu train --recipe tofu-tiny --data_dir $D --output_dir runs/tofu-original
    hamu train --recipe tofu-tiny --data_dir $D --without_forget --output_dir runs/tofu-retain
    python examples/tofu_tiny.py --data_dir $D --original runs/tofu-original/model --retain runs/tofu-retain/model

Each method's figures are kept in runs/tofu-tiny/METHOD.json and not computed twice; several processes may share the
work (--methods). At the end docs/results/tofu-tiny.json and the tables in docs/results/tofu-tiny-tables.md are written.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed

from hamu.assess import measure_hardness
from hamu.data import (
    TextData,
    TextRecords,
    UnlearningData,
    collate,
    encode,
    forget_data,
    read_text,
)
from hamu.evaluation import (
    forget_quality,
    predict_tokens,
    privleak,
    text_report,
    tofu_report,
)
from hamu.models.language import load_language_model, load_tokenizer
from hamu.unlearning.trainer import UnlearnConfig
from hamu.unlearning.trainer.trainer import quiet_trainer

METHODS = ("hamu-q", "hamu-u", "ft", "ga", "gdiff", "kl", "scrub", "gru", "pcgrad", "npo")
MAX_LENGTH = 256
SETTINGS: dict[str, Any] = {
    "optim": "adamw_torch",
    "per_device_train_batch_size": 48,
    "constraint": 0.5,
    "constraint_mode": "relative",
    "stopping": "off",
    "bf16": True,
    "eval_strategy": "no",
    "eval_on_start": False,
    "save_strategy": "no",
    "logging_steps": 5,
    "check_steps": 0,
    "seed": 42,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data_dir", required=True, type=Path)
    parser.add_argument("--original", required=True)
    parser.add_argument("--retain", required=True)
    parser.add_argument("--methods", nargs="*", default=METHODS)
    parser.add_argument("--learning_rate", type=float, default=3e-5)
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--generate", type=int, default=100, help="answers generated for each set")
    parser.add_argument("--work", type=Path, default=Path("runs/tofu-tiny"))
    parser.add_argument("--output", type=Path, default=Path("docs/results"))
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    for name in options.methods:
        path = options.work / f"{name}.json"
        if not path.exists():
            path.write_text(json.dumps(unlearned(name, options), indent=1))
    done = {name: options.work / f"{name}.json" for name in ("before", "retrained", *METHODS)}
    if all(path.exists() for path in done.values()):
        write(done, options)


def unlearned(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One method's figures; "before" and "retrained" are the models that were trained, "hardness" is κ."""
    if name == "hardness":
        return hardness(options)
    source = options.retain if name == "retrained" else options.original
    tokenizer = load_tokenizer(source)
    model = load_language_model(source)
    problem = encoded(problem_of(options), tokenizer)
    found: dict[str, Any] = {}
    if name not in ("before", "retrained"):
        set_seed(SETTINGS["seed"])
        args = UnlearnConfig(
            output_dir=str(options.work),
            method=name,
            learning_rate=options.learning_rate,
            num_train_epochs=options.epochs,
            **SETTINGS,
        )
        begin = time.perf_counter()
        trainer = quiet_trainer(model, problem, args, [])
        trainer.train()
        found = {
            "seconds": round(time.perf_counter() - begin),
            "steps": trainer.steps_taken,
            "ended": trainer.stop_reason or "all its steps are done",
            "log": [entry for entry in trainer.state.log_history if "taken" in entry],
        }
    predictions = {key: predict_tokens(model, data, 64) for key, data in problem.sets().items()}
    texts = {
        key: [r.answer.strip() for r in data.texts.records] for key, data in problem.sets().items()
    }
    report = text_report(predictions, texts=texts)
    report["tofu"] = tofu_report(
        model, tokenizer, tofu_sets(options), 64, MAX_LENGTH, options.generate
    )
    print(
        f"{name}: forget {report['forget']['loss']:.4f}, retain {report['retain']['loss']:.4f}",
        flush=True,
    )
    return {"report": report} | found


def hardness(options: argparse.Namespace) -> dict[str, Any]:
    """κ of forget10 against the retain data, and with paraphrases of forget10 added to these (a stand-in)."""
    tokenizer = load_tokenizer(options.original)
    model = load_language_model(options.original)
    plain = problem_of(options)
    paraphrases = read_text(str(options.data_dir / "forget10_perturbed.json")).answering(
        "paraphrased_answer"
    )
    similar = replace(plain, retain=joined(plain.retain, paraphrases))
    found = {}
    for setting, problem in (("dissimilar", plain), ("similar (stand-in)", similar)):
        tokens = encoded(problem, tokenizer)
        found[setting] = asdict(
            measure_hardness(model, tokens.retain, tokens.forget, collate=collate, batch_size=48)
        )
    return found


def problem_of(options: argparse.Namespace) -> UnlearningData[TextRecords]:
    train, forget, holdout = (
        read_text(str(options.data_dir / f"{name}.json"))
        for name in ("full", "forget10", "holdout10")
    )
    return forget_data(train, holdout, forget)


def encoded(problem: UnlearningData[TextRecords], tokenizer: Any) -> UnlearningData[TextData]:
    sets = {name: encode(data, tokenizer, MAX_LENGTH) for name, data in problem.sets().items()}
    return UnlearningData(**{**vars(problem), **sets})


def joined(first: TextRecords, second: TextRecords) -> TextRecords:
    return replace(
        first, records=first.records + second.records, rows=torch.cat([first.rows, second.rows])
    )


def tofu_sets(options: argparse.Namespace) -> dict[str, TextRecords]:
    files = {"forget": "forget10"} | {n: n for n in ("retain", "real_authors", "world_facts")}
    place = options.data_dir
    return {n: read_text(str(place / f"{file}_perturbed.json")) for n, file in files.items()}


def write(done: dict[str, Path], options: argparse.Namespace) -> None:
    """The committed figures and tables."""
    results = {name: json.loads(path.read_text()) for name, path in done.items()}
    before, retrained = results["before"]["report"], results["retrained"]["report"]
    rows = {}
    for name, result in results.items():
        report, tofu = result["report"], result["report"]["tofu"]
        inference = report["membership_inference"]["min_k"]
        rows[name] = {
            "retain_gain": before["retain"]["loss"] - report["retain"]["loss"],
            "forget_gain": report["forget"]["loss"] - before["forget"]["loss"],
            "retain_accuracy": report["retain"]["accuracy"],
            "forget_accuracy": report["forget"]["accuracy"],
            "model_utility_probability": tofu["model_utility_probability"],
            "min_k_auc": inference,
            "privleak": privleak(1 - inference, 1 - retrained["membership_inference"]["min_k"]),
            "model_utility": tofu["model_utility"],
            "forget_rouge": tofu["forget"]["rouge"],
            "forget_quality": forget_quality(
                tofu["forget"]["truth_ratios"], retrained["tofu"]["forget"]["truth_ratios"]
            ),
            "steps": result.get("steps"),
            "seconds": result.get("seconds"),
        }
    hardness_path = options.work / "hardness.json"
    content = {
        "settings": SETTINGS
        | {"learning_rate": options.learning_rate, "num_train_epochs": options.epochs},
        "losses": {
            n: {s: results[n]["report"][s]["loss"] for s in ("retain", "forget", "test")}
            for n in results
        },
        "rows": rows,
        "kappa": {
            n: [(e["step"], round(e["kappa"], 4)) for e in r["log"][::5] if "kappa" in e]
            for n, r in results.items()
            if "log" in r
        },
        "hardness": json.loads(hardness_path.read_text()) if hardness_path.exists() else None,
    }
    (options.output / "tofu-tiny.json").write_text(json.dumps(content, indent=2) + "\n")
    lines = [
        "| method | -ΔL_r ↑ | ΔL_f ↑ | retain acc ↑ | forget acc ↓ | model utility (prob.) ↑ | MIA (Min-K%) → 0.5 | "
        "PrivLeak → 0 | model utility ↑ | forget ROUGE-L | forget quality (p) ↑ |",
        "|---|" + "---|" * 10,
    ]
    for name, row in rows.items():
        lines.append(
            f"| {name} | {row['retain_gain']:+.3f} | {row['forget_gain']:+.3f} | {row['retain_accuracy']:.3f} | "
            f"{row['forget_accuracy']:.3f} | {row['model_utility_probability']:.3f} | {row['min_k_auc']:.3f} | "
            f"{row['privleak']:+.3f} | {row['model_utility']:.3f} | {row['forget_rouge']:.3f} | "
            f"{row['forget_quality']:.2g} |"
        )
    (options.output / "tofu-tiny-tables.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
