"""`hamu attack`: fine-tune copies of a model, and look whether what was forgotten comes back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from hamu.cli.attack_tables import attack_tables
from hamu.cli.options import DataOptions, OriginalOptions, RunOptions
from hamu.cli.parsing import parse
from hamu.cli.problem import fitted_problem, open_problem
from hamu.cli.progress import task_bar
from hamu.cli.tasks import Task
from hamu.cli.text_task import TextTask
from hamu.data import TextRecords, UnlearningData, read_text
from hamu.data.sources import MINIATURE
from hamu.errors import HamuError
from hamu.evaluation.attacks import (
    AttackData,
    AttackResult,
    AttackSettings,
    attack_model,
    collected,
    sentence,
)
from hamu.evaluation.attacks.attacker import check_can_quantize
from hamu.evaluation.attacks.result import ORIGINAL, RETRAINED, UNLEARNED
from hamu.evaluation.attacks.settings import QUANTIZE, RELEARN_UNRELATED
from hamu.report.attack_section import plot_attacks
from hamu.unlearning.record.record import plain
from hamu.unlearning.run_files import ATTACK, ATTACK_PICTURE
from hamu.unlearning.run_folder import RunFolder
from hamu.unlearning.trainer import TrainConfig
from hamu.unlearning.trainer.resumable import to_channels_last


def run(argv: list[str], console: Console) -> int:
    """Attack, print, save attack.json and attack.png."""
    parsed = parse(
        "attack",
        "Fine-tune copies of a model and look whether what was forgotten comes back.",
        argv,
        DataOptions,
        RunOptions,
        OriginalOptions,
        AttackSettings,
        TrainConfig,
    )
    run_options, args = parsed.of(RunOptions), parsed.of(TrainConfig)
    options, settings = parsed.of(OriginalOptions), parsed.of(AttackSettings)
    task, folder, problem = open_problem(
        parsed.of(DataOptions), run_options, args, parsed.given, console, options
    )
    task.check_models(options)
    attacker = Attacker(task, problem, settings, options.original_model, args, parsed.given)
    result = attacker.run()
    with folder:
        console.print(f"forget set: {problem.forget_name}")
        write_and_show(result, folder, console)
        folder.write_config(parsed.given)
    return 0


class Attacker:
    """Attacks of one problem, checked when it is made.

    Args:
        task: of the command.
        problem: as it was read.
        settings: which attacks.
        original: the model before unlearning, if it is named.
        args: settings of evaluation.
        given: the options that were given.

    Raises:
        HamuError: if an attack is unknown or cannot be run.
    """

    def __init__(
        self,
        task: Task[Any, Any, Any],
        problem: UnlearningData[Any],
        settings: AttackSettings,
        original: str | None,
        args: TrainConfig,
        given: Mapping[str, Any],
    ) -> None:
        self._task, self._problem, self._settings, self._args = task, problem, settings, args
        run = task.run_options
        self._models = {UNLEARNED: run.model, ORIGINAL: original, RETRAINED: run.retain_model}
        self._is_text = isinstance(task, TextTask)
        self._names = settings.names(is_text=self._is_text)
        if QUANTIZE in self._names:
            check_can_quantize()
        task.settle_adapter(given)
        self._unrelated = self._read_unrelated()

    def run(self) -> AttackResult:
        """Load and attack one model after the other."""
        models = {role: name for role, name in self._models.items() if name is not None}
        found, data = {}, None
        work = len(models) * self._settings.work(self._names, is_text=self._is_text)
        with task_bar(self._task.console) as bar:
            job = bar.add_task("attacks", total=work)
            for role, name in models.items():
                bar.update(job, description=f"attacks on the {role} model")
                model = self._task.start_model(name).to(self._args.device)
                if self._args.channels_last:
                    to_channels_last(model)
                data = self._data_for(model)
                found[role] = attack_model(
                    model,
                    data,
                    self._settings,
                    seed=self._args.seed,
                    role=role,
                    advance=lambda steps: bar.advance(job, steps),
                )
        assert data is not None  # there is always an unlearned model
        return collected(found, data, self._settings)

    def _data_for(self, model: Any) -> AttackData:
        """The problem in the form that a model takes."""
        fitted = fitted_problem(self._task, model, self._problem)
        unrelated = None
        if self._unrelated:
            [unrelated] = self._task.fitted(model, self._unrelated)
        return AttackData(
            fitted.retain,
            fitted.forget,
            self._task.collator(),
            self._args.eval_batch_size,
            unrelated,
            getattr(self._task, "tokenizer", None),
        )

    def _read_unrelated(self) -> TextRecords | None:
        """Texts for relearn-unrelated, without those of the problem."""
        named = self._settings.unrelated_data
        if RELEARN_UNRELATED not in self._names:
            if named is not None:
                raise HamuError(
                    f"unrelated_data {named} has no effect without the attack {RELEARN_UNRELATED}; leave it out"
                )
            return None
        source = None if named is None else self._task.located(named)
        texts = read_text(MINIATURE) if source is None else self._task.read(source, "train")
        known = {*self._problem.retain.digests(), *self._problem.forget.digests()}
        return texts.select([i for i, one in enumerate(texts.digests()) if one not in known])


def write_and_show(result: AttackResult, folder: RunFolder, console: Console) -> None:
    """Print the verdict and the curves, and save them."""
    path = folder.write_json(ATTACK, plain(result.to_json()))
    plot_attacks(result, folder.path / ATTACK_PICTURE)
    console.print(sentence(result), soft_wrap=True)
    for table in attack_tables(result):
        console.print(table)
    for name, reason in result.skipped.items():
        console.print(f"{name} is left out: {reason}", soft_wrap=True)
    console.print(f"all figures are in {path}", soft_wrap=True)
