"""Count the records that the plain command forgets, and the price.

    python -m experiments forgotten digits [cifar] [tofu] --cifar_dir CIFAR10 --tofu_dir TOFU

Each problem: an original model, a model retrained without the forget set, and `hamu unlearn` with no settings but the
data, the model and what to forget. Adds to docs/results/forgotten.json and writes the table of forgotten.md.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from experiments.problems import Problem, original, problems, retrained, run, slug
from hamu.cli import main as hamu
from hamu.evaluation.membership import auc_of


def measured(problem: Problem, work: Path, compare: bool) -> dict[str, Any]:
    """One row of the table; compared with a retrained model or not."""
    model = original(problem, work)
    retain_model = retrained(problem, work) if compare else None
    what = (*problem.data, *problem.forget)
    folder = work / slug(problem.name)
    began = time.monotonic()
    beside = () if retain_model is None else ("--retain_model", retain_model)
    place = ("--output_dir", str(folder), "--overwrite")
    ended = hamu(["unlearn", *what, *problem.extra, "--model", model, *beside, *place])
    seconds = time.monotonic() - began
    before = evaluated(what, model, model, work / f"{slug(problem.name)}-before")
    of_retrained = None
    if retain_model is not None:
        checked = work / f"{slug(problem.name)}-retrained-check"
        of_retrained = evaluated(what, retain_model, model, checked)
    if ended:  # reached at the start: there is no new model
        standing = before["goal"]["after"]
        if standing["forgotten"] < 0.95 * standing["records"]:
            raise SystemExit(f"hamu unlearn for {problem.name} ended with exit code {ended}")
        found: dict[str, Any] = {"steps_taken": 0, "controller": [None]}
        found["ended"], after, goal = "reached at the start", before, None
    else:
        found = json.loads((folder / "evaluation.json").read_text())
        after, goal = found["after"], found["goal"]
    goal = goal or before["goal"] | {"before": before["goal"]["after"]}
    return {
        "goal": goal["kind"],
        "records": goal["after"]["records"],
        "before": goal["before"]["forgotten"],
        "after": goal["after"]["forgotten"],
        "retrained": of_retrained and of_retrained["goal"]["after"]["forgotten"],
        "loss_quantiles": goal["after"]["loss_quantiles"],
        "retain": after["retain"]["loss"] - before["retain"]["loss"],
        "test": after["test"]["accuracy"] - before["test"]["accuracy"],
        "test_without_class": _difference(after, before, "test_without_class"),
        "auc": auc_of(after),
        "auc_before": auc_of(before),
        "auc_retrained": of_retrained and auc_of(of_retrained),
        "steps": found["steps_taken"],
        "measurements": len(found["controller"]),
        "seconds": round(seconds, 1),
        "ended": found["ended"],
    }


def evaluated(
    what: tuple[str, ...], model: str, original_model: str, folder: Path
) -> dict[str, Any]:
    """The figures of a saved model, its records counted against the original's losses on unseen data."""
    text = ("--generate", "0") if "--max_length" in what else ()
    run("evaluate", *what, *text, "--model", model, "--original_model", original_model, "--output_dir", str(folder),
        "--overwrite")  # fmt: skip
    found: dict[str, Any] = json.loads((folder / "evaluation.json").read_text())
    return found


def _difference(after: Any, before: Any, name: str) -> float | None:
    return after[name]["accuracy"] - before[name]["accuracy"] if name in after else None


def table(rows: dict[str, Any]) -> str:
    """The rows as Markdown, without blanks between cells."""
    heads = ["problem", "goal", "forgotten before", "after", "retrained", "retain loss", "test accuracy", "AUC before", "after",
             "retrained", "steps"]  # fmt: skip
    lines = [f"|{'|'.join(heads)}|", "|---" * len(heads) + "|"]
    for name, row in rows.items():
        test = row["test"] if row["test_without_class"] is None else row["test_without_class"]
        auc = [
            "-" if row[k] is None else f"{row[k]:.3f}"
            for k in ("auc_before", "auc", "auc_retrained")
        ]
        retrained = "-" if row["retrained"] is None else row["retrained"]
        cells = [name, row["goal"], f"{row['before']} of {row['records']}", row["after"], retrained, f"{row['retain']:+.4f}",
                 f"{100 * test:+.1f}", *auc, row["steps"]]  # fmt: skip
        lines.append(f"|{'|'.join(map(str, cells))}|")
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> None:
    """Run the problems of the data sets that are named, those without a result first."""
    parser = argparse.ArgumentParser(prog="experiments forgotten", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("data", nargs="+", choices=("digits", "cifar", "tofu"))
    parser.add_argument("--only", default="", help="problems with this in their names")
    parser.add_argument(
        "--cifar_dir", help="folder with train.parquet and test.parquet of CIFAR-10"
    )
    parser.add_argument("--tofu_dir", help="folder with full.json, forget10.json, ... of TOFU")
    parser.add_argument("--without_retrained", action="store_true", help="train no retain models")
    parser.add_argument("--work_dir", default="runs/experiments", help="where models and runs go")
    parser.add_argument("--output", default="docs/results/forgotten.json")
    options = parser.parse_args(argv)
    path, work = Path(options.output), Path(options.work_dir)
    rows: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for problem in problems(work, options.data, options.cifar_dir, options.tofu_dir):
        if problem.name not in rows and options.only in problem.name:
            rows[problem.name] = measured(problem, work, not options.without_retrained)
            path.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    print(table(rows))
