"""Text: reading, loading with tokenizer and adapter, turning into tokens, reporting."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

from hamu.data import (
    TextCollator,
    TextData,
    TextRecords,
    UnlearningData,
    encode,
    forget_rows,
    matching,
    read_text,
)
from hamu.data.forget_sets import draw_positions
from hamu.data.sources import MINIATURE, is_of_hub
from hamu.data.text import has_test_split
from hamu.errors import HamuError
from hamu.evaluation import (
    TokenPredictions,
    further_figures,
    generate_answers,
    predict_tokens,
    privleak,
    text_report,
)
from hamu.evaluation.membership import auc_of
from hamu.files import MERGED
from hamu.models.language import (
    TINY,
    AdapterSettings,
    base_of,
    check_reads,
    load_language_model,
    load_tokenizer,
    longest_text,
    new_language_model,
    new_tokenizer,
    saved_adapter,
)
from hamu.models.storage import check_can_merge, check_is_saved, merged
from hamu.unlearning.jobs.options import OF_AN_ADAPTER, OriginalOptions, RunOptions
from hamu.unlearning.jobs.task import Task, evaluation_precision
from hamu.unlearning.run_folder import RunFolder
from hamu.unlearning.trainer import TrainConfig


class TextTask(Task[TextRecords, TextData, TokenPredictions]):
    """Causal language models."""

    noun = "records"
    batch_sizes: ClassVar[dict[str, int]] = {
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 16,
    }
    ways = ("forget_data", "forget_rows", "forget_filter")
    bundled = MINIATURE
    built_in = TINY
    has_test_split = staticmethod(has_test_split)
    tokenizer: Any = None

    def read(self, source: str, split: str) -> TextRecords:
        """Read records of text by the columns and templates that the options name; see `read_text`."""
        options = self.data_options
        return read_text(
            source,
            split,
            question_template=options.question_template,
            answer_prefix=options.answer_prefix,
            prompt_column=options.prompt_column,
            answer_column=options.answer_column,
        )

    def divide_by_own_option(
        self, train: TextRecords, test: TextRecords | None
    ) -> UnlearningData[TextRecords]:
        """Divide by a filter: the records that it finds are forgotten."""
        rows = matching(train, str(self.data_options.forget_filter))
        if not rows:
            raise HamuError(
                f"the forget set is empty: no record has {self.data_options.forget_filter}"
            )
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
        model, self.tokenizer = self.load_with_tokenizer(source, base=base)
        return model

    def load_with_tokenizer(
        self, source: str, adapter: AdapterSettings | None = None, base: str | None = None
    ) -> tuple[Any, Any]:
        """A saved model and its tokenizer, or that of --tokenizer; the task's own tokenizer stays.

        Args:
            source: where the model is.
            adapter: settings of the adapter that is to be trained, None to load the model as it is.
            base: see `load_model`.
        """
        options = self.run_options
        base, trusted = base or options.base_model, options.trust_remote_code
        model = load_language_model(
            source,
            base_model=base,
            adapter=adapter,
            dtype=options.model_dtype,
            trust_remote_code=trusted,
        )
        return model, load_tokenizer(options.tokenizer or source, base, trust_remote_code=trusted)

    def start_model(self, source: str) -> Any:
        """A saved model with its adapter, if it has or is to have one; its tokenizer is kept."""
        options = self.run_options
        adapter = AdapterSettings(
            options.lora_rank, options.lora_alpha, options.lora_dropout, options.lora_targets
        )
        model, self.tokenizer = self.load_with_tokenizer(source, adapter if options.lora else None)
        half = next(
            (n for n, p in model.named_parameters() if p.requires_grad and p.dtype.itemsize < 4),
            None,
        )
        if half is not None:
            raise HamuError(
                f"{half} would be trained in half precision, which loses small steps; leave --model_dtype at float32 "
                f"(--bf16 saves time and memory all the same), or train an adapter with --lora"
            )
        if options.merge and not hasattr(model, "peft_config"):
            raise HamuError(
                "there is no adapter to merge; leave --merge out, or train one with --lora"
            )
        if options.merge:
            check_can_merge(model)
        return model

    def base_of(self, source: str, base: str | None = None) -> str | None:
        """The base model that is named, or that a saved adapter names; None for a whole model."""
        return base_of(source, base or self.run_options.base_model)

    def check_models(self, options: OriginalOptions | None = None) -> None:
        """Check the models that are named, but for those of the hub; say of a base model if none of them needs it."""
        run = self.run_options
        named = [run.model, run.retain_model, None if options is None else options.original_model]
        models = [name for name in named if name is not None]
        for name in models:
            check_is_saved(name)
        is_needed = [is_of_hub(name) or self.base_of(name) is not None for name in models]
        if run.base_model not in (None, run.model) and not any(is_needed):
            self.console.print(
                f"base_model {run.base_model} is not used: none of the named models is an adapter",
                soft_wrap=True,
            )

    def settle_adapter(self, given: Collection[str]) -> None:
        """Check the settings of a new adapter, and put those of a saved one in their place."""
        _settle_adapter(self.run_options, given)

    def fitted(self, model: Any, *sets: TextRecords | None) -> list[TextData | None]:
        """The records as tokens, once it is sure that the model reads them; says which are cut."""
        longest = self.length_for(model)
        encoded = []
        for data in sets:
            tokens = (
                None
                if data is None
                else encode(data, self.tokenizer, longest, self.data_options.loss_on)
            )  # type: ignore[arg-type]
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
        """What pads the records of a batch to the same length."""
        return TextCollator()

    def predict(self, model: Any, data: TextData, args: TrainConfig) -> TokenPredictions:
        """The model's predictions for every token, in the precision of evaluations; see `predict_tokens`."""
        with evaluation_precision(args):
            return predict_tokens(model, data, args.eval_batch_size, self.collator())

    def report(
        self,
        predictions: Mapping[str, TokenPredictions],
        problem: UnlearningData[Any],
        reference: Mapping[str, TokenPredictions] | None,
        args: TrainConfig,
    ) -> dict[str, Any]:
        """The figures of `text_report`; with a retain model its own beside ours, and PrivLeak."""
        texts = {
            name: scored_texts(evaluated(data, args, name), self.data_options.loss_on)
            for name, data in problem.sets().items()
        }
        report = text_report(predictions, texts=texts)
        if reference is not None:
            report["retain_model"] = text_report(reference, texts=texts)
            report["privleak"] = _privleak(report)
        return report | further_figures(predictions, reference)

    def answers_of(
        self, model: Any, tokenizer: Any, texts: TextRecords, args: TrainConfig
    ) -> list[str]:
        """What a model answers to the prompts of these records; see `generate_answers`."""
        data = encode(texts, tokenizer, self.length_for(model))
        with evaluation_precision(args):
            return generate_answers(model, tokenizer, data, args.eval_batch_size)

    def length_for(self, model: Any) -> int:
        """The most tokens of a record: what was asked for, or what the model can read."""
        return min(
            self.data_options.max_length, longest_text(model) or self.data_options.max_length
        )

    def beside_model(self) -> list[Any]:
        """The tokenizer."""
        return [self.tokenizer]

    def save_merged(self, folder: RunFolder, model: Any) -> None:
        """Save the adapter merged into its model, if asked for; the model is used up."""
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


def evaluated(data: TextData | TextRecords, args: TrainConfig, name: str = "retain") -> TextRecords:
    """The records of a set that an evaluation looks at, in its order; of a run with targets all that are forgotten."""
    whole = name == "forget" and getattr(args, "forget_objective", None) == "bounded"
    return some_records(data, None if whole else getattr(args, "max_eval_samples", None), args.seed)


def some_records(data: TextData | TextRecords, most: int | None, seed: int) -> TextRecords:
    """At most this many records of a set, drawn at random; see `draw_positions`."""
    texts = data.texts if isinstance(data, TextData) else data
    positions = draw_positions(len(texts), most, seed)
    return texts if positions is None else texts.select(positions)


_AS_PEFT = {"lora_rank": "r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout"}


def _settle_adapter(run: RunOptions, given: Collection[str]) -> None:
    """Check the settings of a new adapter; of a saved one put its own in their place.

    Args:
        run: the options of a run, which is to train.
        given: the names of those that were given.

    Raises:
        HamuError: if one was given that can have no effect.
    """
    source = str(run.model)
    saved = saved_adapter(source)
    if saved is not None:
        own = _own(saved)
        if "lora" in given and not run.lora:
            raise HamuError(
                f"{source} is an adapter, which alone is trained; leave out --lora False"
            )
        for name in OF_AN_ADAPTER:
            if name not in given:
                setattr(run, name, own[name])
            elif own[name] is not None and _plain(getattr(run, name)) != _plain(own[name]):
                raise HamuError(
                    f"{name} {getattr(run, name)} is for a new adapter, but {source} is one with {name} {own[name]}; "
                    f"give that, or leave it out"
                )
        run.lora = True
    elif "lora" not in given:
        for name in OF_AN_ADAPTER:
            if name in given:
                raise HamuError(
                    f"{name} {getattr(run, name)} is for a new adapter; give --lora too, or leave it out"
                )


def _own(saved: dict[str, Any]) -> dict[str, Any]:
    """The settings of a saved adapter by our names, None for what its kind has not."""
    targets = saved.get("target_modules")
    named = ",".join(sorted(targets)) if isinstance(targets, list) else targets
    return {name: saved.get(key) for name, key in _AS_PEFT.items()} | {"lora_targets": named}


def _plain(value: Any) -> Any:
    """Targets in any order are the same."""
    return sorted(name.strip() for name in value.split(",")) if isinstance(value, str) else value
