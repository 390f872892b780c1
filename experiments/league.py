"""The league: every method and forget objective at equal forgetting, with equal effort.

    python -m experiments league digits [cifar] [tofu] --cifar_dir CIFAR10 --tofu_dir TOFU [--repeat]

Each problem: an original model, a model retrained without the forget set, and `hamu compare --at` the retrained model's
forget loss: the same steps, batches, optimizer (AdamW) and number of trials for all, the best settings with three seeds,
then 20 steps of fine-tuning on retain data. Adds what docs/results/league.json lacks and prints the tables of league.md;
--repeat runs the best settings of entries that have fewer seeds with the others. All entries of a row start from one
model, by its digest; those of the known CIFAR-10 and TOFU rows are trained by one thread (OMP_NUM_THREADS=1, AVX-512).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf, isclose
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.forgotten import evaluated
from experiments.problems import Problem, cifar, digits, original, retrained, run, slug, tofu
from hamu.core.methods import method_classes
from hamu.evaluation.gains import Level
from hamu.files import file_digest
from hamu.unlearning.compare.runs import figures_at, relearned

ATTACK = ("--attacks", "relearn-retain", "--attack_steps", "20", "--attack_seeds", "1")
BY_HAND = "--constraint_mode relative --stopping off --on_infeasible clamp --optim adamw_torch --check_steps 0"
WITHOUT = ("ft",)  # forgets nothing
DEFAULT = "hamu unlearn"
LEVELS = (1.0, 2.0, 4.0, 8.0)  # forget losses, for one seed


@dataclass(frozen=True)
class Effort:
    """The effort of every method on a problem: steps, evaluations, the middle of the learning rates."""

    steps: int
    evaluated_every: int
    rate: float
    trials: int = 8
    seeds: tuple[int, ...] = (42, 43, 44)
    further: tuple[str, ...] = ()  # options

    def fixed(self) -> tuple[str, ...]:
        """Options of `hamu compare` that all runs share."""
        return (*BY_HAND.split(), "--max_steps", str(self.steps), "--eval_strategy", "steps",
                "--eval_steps", str(self.evaluated_every), *self.further)  # fmt: skip

    def tuned(self) -> tuple[str, ...]:
        """Options of `hamu compare` that choose the best settings of a method."""
        return (*self.fixed(), "--learning_rate", str(self.rate), "--trials", str(self.trials),
                "--seeds", *map(str, self.seeds))  # fmt: skip


EFFORT = {
    "digits": Effort(60, 2, 1e-4),
    "cifar-6-epochs": Effort(24, 6, 1e-4, further=("--bf16",)),
    "CIFAR-10, class airplane": Effort(
        24, 6, 1e-4, further=("--bf16", "--max_eval_samples", "2000")
    ),
    "CIFAR-10, 100 rows": Effort(24, 6, 1e-4, further=("--bf16", "--max_eval_samples", "2000")),
    "tofu-bf16": Effort(96, 12, 3e-4, further=("--bf16", "--max_eval_samples", "200")),
}
# Settings that got furthest with AdamW at a fourth of the rate, or at it, for runs of four times the steps.
LONGER = {
    "falcon mgda": ("--learning_rates", "0.00023", "0.00092"),
    "gdiff": ("--forget_weight", "0.0298", "--learning_rates", "0.00074"),
    "hamu-q": ("--constraint", "0.0301", "--learning_rates", "0.00074"),
}
# Forget objectives beside each method's own, those of texts alone, and the methods that raise them here.
OBJECTIVES = ("bounded", "npo", "simnpo", "wga", "satimp", "undial", "ce-u")
OF_TEXTS = ("dpo", "idk")
RAISING = ("hamu-q", "gdiff", "pcgrad")
# By seed in an entry, and their names in a comparison.
FIGURES = {
    "cost": "at_gain",
    "step": "at_step",
    "test_accuracy": "at_test_accuracy",
    "relearned": "relearned",
    "forget_loss": "forget_loss",
    "retain_loss": "retain_loss",
}
# Options by their name in an entry.
SETTINGS = {
    "constraint": "--constraint",
    "forget_weight": "--forget_weight",
    "learning_rate": "--learning_rates",
}


def measured(
    problem: Problem,
    work: Path,
    methods: list[str],
    objective: str | None,
    effort: Effort,
    jobs: int,
    *,
    with_default: bool,
) -> dict[str, Any]:
    """Methods with their own forget objectives, or with one for all, on a problem."""
    model, retain_model = original(problem, work), retrained(problem, work)
    what = (*problem.data, *problem.forget)
    checked = work / f"{slug(problem.name)}-retrained-check"
    if not (checked / "evaluation.json").exists():
        evaluated(what, retain_model, model, checked)
    level = json.loads((checked / "evaluation.json").read_text())["forget"]["loss"]
    attacked = work / f"{slug(problem.name)}-retrained-attack"
    if not (attacked / "attack.json").exists():
        place = ("--output_dir", str(attacked))
        run("attack", *what, *problem.extra, "--model", retain_model, *ATTACK, *place)
    folder = work / "-".join([slug(problem.name), "league", objective or "own", *methods])
    raised = () if objective is None else ("--forget_objective", objective)
    run("compare", *what, *problem.extra, "--model", model, "--methods", *methods, *raised, *effort.tuned(),
        "--at", f"forget={level:.4g}", *ATTACK, "--jobs", str(jobs), "--output_dir", str(folder))  # fmt: skip
    found = json.loads((folder / "comparison.json").read_text())
    own = json.loads((attacked / "attack.json").read_text())["outcomes"]["relearn-retain"]
    rows, levels = {name: _row(found, name) for name in methods}, by_level(folder, found, methods)
    if with_default:
        rows[DEFAULT] = by_default(problem, work, found["at"]["loss"], effort)
        levels[DEFAULT] = costs_by_level(
            [trajectory_of(default_run(problem, work, effort.seeds[0]))]
        )
    return {
        "level": found["at"]["loss"],
        "model": digest_of(model),
        "start": {side: _mean(found["start"][f"{side}_loss"]) for side in ("forget", "retain")},
        "retrained_relearned": _last(own["unlearned"]),
        "effort": vars(effort),
        "rows": rows,
        "levels": levels,
    }


def _mean(figure: Any) -> float:
    """A figure of all seeds; records are sampled by the seed."""
    return float(figure["mean"] if isinstance(figure, Mapping) else figure)


def digest_of(model: str) -> str:
    """The SHA-256 of a model's weights."""
    return file_digest(Path(model) / "model.safetensors")


def check_model(part: Mapping[str, Any], digest: str) -> None:
    """Refuse entries of another model beside a problem's known ones."""
    if (known := part.get("model")) not in (None, digest):
        raise SystemExit(
            f"the known entries began at the model {known[:12]}, this is {digest[:12]}; give its --work_dir, "
            f"or another --output"
        )


def added(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """A problem's figures with those of more entries, which must start from the same model."""
    check_model(old, new["model"])
    for side, loss in new["start"].items():
        if not isclose(loss, old["start"][side], rel_tol=1e-6):
            raise SystemExit(
                f"{side} loss {loss} at the start, the known entries began at {old['start'][side]}: "
                f"they had another model; give its --work_dir, or another --output"
            )
    return {**old, **{key: old[key] | new[key] for key in ("rows", "levels")}}


def repeat(
    problem: Problem, work: Path, part: dict[str, Any], objective: str | None, effort: Effort
) -> None:
    """Run the best settings of each entry with the seeds that it lacks, and add what they cost.

    An entry that misses the level with any seed counts as never there.
    """
    what, model = (*problem.data, *problem.forget, *problem.extra), original(problem, work)
    raised = () if objective is None else ("--forget_objective", objective)
    rows = part["rows"]
    check_model(part, digest_of(model))
    for method in [name for name, row in rows.items() if row is not None and DEFAULT not in name]:
        seeds = effort.seeds[len(rows[method]["cost"]) :]
        if not seeds:
            continue
        row, known = rows[method], [name for name in SETTINGS if name in rows[method]]
        settings = [word for name in known for word in (SETTINGS[name], str(row[name]))]
        folder = work / f"{slug(problem.name)}-league-{objective or 'own'}-{method}-repeated"
        run("compare", *what, "--model", model, "--methods", method, *raised, *settings, *effort.fixed(),
            "--seeds", *map(str, seeds), "--at", f"forget={part['level']:.4g}", *ATTACK, "--output_dir", str(folder))  # fmt: skip
        found = json.loads((folder / "comparison.json").read_text())
        found["best"] = [one["setting"] for one in found["runs"]]
        more = _row(found, method)
        rows[method] = more and row | {name: row[name] + more[name] for name in FIGURES}


def within(
    budget: float, problem: Problem, work: Path, part: dict[str, Any], effort: Effort
) -> None:
    """Add `hamu unlearn` with this budget to a problem's figures."""
    check_model(part, digest_of(original(problem, work)))
    entry, first = f"{DEFAULT} {budget:g}", default_run(problem, work, effort.seeds[0], budget)
    part["rows"][entry] = by_default(problem, work, part["level"], effort, budget)
    part["levels"][entry] = costs_by_level([trajectory_of(first)])


def longer(problem: Problem, work: Path, level: float, effort: Effort) -> None:
    """Compare rivals in as many steps as `hamu unlearn` takes at most; comparison.md has the costs."""
    what, model = (*problem.data, *problem.forget, *problem.extra), original(problem, work)
    for methods, settings in LONGER.items():
        folder = work / f"{slug(problem.name)}-league-longer-{methods.replace(' ', '-')}"
        run("compare", *what, "--model", model, "--methods", *methods.split(), *settings, *BY_HAND.split(), *effort.further,
            "--max_steps", str(4 * effort.steps), "--eval_strategy", "steps", "--eval_steps", str(effort.evaluated_every),
            "--seed", str(effort.seeds[0]), "--at", f"forget={level:.4g}", "--output_dir", str(folder))  # fmt: skip


def by_level(folder: Path, found: Mapping[str, Any], methods: list[str]) -> dict[str, Any]:
    """The least retain cost of any trial of each method, by forget loss; None if none gets there."""
    first, runs = min(row["seed"] for row in found["runs"]), dict[str, list[Any]]()
    for row in found["runs"]:
        if not row["failed"] and row["seed"] == first:
            runs.setdefault(row["method"], []).append(trajectory_of(folder / row["run"]))
    return {name: costs_by_level(runs.get(name, [])) for name in methods}


def costs_by_level(runs: list[list[dict[str, Any]]]) -> dict[str, float]:
    """The least retain cost of any of these trajectories, by forget loss."""
    costs: dict[str, float] = {}
    for loss in LEVELS:
        gains = [figures_at(entries, Level("forget", loss))["at_gain"] for entries in runs]
        if known := [-gain for gain in gains if gain is not None]:
            costs[str(loss)] = min(known)
    return costs


def trajectory_of(run: Path) -> list[dict[str, Any]]:
    """A run's evaluations; of a run by goal that misses it the last is an earlier state, left out."""
    found = json.loads((run / "evaluation.json").read_text())
    goal = found.get("goal") or {"budget": None}
    entries: list[dict[str, Any]] = found["trajectory"]
    return entries if goal["budget"] is None or goal["reached"] else entries[:-1]


def default_run(problem: Problem, work: Path, seed: int, budget: float | None = None) -> Path:
    """The folder of `hamu unlearn` by its defaults, but for a budget that is given."""
    of_it = "" if budget is None else f"-{budget:g}"
    return work / f"{slug(problem.name)}-league-default{of_it}-s{seed}"


def by_default(
    problem: Problem, work: Path, level: float, effort: Effort, budget: float | None = None
) -> dict[str, Any] | None:
    """`hamu unlearn` by goal, each record to the level, untuned, in up to four times as many steps.

    Its last model is attacked.
    """
    what, model = (*problem.data, *problem.forget, *problem.extra), original(problem, work)
    allowed = () if budget is None else ("--max_retain_increase", str(budget))
    rows = []
    for seed in effort.seeds:
        folder = default_run(problem, work, seed, budget)
        if not (folder / "attack/attack.json").exists():
            run("unlearn", *what, "--model", model, "--goal", "loss", "--target_forget_loss", f"{level:.4g}", "--seed", str(seed),
                "--max_steps", str(4 * effort.steps), "--eval_strategy", "steps", "--eval_steps", str(effort.evaluated_every),
                *effort.further, *allowed, "--output_dir", str(folder), "--overwrite")  # fmt: skip
            run("attack", *what, "--model", str(folder / "model"), *ATTACK, "--seed", str(seed), "--output_dir", str(folder / "attack"))  # fmt: skip
        found = json.loads((folder / "evaluation.json").read_text())
        row = figures_at(trajectory_of(folder), Level("forget", level))
        if row["at_gain"] is None:
            return None
        after = {f"{side}_loss": found["after"][side]["loss"] for side in ("forget", "retain")}
        rows.append(row | relearned(folder) | after)
    return _by_seed(rows)


def _last(outcome: Mapping[str, Any]) -> float:
    """The mean over seeds after the last step: share recognised, or the loss of texts."""
    figures = outcome["figures"]
    return fmean(figures.get("recognised", figures["loss"])[-1])


def _row(found: Mapping[str, Any], method: str) -> dict[str, Any] | None:
    """A method's best settings and what they cost, by seed; None if it never gets there."""
    rows = [
        row for row in found["runs"] if row["method"] == method and row["setting"] in found["best"]
    ]
    if not rows or any(row.get("at_gain") is None for row in rows):
        return None
    rows.sort(key=lambda row: row["seed"])
    return {name: rows[0][name] for name in SETTINGS if rows[0][name] is not None} | _by_seed(rows)


def _by_seed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures of rows that differ in the seed."""
    by_seed: dict[str, Any] = {
        name: [row.get(key) for row in rows] for name, key in FIGURES.items()
    }
    by_seed["cost"] = [-gain for gain in by_seed["cost"]]
    return by_seed


def ranked(rows: Mapping[str, Any]) -> list[tuple[str, dict[str, Any] | None]]:
    """Entries by mean cost, then by what comes back; those that never get there last."""

    def key(item: tuple[str, Any]) -> tuple[float, float]:
        one = item[1]
        return (1e9, 0.0) if one is None else (fmean(one["cost"]), fmean(one["relearned"]))

    return sorted(rows.items(), key=key)


def entries(parts: Mapping[str, Any], problem: str) -> dict[str, Any]:
    """All rows of a problem, by method and objective."""
    found: dict[str, Any] = {}
    for name, part in parts.items():
        of, _, objective = name.partition(" | ")
        if of == problem:
            suffix = f"+{objective}" if objective else ""
            found |= {method + suffix: row for method, row in part["rows"].items()}
    return found


def table(parts: Mapping[str, Any]) -> str:
    """A table for each problem, in Markdown without blanks; columns without a figure are left out."""
    lines: list[str] = []
    heads = ["", "entry", "retain cost", "seeds", "share", "test accuracy", "relearned", "step", "settings"]  # fmt: skip
    heads += [f"at {loss:g}" for loss in LEVELS]
    for problem in dict.fromkeys(name.partition(" | ")[0] for name in parts):
        first, rows = parts[problem], entries(parts, problem)
        lines += [f"## {problem}", "", f"Forget loss {first['start']['forget']:.2g}, retain loss {first['start']['retain']:.2g}; "
                  f"retrained forget loss {first['level']:.4g}, relearned {first['retrained_relearned']:.2f}.", ""]  # fmt: skip
        ours = fmean(rows["hamu-q"]["cost"]) if rows.get("hamu-q") else None
        body = []
        for place, (name, row) in enumerate(ranked(rows), 1):
            levels = first["levels"].get(name, {})
            costs = [levels.get(str(loss), inf) for loss in LEVELS]
            # a state counts at lower levels too, where a jump may have hidden it
            least = [min(costs[n:]) for n in range(len(costs))]
            further = ["-" if cost == inf else f"{cost:+.4f}" for cost in least]
            body.append([str(place), name, *_cells(row, ours), *further])
        shown = [n for n in range(len(heads)) if any(cells[n] != "-" for cells in body)]
        marks = ["---" if heads[n] == "entry" else "---:" for n in shown]
        lines += [f"|{'|'.join(cells)}|" for cells in ([heads[n] for n in shown], marks)]
        lines += [f"|{'|'.join(cells[n] for n in shown)}|" for cells in body]
        lines.append("")
    return "\n".join(lines)


def _cells(row: Mapping[str, Any] | None, ours: float | None) -> list[str]:
    if row is None:
        return ["never", *["-"] * 6]
    short = {"constraint": "c", "forget_weight": "w", "learning_rate": "lr"}
    cost = fmean(row["cost"])
    share = f"{cost / ours:.2f}" if ours and min(cost, ours) > 0 else "-"
    spread = f"{min(row['cost']):+.4f}…{max(row['cost']):+.4f}" if len(row["cost"]) > 1 else "-"
    settings = ",".join(f"{short[name]}={row[name]:g}" for name in short if name in row) or "-"
    accuracy = [one for one in row["test_accuracy"] if one is not None]  # of texts there is none
    others = [f"{fmean(accuracy):.1%}" if accuracy else "-", f"{fmean(row['relearned']):.2f}", f"{fmean(row['step']):.0f}"]  # fmt: skip
    return [f"{cost:+.4f}", spread, share, *others, settings]


def problems(names: list[str], work: Path, options: Any) -> list[Problem]:
    """The problems of the league, the quick ones first."""
    found: list[Problem] = []
    if "digits" in names:
        _twenty, hundred, plain, half = digits(work)
        mixed = replace(
            plain, name="digits, class 3, ρ = 0.25", forget=(*plain.forget, "--rho", "0.25")
        )
        found += [mixed, plain, half, hundred]
    if "cifar" in names:
        _twenty, hundred, plain, half = cifar(work, Path(options.cifar_dir), epochs=6)
        found += [plain, half, hundred]
    if "tofu" in names:
        ten, _twenty = tofu(work, Path(options.tofu_dir))
        extra = ("--per_device_train_batch_size", "8", "--per_device_eval_batch_size", "32")
        ten = replace(ten, train=(*ten.train, "--bf16"), original="tofu-bf16", extra=extra)
        one = replace(ten, name="TOFU, forget01", forget=("--forget_data", "forget01.json"))
        found += [ten, one]
    return found


def main(argv: list[str]) -> None:
    """Run what has no result yet."""
    parser = argparse.ArgumentParser(prog="experiments league", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("data", nargs="*", choices=("digits", "cifar", "tofu"))
    parser.add_argument("--only", nargs="+", help="the problems of these names, by default all")
    parser.add_argument("--methods", nargs="+", help="by default all")
    parser.add_argument("--objectives", nargs="*", help="by default all")
    parser.add_argument(
        "--longer", action="store_true", help="rivals in four times the steps, on known rows"
    )
    parser.add_argument("--budget", type=float, help="hamu unlearn with it, on known rows")
    parser.add_argument("--repeat", action="store_true", help="known entries with more seeds")
    parser.add_argument("--trials", type=int, help="runs that tune each method; by default 8")
    parser.add_argument("--seeds", nargs="+", type=int, help="by default 42 43 44")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--cifar_dir")
    parser.add_argument("--tofu_dir")
    parser.add_argument("--work_dir", default="runs/experiments")
    parser.add_argument("--output", default="docs/results/league.json")
    options = parser.parse_args(argv)
    path, work = Path(options.output), Path(options.work_dir)
    work.mkdir(parents=True, exist_ok=True)
    parts: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    methods = options.methods or [name for name in method_classes() if name not in WITHOUT]
    for problem in problems(options.data, work, options):
        if options.only and problem.name not in options.only:
            continue
        if options.longer:
            longer(problem, work, parts[problem.name]["level"], EFFORT[problem.original])
            continue
        if options.budget is not None:
            within(options.budget, problem, work, parts[problem.name], EFFORT[problem.original])
            path.write_text(json.dumps(parts, indent=1, ensure_ascii=False) + "\n")
            continue
        of_texts = OF_TEXTS if "--max_length" in problem.data else ()
        objectives = (*OBJECTIVES, *of_texts) if options.objectives is None else options.objectives
        for objective in (None, *objectives):
            name = problem.name if objective is None else f"{problem.name} | {objective}"
            asked = methods if objective is None else [one for one in RAISING if one in methods]
            effort = EFFORT.get(problem.name) or EFFORT[problem.original]
            given = {"trials": options.trials, "seeds": options.seeds and (*options.seeds,)}
            effort = replace(effort, **{key: one for key, one in given.items() if one is not None})
            known = parts.get(name, {}).get("rows", {})
            missing = [one for one in asked if one not in known]
            if options.repeat:
                if known:
                    repeat(problem, work, parts[name], objective, effort)
            elif missing:
                is_new = objective is None and DEFAULT not in known
                new = measured(problem, work, missing, objective, effort, options.jobs, with_default=is_new)  # fmt: skip
                parts[name] = added(parts[name], new) if known else new
            path.write_text(json.dumps(parts, indent=1, ensure_ascii=False) + "\n")
    print(table(parts))
