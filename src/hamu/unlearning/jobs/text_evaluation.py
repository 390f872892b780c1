"""What `hamu evaluate` measures of a language model beyond its losses: TOFU's figures, answers side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hamu.data import TextRecords, UnlearningData, encode
from hamu.evaluation import TofuSets, forget_quality, tofu_report
from hamu.evaluation.tofu import PERTURBED
from hamu.files import ANSWERS, ANSWERS_PAGE
from hamu.models.language import load_tokenizer
from hamu.report.observations import AnsweredRecord, answered
from hamu.report.page import answers_page
from hamu.unlearning.jobs.options import EvaluateOptions
from hamu.unlearning.jobs.task import evaluation_precision
from hamu.unlearning.jobs.text_task import TextTask, some_records
from hamu.unlearning.trainer import TrainConfig

_TOFU_SETS = (
    "forget_perturbed",
    "retain_perturbed",
    "real_authors",
    "world_facts",
)  # in the order of `TofuSets`


class TextEvaluation:
    """Reads its data when it is made, and measures one model after the other.

    Args:
        task: of the command.
        options: what is asked for.
        args: the settings.

    Raises:
        HamuError: if a record of TOFU has no wrong answers, or none of its answer would be left.
    """

    def __init__(self, task: TextTask, options: EvaluateOptions, args: TrainConfig) -> None:
        self._task, self._options, self._args = task, options, args
        named = [getattr(options, name) for name in _TOFU_SETS]
        self._tofu = TofuSets(
            *(None if name is None else task.read(task.located(name), "train") for name in named)
        )
        self._retain_ratios: Sequence[float] | None = (
            None  # the retain model's truth ratios on TOFU's forget set
        )
        self._check_tofu()

    def _check_tofu(self) -> None:
        """Check that TOFU's records have wrong answers, and that some of each answer is left when they are cut."""
        found = [texts for texts in vars(self._tofu).values() if texts is not None]
        if not found:
            return
        run = self._task.run_options
        source = run.tokenizer or str(run.model)
        tokenizer = load_tokenizer(source, run.base_model, trust_remote_code=run.trust_remote_code)
        for texts in found:
            for one in (texts, texts.answering(PERTURBED)):
                encode(one, tokenizer, self._task.data_options.max_length)

    def ask_retain_model(self, model: Any) -> None:
        """Keep the truth ratios of the retain model, which has just been loaded: forget quality compares with them."""
        if self._tofu.forget is None:
            return
        task, sets = self._task, TofuSets(forget=self._tofu.forget)
        with evaluation_precision(self._args):
            found = tofu_report(
                model,
                task.tokenizer,
                sets,
                self._args.eval_batch_size,
                task.length_for(model),
                generate=False,
            )
        self._retain_ratios = found["forget"]["truth_ratios"]

    def measure(self, model: Any, report: dict[str, Any]) -> None:
        """Add TOFU's figures to a model's report where their data are given."""
        if self._tofu == TofuSets():
            return
        task, args, generate = self._task, self._args, self._options.generate
        with evaluation_precision(args):
            report["tofu"] = tofu_report(
                model,
                task.tokenizer,
                self._tofu,
                args.eval_batch_size,
                task.length_for(model),
                generate or None,
                args.seed,
                generate=generate > 0,
            )
        if self._retain_ratios is not None:
            ours = report["tofu"]["forget"]["truth_ratios"]
            report["tofu"]["forget_quality"] = forget_quality(ours, self._retain_ratios)
        if report.get("privleak") is not None:
            report["tofu"]["privleak"] = report[
                "privleak"
            ]  # the table has it beside forget quality

    def files(self, model: Any, problem: UnlearningData[TextRecords]) -> dict[str, str]:
        """The page of answers side by side, and the same as JSON lines: what to write, by the name of the file."""
        task, options, args = self._task, self._options, self._args
        if not options.generate:
            return {}
        models = {"after" if options.original_model else "answer": (model, task.tokenizer)}
        if options.original_model:
            models = {"before": task.load_with_tokenizer(options.original_model)} | models
        pages: dict[str, list[AnsweredRecord]] = {}
        lines = []
        for name in ("forget", "retain"):
            texts = some_records(problem.sets()[name], options.generate, args.seed)
            if not all(record.prompt for record in texts.records):
                task.console.print(
                    f"no answers are generated for the {name} set: plain text has no prompt"
                )
                continue
            answers = {
                label: task.answers_of(one.to(args.device), tokenizer, texts, args)
                for label, (one, tokenizer) in models.items()
            }
            pages[name] = answered(texts, answers)
            for row in pages[name]:
                said = {
                    label: {"answer": answer, "rouge": score}
                    for label, answer, score in row.answers
                }
                line = {"set": name, "prompt": row.prompt, "expected": row.expected} | said
                lines.append(json.dumps(line, ensure_ascii=False) + "\n")
        return {ANSWERS_PAGE: answers_page(pages), ANSWERS: "".join(lines)} if pages else {}
