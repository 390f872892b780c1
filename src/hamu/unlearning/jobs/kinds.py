"""Tasks of images and of texts: reading, loading, fitting data to a model, reporting."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console

from hamu.data import (
    ImageData,
    TextCollator,
    TextData,
    TextRecords,
    UnlearningData,
    encode,
    forget_class,
    forget_rows,
    matching,
    pixel_statistics,
    read_images,
    read_text,
    text,
)
from hamu.data.forget_sets import draw_positions
from hamu.data.images import collate, has_test_split
from hamu.data.sources import DIGITS, MINIATURE, is_of_hub
from hamu.errors import HamuError
from hamu.evaluation import (
    Predictions,
    TokenPredictions,
    classifier_report,
    generate_answers,
    predict,
    predict_tokens,
    privleak,
    text_report,
)
from hamu.evaluation.membership import auc_of
from hamu.evaluation.reports import further_figures
from hamu.files import MERGED
from hamu.models import (
    check_fits,
    class_names,
    load_classifier,
    load_image_processor,
    new_classifier,
)
from hamu.models.classifiers import (
    CLASSIFIER_CONFIGS,
    NEW_CLASSIFIER,
    check_as_many_classes,
    named_as_in_training,
)
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
from hamu.unlearning.jobs.options import OF_AN_ADAPTER, DataOptions, RunOptions
from hamu.unlearning.jobs.settings import Settings
from hamu.unlearning.jobs.task import Task
from hamu.unlearning.run_folder import RunFolder

_AS_PEFT = {"lora_rank": "r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout"}


def choose_task(settings: Settings, console: Console) -> Task:
    """The task of `task_name`."""
    if settings.of(RunOptions).trust_remote_code:
        console.print(
            "code that comes with a model is run, and can do all that you can", style="yellow"
        )
    is_text = task_name(settings.of(DataOptions)) == "text"
    return TextTask(settings, console) if is_text else ImageTask(settings, console)


def task_name(data: DataOptions) -> str:
    """The task that --task names, or that the data's name shows: "image" or "text"."""
    if data.task == "auto":
        named = [] if data.data is None else [data.data, str(Path(data.data_dir or "") / data.data)]
        has_columns = data.prompt_column is not None or data.answer_column is not None
        return "text" if has_columns or any(map(text.is_text, named)) else "image"
    if data.task not in ("image", "text"):
        raise HamuError(f"task {data.task!r} is unknown; choose image, text or auto")
    return data.task


class ImageTask(Task):
    """Image classification."""

    noun = "images"
    ways = ("forget_class", "forget_rows", "forget_data")
    bundled = DIGITS
    built_in = NEW_CLASSIFIER
    has_test_split = staticmethod(has_test_split)
    processor: Any = None

    def __init__(self, settings: Settings, console: Console) -> None:
        super().__init__(settings, console)
        self._told: list[str] = []

    def _tell_once(self, text: str) -> None:
        """Print a text unless it has been printed before, of another model."""
        if text not in self._told:
            self.console.print(text, soft_wrap=True)
            self._told.append(text)

    def read(self, source: str, split: str) -> ImageData:
        names = ("image_size", "num_channels", "image_column", "label_column")
        data = read_images(source, split, **{name: getattr(self.data, name) for name in names})
        if data.left_out:
            self._tell_once(
                f"warning: files of {data.source} are left out ({len(data.left_out)}), first "
                f"{data.left_out[0]}; only images (by their endings, such as .png and .jpg) in a "
                f"folder per class are read"
            )
        return data

    def numbered(self, train: ImageData) -> ImageData:
        if not train.named or self.classes_of is None:
            return train
        names = class_names(self.classes_of)
        if names is None or not set(train.classes) <= set(names):
            return train
        return train.with_classes(names)

    def divide_by_own_option(self, train: ImageData, test: Any) -> UnlearningData[ImageData]:
        data = self.data
        return forget_class(train, test, str(data.forget_class), data.rho, data.forget_seed)

    def new_model(self, name: str, train: ImageData) -> Any:
        if len(train.classes) < 2:
            raise HamuError(
                f"{train.source} has one class alone, {train.classes[0]}; a classifier needs at "
                f"least two"
            )
        trusted = self.run.trust_remote_code
        model = new_classifier(name, train, *pixel_statistics(train), trust_remote_code=trusted)
        if not self.is_built_in(name):
            self.processor = self._processor_of(name)
            if named_as_in_training(model, train.classes):
                self._tell_once(
                    f"the model names none of the classes of {train.source}: its first "
                    f"{len(train.classes)} outputs are trained for these, and named so"
                )
        return model

    def check_models(self) -> None:
        models = self.named_models()
        for name in models.values():
            check_is_saved(name, CLASSIFIER_CONFIGS)
        for role, other in models.items():
            if role != "model" and "model" in models:
                check_as_many_classes(models["model"], other, role)

    def load_model(self, source: str, base: str | None = None) -> Any:
        model = load_classifier(source, trust_remote_code=self.run.trust_remote_code)
        self.processor = self._processor_of(source)
        return model

    def _processor_of(self, source: str) -> Any:
        """The image processor; None where there is none, or one that cannot be made here."""
        try:
            return load_image_processor(source, trust_remote_code=self.run.trust_remote_code)
        except HamuError as error:
            self._tell_once(f"warning: {error}")
            return None

    def fitted(self, model: Any, *sets: Any) -> list[Any]:
        for data in sets:
            if data is not None:
                check_fits(model, data)
        config = model.config
        if None in (getattr(config, "image_mean", None), getattr(config, "image_std", None)):
            training = [data for data in sets[:-1] if data is not None]
            config.image_mean, config.image_std = pixel_statistics(*training)
            self._tell_once(
                f"the model does not say how images are normalised; the mean and standard "
                f"deviation of {training[0].source} are used"
            )
        statistics = (config.image_mean, config.image_std)
        return [data if data is None else data.normalized(*statistics) for data in sets]

    def beside_model(self) -> list[Any]:
        return [] if self.processor is None else [self.processor]

    def collator(self) -> Callable[[Any], Mapping[str, Any]]:
        return collate

    def predict(self, model: Any, data: ImageData) -> Predictions:
        with self.evaluation_precision():
            return predict(model, data, self.args.eval_batch_size, collate)

    def report(
        self, predictions: Mapping[str, Any], problem: UnlearningData[Any], reference: Any
    ) -> dict[str, Any]:
        classes, target = problem.retain.classes, problem.target_class
        report = classifier_report(predictions, classes, target, reference, self.args.seed)
        return report | further_figures(predictions, reference)


class TextTask(Task):
    """Causal language models."""

    noun = "records"
    ways = ("forget_data", "forget_rows", "forget_filter")
    bundled = MINIATURE
    built_in = TINY
    batch_sizes: ClassVar[Mapping[str, int]] = {
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 16,
    }
    has_test_split = staticmethod(text.has_test_split)
    tokenizer: Any = None

    def read(self, source: str, split: str) -> TextRecords:
        names = ("question_template", "answer_prefix", "prompt_column", "answer_column")
        return read_text(source, split, **{name: getattr(self.data, name) for name in names})

    def divide_by_own_option(self, train: TextRecords, test: Any) -> UnlearningData[TextRecords]:
        rows = matching(train, str(self.data.forget_filter))
        if not rows:
            raise HamuError(f"the forget set is empty: no record has {self.data.forget_filter}")
        return forget_rows(train, test, rows)

    def new_model(self, name: str, train: TextRecords) -> Any:
        run = self.run
        if not self.is_built_in(name):
            self.check_models()
            return self.start_model(name)
        if run.lora or run.merge:
            raise HamuError(f"{TINY} is new and trained whole; leave --lora and --merge out")
        if run.tokenizer is None:
            self.tokenizer = new_tokenizer(r.prompt + r.answer for r in train.records)
        else:
            self.tokenizer = load_tokenizer(run.tokenizer, trust_remote_code=run.trust_remote_code)
        return new_language_model(self.tokenizer, max_length=self.data.max_length)

    def adapter(self) -> AdapterSettings | None:
        """Settings of the adapter to train; None to train the whole model."""
        run = self.run
        settings = (run.lora_rank, run.lora_alpha, run.lora_dropout, run.lora_targets)
        return AdapterSettings(*settings) if run.lora else None

    def load_model(
        self, source: str, base: str | None = None, adapter: AdapterSettings | None = None
    ) -> Any:
        run = self.run
        base, trusted = base or run.base_model, run.trust_remote_code
        model = load_language_model(
            source,
            base_model=base,
            adapter=adapter,
            dtype=run.model_dtype,
            trust_remote_code=trusted,
        )
        named = run.tokenizer or source
        self.tokenizer = load_tokenizer(named, base, trust_remote_code=trusted)
        return model

    def start_model(self, source: str) -> Any:
        model = self.load_model(source, adapter=self.adapter())
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.dtype.itemsize < 4:
                raise HamuError(
                    f"{name} would be trained in half precision, which loses small steps; leave "
                    f"--model_dtype at float32 (--bf16 saves time and memory all the same), or "
                    f"train an adapter with --lora"
                )
        if self.run.merge:
            if not hasattr(model, "peft_config"):
                raise HamuError(
                    "there is no adapter to merge; leave --merge out, or train one with --lora"
                )
            check_can_merge(model)
        return model

    def base_of(self, source: str, base: str | None = None) -> str | None:
        return base_of(source, base or self.run.base_model)

    def check_models(self) -> None:
        models = self.named_models().values()
        for name in models:
            check_is_saved(name)
        is_needed = [is_of_hub(name) or self.base_of(name) is not None for name in models]
        base = self.run.base_model
        if base not in (None, self.run.model) and not any(is_needed):
            self.console.print(
                f"base_model {base} is not used: none of the named models is an adapter",
                soft_wrap=True,
            )

    def settle_adapter(self) -> None:
        run, source = self.run, str(self.run.model)
        saved = saved_adapter(source)
        given = [name for name in OF_AN_ADAPTER if name in self.given]
        if saved is None:
            if given and "lora" not in self.given:
                raise HamuError(
                    f"{given[0]} {getattr(run, given[0])} is for a new adapter; give --lora too, "
                    f"or leave it out"
                )
            return
        if "lora" in self.given and not run.lora:
            raise HamuError(
                f"{source} is an adapter, which alone is trained; leave out --lora False"
            )
        run.lora = True
        targets = saved.get("target_modules")
        own = {name: saved.get(key) for name, key in _AS_PEFT.items()}
        own["lora_targets"] = ",".join(sorted(targets)) if isinstance(targets, list) else targets
        for name, value in own.items():
            if name not in given:
                setattr(run, name, value)
            elif value is not None and _plain(getattr(run, name)) != _plain(value):
                raise HamuError(
                    f"{name} {getattr(run, name)} is for a new adapter, but {source} is one with "
                    f"{name} {value}; give that, or leave it out"
                )

    def fitted(self, model: Any, *sets: Any) -> list[Any]:
        longest = self.length_for(model)
        encoded: list[TextData | None] = []
        for data in sets:
            if data is None:
                encoded.append(None)
                continue
            tokens = encode(data, self.tokenizer, longest, self.data.loss_on)  # type: ignore[arg-type]
            check_reads(model, tokens)
            if tokens.truncated:
                self.console.print(
                    f"{tokens.truncated} of {len(tokens)} records of {tokens.texts.source} are "
                    f"longer than {longest} tokens and were cut; --max_length sets it"
                )
            encoded.append(tokens)
        return encoded

    def collator(self) -> Callable[[Any], Mapping[str, Any]]:
        return TextCollator()

    def predict(self, model: Any, data: TextData) -> TokenPredictions:
        with self.evaluation_precision():
            return predict_tokens(model, data, self.args.eval_batch_size, self.collator())

    def report(
        self, predictions: Mapping[str, Any], problem: UnlearningData[Any], reference: Any
    ) -> dict[str, Any]:
        texts = {
            name: scored_texts(self.some_records(data, self.limit(name)), self.data.loss_on)
            for name, data in problem.sets().items()
        }
        report = text_report(predictions, texts=texts)
        if reference is not None:
            report["retain_model"] = text_report(reference, texts=texts)
            report["privleak"] = privleak_of(report)
        return report | further_figures(predictions, reference)

    def some_records(self, data: TextData | TextRecords, most: int | None) -> TextRecords:
        """At most this many records of a set, drawn at random; see `draw_positions`."""
        texts = data.texts if isinstance(data, TextData) else data
        positions = draw_positions(len(texts), most, self.args.seed)
        return texts if positions is None else texts.select(positions)

    def answers_of(self, model: Any, tokenizer: Any, texts: TextRecords) -> list[str]:
        """The model's answers to the prompts of these records; see `generate_answers`."""
        data = encode(texts, tokenizer, self.length_for(model))
        with self.evaluation_precision():
            return generate_answers(model, tokenizer, data, self.args.eval_batch_size)

    def length_for(self, model: Any) -> int:
        """The most tokens of a record: as asked for, or as many as the model reads."""
        return min(self.data.max_length, longest_text(model) or self.data.max_length)

    def beside_model(self) -> list[Any]:
        return [self.tokenizer]

    def save_merged(self, folder: RunFolder, model: Any) -> None:
        if self.run.merge:
            folder.save_model(merged(model), self.tokenizer, name=MERGED)


def privleak_of(report: Mapping[str, Any]) -> float | None:
    """PrivLeak in MUSE's orientation; None without both AUCs, or where the retain model's is 1."""
    ours, theirs = auc_of(report), auc_of(report["retain_model"])
    if ours is None or theirs is None or theirs == 1:
        return None
    return privleak(1 - ours, 1 - theirs)


def scored_texts(data: TextRecords, loss_on: str) -> list[str]:
    """The part of each record that the loss is taken of: its answer, or all of it."""
    return [((r.prompt if loss_on == "all" else "") + r.answer).strip() for r in data.records]


def _plain(value: Any) -> Any:
    """Targets in any order are the same."""
    return sorted(name.strip() for name in value.split(",")) if isinstance(value, str) else value
