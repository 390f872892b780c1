"""Tables of attacks on the screen."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from hamu.cli.tables import plain_table
from hamu.evaluation.attacks import AttackResult, robustness
from hamu.evaluation.attacks.result import MODELS, UNLEARNED
from hamu.evaluation.attacks.settings import RELEARNING
from hamu.report.attack_section import MEANINGS, figure_of, heads_of


def attack_tables(result: AttackResult) -> Iterator[Table]:
    """A table of means over seeds for each attack, a row for each model; then the figures of robustness."""
    for attack, by_model in result.outcomes.items():
        name, form = figure_of(attack, result)
        accuracy = ["retain accuracy"] if attack in RELEARNING else []
        heads = [*heads_of(attack, by_model[UNLEARNED]), *accuracy]
        table = plain_table(attack, *heads, right=tuple(range(1, 1 + len(heads))))
        table.caption, table.caption_justify = MEANINGS[name], "left"
        for role in (one for one in MODELS if one in by_model):
            outcome = by_model[role]
            cells = [format(outcome.mean(name, at), form) for at in outcome.at]
            accuracies = outcome.retain_accuracy
            ends = [f"{sum(accuracies) / len(accuracies):.1%}"] if accuracy else []
            table.add_row(MODELS[role], *cells, *ends)
        yield table
    found = robustness(result)
    if found:
        table = plain_table("robustness, 1 is best", "value", right=(1,))
        for name, value in found.items():
            letter, _, metric = name.partition("_")
            against = "quantization" if letter == "Q" else "relearning"
            table.add_row(f"{letter}: {against}, by {metric.replace('_', ' ')}", f"{value:.3f}")
        yield table
