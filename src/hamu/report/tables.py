"""Tables and lines on the screen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich import box
from rich.table import Table

from hamu.evaluation.attack_results import (
    MODELS,
    RELEARNING,
    UNLEARNED,
    AttackResult,
    robustness,
)
from hamu.evaluation.membership import auc_of
from hamu.report.pictures import ATTACK_FIGURES, figure_of, heads_of

_SETS = {
    "retain": "retain",
    "forget": "forget",
    "test": "test",
    "test_without_class": "test without the class",
}


def plain_table(*columns: str, right: tuple[int, ...] = ()) -> Table:
    """Empty table with a line under its head."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number in right else "left")
    return table


def report_table(reports: dict[str, dict[str, Any]]) -> Table:
    """Loss and accuracy of each set, with two columns per report (such as before and after)."""
    columns = [f"{figure} {name}".strip() for figure in ("loss", "accuracy") for name in reports]
    table = plain_table("set", "samples", *columns, right=tuple(range(1, 2 + len(columns))))
    first = next(iter(reports.values()))
    for key, name in _SETS.items():
        if key in first:
            losses = [f"{report[key]['loss']:.4f}" for report in reports.values()]
            accuracies = [f"{report[key]['accuracy']:.2%}" for report in reports.values()]
            table.add_row(name, str(first[key]["samples"]), *losses, *accuracies)
    return table


def membership_line(report: dict[str, Any]) -> str:
    """Line on membership inference, with the retain model's AUC if it has one."""
    inference = report["membership_inference"]
    if inference is None:
        return (
            "membership inference: not measured (it needs five test images of the classes that are "
            "forgotten, and "
            "finite losses)"
        )
    return (
        f"membership inference: accuracy {inference['accuracy']:.3f}, AUC {inference['auc']:.3f}"
        f"{_theirs(report, 'auc')} (0.5 is ideal; {inference['samples']} forget against "
        f"{inference['samples']} test images)"
    )


def reference_table(report: dict[str, Any]) -> Table:
    """Distances to the retain model."""
    table = plain_table(
        "against the retain model", "loss", "accuracy", "KL", "agreement", right=(1, 2, 3, 4)
    )
    for name, row in report["against_retain_model"].items():
        table.add_row(
            _SETS[name],
            f"{row['loss_difference']:+.4f}",
            f"{row['accuracy_difference']:+.2%}",
            f"{row['kl']:.4f}",
            f"{row['agreement']:.2%}",
        )
    return table


def membership_difference_line(report: dict[str, Any]) -> str:
    """Line that compares membership inference with the retain model's."""
    theirs, less = (
        report["retain_model"][f"membership_inference{of}"] for of in ("", "_difference")
    )
    if less is None:
        return "membership inference against the retain model's: not measured (it needs that of both models)"
    return (
        f"membership inference against the retain model's {theirs['accuracy']:.3f} and "
        f"{theirs['auc']:.3f}: accuracy "
        f"{less['accuracy']:+.3f}, AUC {less['auc']:+.3f} (0 is ideal)"
    )


def text_table(reports: dict[str, dict[str, Any]]) -> Table:
    """Loss, token accuracy and probability of each set of texts, with a column per report."""
    figures = {"loss": "{:.4f}", "accuracy": "{:.1%}", "probability": "{:.3f}"}
    heads = {"loss": "loss", "accuracy": "acc", "probability": "prob"}
    columns = [f"{heads[figure]} {name}".strip() for figure in figures for name in reports]
    table = plain_table("set", "records", *columns, right=tuple(range(1, 2 + len(columns))))
    first = next(iter(reports.values()))
    for key in ("retain", "forget", "test"):
        if key in first:
            cells = [
                form.format(report[key][figure])
                for figure, form in figures.items()
                for report in reports.values()
            ]
            table.add_row(key, str(first[key]["records"]), *cells)
    return table


def text_membership_line(report: dict[str, Any]) -> str:
    """Line on membership inference of texts, with the retain model's AUCs."""
    inference = report["membership_inference"]
    if inference is None:
        return "membership inference: not measured (it needs --test_data that was never trained on, and finite scores)"
    return "membership inference, AUC (0.5 is ideal): " + ", ".join(
        f"{name.replace('_', ' ')} "
        f"{'not measured' if value is None else format(value, '.3f')}{_theirs(report, name)}"
        for name, value in inference.items()
    )


def _theirs(report: dict[str, Any], figure: str) -> str:
    """The retain model's figure of membership inference in brackets, "" without one."""
    found = (report.get("retain_model", {}).get("membership_inference") or {}).get(figure)
    return "" if found is None else f" [retain model {found:.3f}]"


def privleak_line(report: dict[str, Any]) -> str:
    """Line on PrivLeak."""
    value = report["privleak"]
    if value is not None:
        return f"PrivLeak (0 is ideal): {value:+.4f}"
    if auc_of(report) is None or auc_of(report["retain_model"]) is None:
        return "PrivLeak: not measured (it needs membership inference of both models)"
    return "PrivLeak: not measured (it divides by 1 - min k of the retain model, which is 0)"


def tofu_table(report: dict[str, Any]) -> Table:
    """TOFU's figures: a row for each set, then the aggregates."""
    table = plain_table(
        "TOFU", "records", "probability", "ROUGE-L", "truth ratio", right=(1, 2, 3, 4)
    )
    for name in ("forget", "retain", "real_authors", "world_facts"):
        if name in report:
            row = report[name]
            cells = [
                "-" if row[key] is None else f"{row[key]:.4f}"
                for key in ("probability", "rouge", "truth_ratio")
            ]
            table.add_row(name.replace("_", " "), str(row["records"]), *cells)
    for key in ("model_utility", "model_utility_probability", "forget_quality", "privleak"):
        if report.get(key) is not None:
            table.add_row(key.replace("_", " "), "", f"{report[key]:.4g}", "", "")
    return table


def attack_tables(result: AttackResult) -> Iterator[Table]:
    """Table of means over seeds for each attack with a row for each model, then the robustness."""
    for attack, by_model in result.outcomes.items():
        name, form = figure_of(attack, result)
        accuracy = ["retain accuracy"] if attack in RELEARNING else []
        heads = [*heads_of(attack, by_model[UNLEARNED]), *accuracy]
        table = plain_table(attack, *heads, right=tuple(range(1, 1 + len(heads))))
        table.caption, table.caption_justify = ATTACK_FIGURES[name], "left"
        for role in (one for one in MODELS if one in by_model):
            outcome = by_model[role]
            cells = [format(outcome.mean(name, at), form) for at in outcome.at]
            accuracies = outcome.retain_accuracy
            ends = [f"{sum(accuracies) / len(accuracies):.1%}"] if accuracy else []
            table.add_row(role, *cells, *ends)
        yield table
    found = robustness(result)
    if found:
        table = plain_table("robustness, 1 is best", "value", right=(1,))
        for name, value in found.items():
            letter, _, metric = name.partition("_")
            against = "quantization" if letter == "Q" else "relearning"
            table.add_row(f"{letter}: {against}, by {metric.replace('_', ' ')}", f"{value:.3f}")
        yield table
