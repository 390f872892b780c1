"""Text: reading, loading with tokenizer and adapter, turning into tokens, reporting."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from hamu.cli.adapter_options import settle_adapter
from hamu.cli.options import EvaluateOptions
from hamu.cli.precision import evaluation_precision
from hamu.cli.tables import privleak_line, text_membership_line, text_table, tofu_table
from hamu.cli.tasks import Task
from hamu.data import TextCollator, TextData, TextRecords, UnlearningData, encode, forget_rows, matching, read_text
from hamu.data.text_readers import has_test_split
from hamu.errors import HamuError
from hamu.evaluation import (
    TofuSets,
    TokenPredictions,
    forget_quality,
    further_figures,
    generate_answers,
    predict_tokens,
    privleak,
    text_report,
    tofu_report,
)
from hamu.evaluation.membership import auc_of
from hamu.evaluation.tofu import PERTURBED
from hamu.models.language import (
    TINY,
    AdapterSettings,
    base_of,
    check_is_saved,
    check_reads,
    load_language_model,
    load_tokenizer,
    longest_text,
    new_language_model,
    new_tokenizer,
)
from hamu.models.merging import check_can_merge, merged
from hamu.reporting.answers import AnsweredRecord, answered, answers_page
from hamu.run_files import ANSWERS, ANSWERS_PAGE, MERGED
from hamu.run_folder import RunFolder
from hamu.sources import MINIATURE, is_of_hub
from hamu.training import TrainConfig
from hamu.training.pairing import chosen_positions

_TOFU_SETS = ("forget_perturbed", "retain_perturbed", "real_authors", "world_facts")


class TextTask(Task):
    """Causal language models."""

    noun = "records"
    batch_sizes: ClassVar[dict[str, int]] = {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 16}
    ways = ("forget_data", "forget_rows", "forget_filter")
    bundled = MINIATURE
    built_in = TINY
    tokenizer: Any = None
    tofu = TofuSets()
    _retain_ratios: Sequence[float] | None = None  # the retain model's truth ratios on TOFU's forget set

    def read(self, source: str, split: str) -> TextRecords:
        """See `read_text`."""
        options = self.data_options
        return read_text(
            source,
            split,
            question_template=options.question_template,
            answer_prefix=options.answer_prefix,
            prompt_column=options.prompt_column,
            answer_column=options.answer_column,
        )

    def has_test_split(self, source: str) -> bool:
        """See `hamu.data.text_readers`."""
        return has_test_split(source)

    def forget(self, train: TextRecords, test: TextRecords | None) -> UnlearningData[TextRecords]:
        """What a filter finds."""
        rows = matching(train, str(self.data_options.forget_filter))
        if not rows:
            raise HamuError(f"the forget set is empty: no record has {self.data_options.forget_filter}")
        return forget_rows(train, test, rows)

    def new_model(self, name: str, train: TextRecords) -> Any:
        """A new tiny model with a tokenizer of its own, or a saved one to go on with."""
        if not self.is_built_in(name):
            self.check_models()
            return self.start_model(name)
        if self.run_options.lora or self.run_options.merge:
            raise HamuError(f"{TINY} is new and trained whole; leave --lora and --merge out")
        other = self.run_options.tokenizer
        self.tokenizer = (
            new_tokenizer(record.prompt + record.answer for record in train.records)
            if other is None
            else load_tokenizer(other, trust_remote_code=self.run_options.trust_remote_code)
        )
        return new_language_model(self.tokenizer, max_length=self.data_options.max_length)

    def load_model(self, source: str, base: str | None = None) -> Any:
        """A saved model; its tokenizer is kept."""
        model, self.tokenizer = self._loaded(source, base=base)
        return model

    def start_model(self, source: str) -> Any:
        """A saved model with its adapter, if it has or is to have one; its tokenizer is kept."""
        options = self.run_options
        adapter = AdapterSettings(options.lora_rank, options.lora_alpha, options.lora_dropout, options.lora_targets)
        model, self.tokenizer = self._loaded(source, adapter if options.lora else None)
        half = next((n for n, p in model.named_parameters() if p.requires_grad and p.dtype.itemsize < 4), None)
        if half is not None:
            raise HamuError(
                f"{half} would be trained in half precision, which loses small steps; leave --model_dtype at float32 "
                f"(--bf16 saves time and memory all the same), or train an adapter with --lora"
            )
        if options.merge and not hasattr(model, "peft_config"):
            raise HamuError("there is no adapter to merge; leave --merge out, or train one with --lora")
        if options.merge:
            check_can_merge(model)
        return model

    def base_of(self, source: str, base: str | None = None) -> str | None:
        """See `base_of`."""
        return base_of(source, base or self.run_options.base_model)

    def check_models(self, options: EvaluateOptions | None = None) -> None:
        """Those of the hub are not looked for yet; a base model that none of them needs is said."""
        run = self.run_options
        named = [run.model, run.retain_model, None if options is None else options.original_model]
        models = [name for name in named if name is not None]
        for name in models:
            check_is_saved(name)
        is_needed = [is_of_hub(name) or self.base_of(name) is not None for name in models]
        if run.base_model not in (None, run.model) and not any(is_needed):
            self.console.print(
                f"base_model {run.base_model} is not used: no model that is named is an adapter",
                soft_wrap=True, markup=False,
            )  # fmt: skip

    def settle_adapter(self, given: Collection[str]) -> None:
        """See `settle_adapter`."""
        settle_adapter(self.run_options, given)

    def _loaded(self, source: str, adapter: AdapterSettings | None = None, base: str | None = None) -> tuple[Any, Any]:
        """A model and its tokenizer, which may be another's."""
        options = self.run_options
        base, trusted = base or options.base_model, options.trust_remote_code
        model = load_language_model(
            source, base_model=base, adapter=adapter, dtype=options.model_dtype, trust_remote_code=trusted
        )
        return model, load_tokenizer(options.tokenizer or source, base, trust_remote_code=trusted)

    def fitted(self, model: Any, *sets: TextRecords | None) -> list[TextData | None]:
        """As tokens; checked."""
        longest = self._length(model)
        encoded = []
        for data in sets:
            tokens = None if data is None else encode(data, self.tokenizer, longest, self.data_options.loss_on)  # type: ignore[arg-type]
            if tokens is not None:
                check_reads(model, tokens)
                if tokens.truncated:
                    self.console.print(
                        f"{tokens.truncated} of {len(tokens)} records of {tokens.texts.source} are longer than "
                        f"{longest} tokens and were cut; --max_length sets it"
                    )
            encoded.append(tokens)
        return encoded

    def collator(self) -> Callable[[Any], Mapping[str, Any]]:
        """Pads batches."""
        return TextCollator(self.tokenizer.pad_token_id)

    def predict(self, model: Any, data: Any, args: TrainConfig) -> TokenPredictions:
        """See `predict_tokens`."""
        with evaluation_precision(args):
            return predict_tokens(model, data, args.eval_batch_size, self.collator())

    def report(
        self, predictions: Mapping[str, Any], problem: UnlearningData[Any], reference: Any, args: TrainConfig
    ) -> dict[str, Any]:
        """See `text_report`; with a retain model its own figures beside ours, and PrivLeak."""
        texts = {
            name: scored_texts(evaluated(data, args), self.data_options.loss_on)
            for name, data in problem.sets().items()
        }
        report = text_report(predictions, texts=texts)
        if reference is not None:
            report["retain_model"] = text_report(reference, texts=texts)
            report["privleak"] = _privleak(report)
        return report | further_figures(predictions, reference)

    def show(self, reports: dict[str, dict[str, Any]]) -> None:
        """Losses, accuracies and probabilities; membership inference."""
        last = list(reports.values())[-1]
        shown = reports | ({"retain model": last["retain_model"]} if "retain_model" in last else {})
        self.console.print(text_table(shown))
        for name, report in shown.items():
            lines = [text_membership_line(report), *([privleak_line(report)] if "privleak" in report else [])]
            for line in lines:
                self.console.print(f"{name}: {line}" if name else line)
            self.show_metrics(report)

    def read_further(self, options: EvaluateOptions) -> None:
        """TOFU's records, which are kept, once it is sure that they have wrong answers, and an answer in each."""
        named = [getattr(options, name) for name in _TOFU_SETS]
        self.tofu = TofuSets(*(None if name is None else self.read(self.located(name), "train") for name in named))
        found = [texts for texts in vars(self.tofu).values() if texts is not None]
        if not found:
            return
        run = self.run_options
        source = run.tokenizer or str(run.model)
        tokenizer = load_tokenizer(source, run.base_model, trust_remote_code=run.trust_remote_code)
        for texts in found:
            for one in (texts, texts.answering(PERTURBED)):
                encode(one, tokenizer, self.data_options.max_length)

    def ask_retain_model(self, model: Any, args: TrainConfig) -> None:
        """Its truth ratios, with which forget quality compares: it never saw the forget set."""
        if self.tofu.forget is None:
            return
        sets, length = TofuSets(forget=self.tofu.forget), self._length(model)
        with evaluation_precision(args):
            found = tofu_report(model, self.tokenizer, sets, args.eval_batch_size, length, generate=False)
        self._retain_ratios = found["forget"]["truth_ratios"]

    def evaluate_further(self, model: Any, args: TrainConfig, options: EvaluateOptions, report: dict[str, Any]) -> None:
        """TOFU's figures, where their data are given."""
        tofu, length = self.tofu, self._length(model)
        if tofu == TofuSets():
            return
        batch, most = args.eval_batch_size, options.generate or None
        with evaluation_precision(args):
            report["tofu"] = tofu_report(
                model, self.tokenizer, tofu, batch, length, most, args.seed, generate=options.generate > 0
            )
        if self._retain_ratios is not None:
            ours = report["tofu"]["forget"]["truth_ratios"]
            report["tofu"]["forget_quality"] = forget_quality(ours, self._retain_ratios)
        if report.get("privleak") is not None:
            report["tofu"]["privleak"] = report["privleak"]  # the table has it beside forget quality
        self.console.print(tofu_table(report["tofu"]))

    def further_files(
        self, model: Any, problem: UnlearningData[Any], args: TrainConfig, options: EvaluateOptions
    ) -> dict[str, str]:
        """The page of answers side by side, and the same as JSON lines."""
        if not options.generate:
            return {}
        models = {"after" if options.original_model else "answer": (model, self.tokenizer)}
        if options.original_model:
            models = {"before": self._loaded(options.original_model)} | models
        pages: dict[str, list[AnsweredRecord]] = {}
        lines = []
        for name in ("forget", "retain"):
            texts = some_records(problem.sets()[name], options.generate, args.seed)
            if not all(record.prompt for record in texts.records):
                self.console.print(f"no answers are generated for the {name} set: plain text has no prompt")
                continue
            answers = {
                label: self.answers_of(one.to(args.device), tokenizer, texts, args)
                for label, (one, tokenizer) in models.items()
            }
            pages[name] = answered(texts, answers)
            for row in pages[name]:
                said = {label: {"answer": answer, "rouge": score} for label, answer, score in row.answers}
                line = {"set": name, "prompt": row.prompt, "expected": row.expected} | said
                lines.append(json.dumps(line, ensure_ascii=False) + "\n")
        return {ANSWERS_PAGE: answers_page(pages), ANSWERS: "".join(lines)} if pages else {}

    def answers_of(self, model: Any, tokenizer: Any, texts: TextRecords, args: TrainConfig) -> list[str]:
        """What a model answers to the prompts of these records; see `generate_answers`."""
        data = encode(texts, tokenizer, self._length(model))
        with evaluation_precision(args):
            return generate_answers(model, tokenizer, data, args.eval_batch_size)

    def _length(self, model: Any) -> int:
        """The most tokens of a record: what was asked for, or what the model can read."""
        return min(self.data_options.max_length, longest_text(model) or self.data_options.max_length)

    def save_model(self, folder: RunFolder, model: Any) -> Path:
        """The model (or its adapter) and its tokenizer."""
        return folder.save_model(model, self.tokenizer)

    def save_merged(self, folder: RunFolder, model: Any) -> None:
        """The adapter merged into its model, if asked for; uses the model up."""
        if self.run_options.merge:
            folder.save_model(merged(model), self.tokenizer, name=MERGED)


def _privleak(report: Mapping[str, Any]) -> float | None:
    """In MUSE's orientation; None without Min-K% of both models, or where the retain model's AUC is 1."""
    ours, theirs = auc_of(report), auc_of(report["retain_model"])
    if ours is None or theirs is None or theirs == 1:
        return None
    return privleak(1 - ours, 1 - theirs)


def scored_texts(data: TextRecords, loss_on: str) -> list[str]:
    """What the loss is taken of, of each record: its answer, or all of it."""
    return [((r.prompt if loss_on == "all" else "") + r.answer).strip() for r in data.records]


def evaluated(data: TextData | TextRecords, args: TrainConfig) -> TextRecords:
    """The records of a set that an evaluation looks at, in its order."""
    return some_records(data, getattr(args, "max_eval_samples", None), args.seed)


def some_records(data: TextData | TextRecords, most: int | None, seed: int) -> TextRecords:
    """At most so many records of a set, drawn at random; see `chosen_positions`."""
    texts = data.texts if isinstance(data, TextData) else data
    positions = chosen_positions(len(texts), most, seed)
    return texts if positions is None else texts.select(positions)
