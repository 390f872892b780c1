"""Tasks of images and of texts: read a problem, load models, fit data to them, report figures."""

import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import yaml
from PIL.Image import Resampling
from rich.console import Console

from hamu.core.distributed import is_main
from hamu.data import ImageData, TextData, TextRecords, forget_sets, images, text
from hamu.errors import HamuError, counted, reading
from hamu.evaluation.answers import generate_answers
from hamu.evaluation.membership import privleak
from hamu.evaluation.predictions import predict, predict_tokens, splits_alike
from hamu.evaluation.reports import classifier_report, further_figures, text_report
from hamu.files import CONFIG, DIGITS, INPUTS, MINIATURE, existing, is_local, located
from hamu.models import classifiers, language, storage
from hamu.unlearning.goals import OTHER_TOKENS, check_goal_has
from hamu.unlearning.jobs.options import OF_AN_ADAPTER, TOFU_SETS, DataOptions, RunOptions
from hamu.unlearning.jobs.settings import Settings
from hamu.unlearning.record import inputs as recorded
from hamu.unlearning.record.inputs import Inputs, digests_in, read_inputs, set_entries
from hamu.unlearning.run_folder import RunFolder
from hamu.unlearning.trainer import TrainConfig, UnlearnConfig
from hamu.unlearning.trainer.resumable import to_channels_last

Problem = forget_sets.UnlearningData[Any]
Figures = dict[str, Any]
WAYS = ("forget_class", "forget_rows", "forget_data", "forget_filter")
_OF_IMAGES = ("image_size", "num_channels", "image_column", "label_column")
_OF_TEXTS = (
    *("prompt_column", "answer_column", "alternative_column", "base_model", "tokenizer"),
    *("model_dtype", "load_in_4bit", "lora", "merge", *OF_AN_ADAPTER),
    *("question_template", "answer_prefix", "loss_on", "max_length"),
    *("lm_eval", "format", *TOFU_SETS),
)
_IN_PEFT = {"lora_rank": "r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout"}
_OF_ONE_TASK = (".json", ".jsonl", ".npz")  # endings


def choose_task(settings: Settings, console: Console) -> "Task":
    """The task of `task_name`."""
    if settings.of(RunOptions).trust_remote_code:
        warning = "code that comes with a model is run, and can do all that you can"
        console.print(warning, style="yellow")
    data = settings.of(DataOptions)
    if data.task == "auto" and data.data is not None and is_local(data.data):
        place = located(data.data, data.data_dir)
        if Path(place).suffix.lower() not in _OF_ONE_TASK:
            existing(place)  # a guess would refuse options of the other task
    is_text = task_name(data) == "text"
    return TextTask(settings, console) if is_text else ImageTask(settings, console)


def task_name(data: DataOptions) -> str:
    """The task that --task names, or that the data's name shows: "image" or "text"."""
    if data.task == "auto":
        if data.image_column is not None or data.label_column is not None:
            return "image"
        has_columns = data.prompt_column is not None or data.answer_column is not None
        if has_columns or data.data is None:
            return "text" if has_columns else "image"
        return "text" if text.is_text(located(data.data, data.data_dir)) else "image"
    if data.task not in ("image", "text"):
        raise HamuError(f"task {data.task!r} is unknown; choose image, text or auto")
    return data.task


class Task:
    """One kind of data and model, with the options of a job.

    Labels are numbered as by the saved model `classes_of`.
    """

    noun: str  # for its records
    ways: tuple[str, ...]  # the options that name the forget set
    bundled: str  # the data that come with this package
    built_in: str  # names of the models that `hamu train` makes, a regular expression
    configs: tuple[str, ...]  # a saved model has one of these files
    reads: tuple[str, ...]  # the options of reading
    foreign: tuple[str, ...]  # options that are for the other kind
    predictor: Callable[..., Any]
    has_test_split: Callable[[str], bool]
    read: Callable[[str, str], Any]  # a data set, by its source and its split
    new_model: Callable[[str, Any], Any]  # to be trained on these records
    load_model: Callable[..., Any]  # a saved one as it is; an adapter on its base, if that is given
    # training sets and then test data (None stays None) in the form that the model takes
    fitted: Callable[..., list[Any]]
    # figures of a model, from its predictions for each set and those of a retain model
    report: Callable[[Mapping[str, Any], Problem, Any], Figures]
    processor: Any = None  # of images, or
    tokenizer: Any = None  # of texts, saved with a model so that it can be opened again

    def __init__(self, settings: Settings, console: Console) -> None:
        self.settings, self.console, self.given = settings, console, settings.given
        self.data, self.run = settings.of(DataOptions), settings.of(RunOptions)
        self.args = settings.of(TrainConfig)
        is_text, has_retain_model = isinstance(self, TextTask), self.run.retain_model is not None
        self.args.settle_batch_sizes(is_text=is_text)
        goal = settings.value("goal")  # of which flags alone tell
        check_goal_has(goal, has_retain_model=has_retain_model, is_text=is_text)
        self.original_model: str | None = settings.value("original_model")
        self.classes_of = self.run.model
        for name in self.foreign:
            if self.given.get(name):
                raise HamuError(f"{name} {self.given[name]} is not for {self.noun}; leave it out")
        self.reading = {name: getattr(self.data, name) for name in self.reads}
        self.located = partial(located, data_dir=self.data.data_dir)
        self.trust: dict[str, Any] = {"trust_remote_code": self.run.trust_remote_code}
        self._told: set[str] = set()
        self._weights_digest = cache(recorded.weights_digest)

    def predict(self, model: Any, data: Any) -> Any:
        """The model's predictions for a data set, in the precision of evaluations."""
        with self.evaluation_precision():
            return self.predictor(model, data, self.args.eval_batch_size)

    def beside_model(self) -> list[Any]:
        return [part for part in (self.processor, self.tokenizer) if part is not None]

    def start_model(self, source: str) -> Any:
        """A saved model, ready to be changed."""
        return self.load_model(source)

    def base_of(self, source: str, base: str | None = None) -> str | None:
        """The base model of an adapter; None for any other model."""
        return None

    def dtype(self) -> str:
        return "float32"

    def settle_adapter(self) -> None:
        """Check the settings of a new adapter, and put those of a saved one in their place."""

    def tell(self, said: str) -> None:
        """Print a line, once for all models."""
        if said not in self._told:
            self.console.print(said, soft_wrap=True)
            self._told.add(said)

    def tell_unused(self, where: str, names: set[str], options: Mapping[str, Any]) -> None:
        """Name those of the options given that have no effect."""
        if unused := sorted(names & options.keys()):
            self.tell(f"without effect {where}: {', '.join(unused)}")

    def is_built_in(self, model: str) -> bool:
        """True if `hamu train` makes a new model by this name, whatever folder is called so."""
        return re.fullmatch(self.built_in, model) is not None

    def named_models(self) -> dict[str, str]:
        run = self.run
        named = {"model": run.model, "retain": run.retain_model, "original": self.original_model}
        return {role: name for role, name in named.items() if name is not None}

    def check_models(self) -> None:
        for name in self.named_models().values():
            storage.check_is_saved(name, self.configs)

    def folder(self) -> RunFolder:
        place, how = str(self.args.output_dir), self.run
        sources = self.sources()
        return RunFolder(place, overwrite=how.overwrite, resume=how.resume, sources=sources)

    def start(self) -> tuple[RunFolder, Problem]:
        """The output folder and the problem, of a command that has a model."""
        if self.run.model is None:
            raise HamuError("name the model with --model: one of hamu train, or hub:OWNER/NAME")
        folder, problem = self.folder(), self.problem()
        self.check_models()
        self._check_retain_model(problem)
        return folder, problem

    def _check_retain_model(self, problem: Problem) -> None:
        """Warn of a retain model that is another model too, or whose run trained on other data."""
        source, wrong = self.run.retain_model, ""
        if source is None:
            return
        named = self.named_models().items()
        others = {Path(name).resolve() for role, name in named if role != "retain"}
        if self.trained_on_others(source, problem):
            wrong = "was trained on other records than the retain set, by its inputs.json: "
            wrong += "comparisons with it may not hold"
        if Path(source).resolve() in others:
            wrong = "is also one of the models that are compared with it: no comparison holds"
        if wrong:
            self.tell(f"warning: the retain model {source} {wrong}")

    def trained_on_others(self, source: str, problem: Problem) -> bool:
        """True for a model that a run of ours did not train on the retain set."""
        folder = Path(source).parent
        if not all((folder / name).is_file() for name in (CONFIG, INPUTS)):
            return False
        retain = set_entries("retain", problem.retain)["retain set"]
        return digests_in(read_inputs(folder).get("training set")) != digests_in(retain)

    def _check_was_trained_on(self, read: Any, problem: Problem) -> None:
        """Warn of a model that a run of ours trained neither on what was read nor on its rest."""
        model, began = Path(str(self.run.model)), None
        if model.is_dir() and (model.parent / INPUTS).is_file():
            with suppress(HamuError):  # a damaged file tells nothing
                began = read_inputs(model.parent).get("training set")
        both = (set_entries("its", one)["its set"] for one in (read, problem.retain))
        if began is not None and digests_in(began) not in map(digests_in, both):
            size = ", or images of another size" * isinstance(problem.retain, ImageData)
            self.tell(
                f"warning: the model {model} was trained on other records than {self.data.data}"
                f"{size}, by its inputs.json"
            )

    def problem(self) -> Problem:
        """Read the training and test data and divide them as the options say.

        Test records that are among the others are left out, as they were trained on.
        """
        data, way = self.data, self.chosen_by()
        sets = self.train_and_test()
        if way == "forget_class":
            name, seed = str(data.forget_class), data.forget_seed
            problem: Problem = forget_sets.forget_class(*sets, name, data.rho, seed)
        elif way == "forget_data":
            forget = self.read(self.located(str(data.forget_data)), "train")
            problem = forget_sets.forget_data(*sets, forget, data.allow_missing)
        elif way == "forget_rows":
            rows = forget_sets.parse_rows(str(data.forget_rows))
            problem = forget_sets.forget_rows(*sets, rows)
        else:
            rows = forget_sets.matching(sets[0], str(data.forget_filter))
            if not rows:
                raise HamuError(f"the forget set is empty: no record has {data.forget_filter}")
            problem = forget_sets.forget_rows(*sets, rows)
            problem = replace(problem, forget_name=f"{counted(len(rows), self.noun)} of a filter")
        copies, nouns = 0 if way == "forget_data" else problem.copies(), self.noun
        of_all = f"of {len(problem.forget)} {nouns} to forget"
        unseen = problem.without_known_tests()
        known = len(problem.test or ()) - len(unseen.test or ())
        kept, seen = unseen.near_copies() if isinstance(unseen.retain, TextRecords) else (0, 0)
        like = "but for case or punctuation"
        for count, said in (
            (problem.not_found, f"{of_all} are not found in {data.data}"),
            (copies, f"{nouns} to retain equal some to forget; --forget_data takes out all copies"),
            (known, f"test {nouns} are among those to retain or to forget and are left out"),
            (kept, f"{nouns} to retain equal some to forget {like}, and hold the same"),
            (seen, f"test {nouns} equal some to retain or to forget {like}: they are not unseen"),
        ):
            if count:
                self.tell(f"warning: {count} {said}")
        self._check_was_trained_on(sets[0], problem)
        return replace(unseen, kept_copies=copies)

    def announce(self, problem: Problem, more: str) -> None:
        forget = f"forget {counted(len(problem.forget), self.noun)} ({problem.forget_name})"
        self.console.print(f"{forget}, retain {len(problem.retain)}{more}")

    def chosen_by(self) -> str:
        chosen = [name for name in WAYS if getattr(self.data, name) is not None]
        if len(chosen) != 1 or chosen[0] not in self.ways:
            flags = ", ".join(f"--{name}" for name in self.ways)
            given = " and ".join(f"--{name}" for name in chosen) or "nothing"
            raise HamuError(f"say what to forget of {self.noun} with one of {flags}; got {given}")
        for name, way in (("rho", "forget_class"), ("allow_missing", "forget_data")):
            if getattr(self.data, name) and chosen != [way]:
                raise HamuError(f"{name} is for --{way}; leave it out with --{chosen[0]}")
        return chosen[0]

    def train_and_test(self) -> tuple[Any, Any]:
        data, place = self.data, self.data.data_dir
        if data.data is None:
            known = f"{self.bundled}, a file, a folder, or hub:OWNER/NAME"
            raise HamuError(f"name the training data with --data: {known}")
        named = [data.data, *filter(None, (data.test_data, data.forget_data))]
        if place is not None and not any(map(is_local, named)):
            raise HamuError(f"--data_dir {place} has no effect on {' and '.join(named)}")
        source = self.located(data.data)
        train = self.read(source, "train")
        if data.test_data is not None:
            return train, train.matched(self.read(self.located(data.test_data), "test"))
        has_test = self.has_test_split(source)
        return train, train.matched(self.read(source, "test")) if has_test else None

    def data_sources(self) -> list[str]:
        data = self.data
        named = (data.data, data.test_data, data.forget_data)
        found = [self.located(name) for name in named if name is not None]
        is_file = data.forget_rows and not forget_sets.lists_rows(data.forget_rows)
        return [*found, str(data.forget_rows)] if is_file else found

    def sources(self) -> tuple[str, ...]:
        """The local files and folders that are read, which no run may write into."""
        models = [*self.named_models().values(), self.run.base_model, self.run.tokenizer]
        if self.classes_of is None:  # a new model
            models.remove(self.run.model)
        models += [language.adapter_base(model) for model in models if model is not None]
        others = [self.settings.value(name) for name in (*TOFU_SETS, "unrelated_data")]
        found = [*self.data_sources(), *(self.located(name) for name in others if name), *models]
        return tuple(name for name in found if name is not None and is_local(name))

    def inputs(self, sets: Mapping[str, Any], models: Mapping[str, str | None]) -> Inputs:
        """Digests of the fitted sets and the saved models that a run reads; None for none."""
        entries: dict[str, Any] = {}
        for name, data in sets.items():
            entries |= set_entries(name, data)
        for name, source in models.items():
            entry = source and recorded.saved_model_entry(source, self.base_of(source))
            entries[f"{name} model"] = entry
        original = models["original"]
        entries |= recorded.reading_entries(sets, original, original and self.base_of(original))
        return entries

    def inputs_of(self, problem: Problem, of: tuple[str, ...] = ("original", "retain")) -> Inputs:
        """Digests of a fitted problem, and of the original model and the retain model."""
        sets = {"forget": problem.forget, "retain": problem.retain, "test": problem.test}
        models = {"original": self.run.model, "retain": self.run.retain_model}
        return self.inputs(sets, {role: models[role] for role in of})

    def fitted_problem(self, model: Any, problem: Problem) -> Problem:
        retain, forget, test = self.fitted(model, problem.retain, problem.forget, problem.test)
        return replace(problem, retain=retain, forget=forget, test=test)

    def on_device(self, model: Any) -> Any:
        """The model on the device; channels last as in training, which changes the last digits."""
        model = model.to(self.args.device)
        if self.args.channels_last:
            to_channels_last(model)
        return model

    def predictions(
        self,
        source: str,
        problem: Problem,
        most: int | None = None,
        base: str | None = None,
        *,
        only: Collection[str] = ("retain", "forget", "test"),
    ) -> tuple[Any, Figures]:
        """A saved model, and its predictions for each set: for `most` records, and `limit`."""
        model, found = self.on_device(self.load_model(source, base)), {}
        for name, data in self.fitted_problem(model, problem).sets().items():
            if name in only:
                limits = [one for one in (most, self.limit(name)) if one is not None]
                some = forget_sets.subset(data, min(limits, default=None), self.args.seed)
                found[name] = self.predict(model, some)
        return model, found

    def limit(self, name: str) -> int | None:
        """The most records of a set that evaluations look at; None for all."""
        return self.args.most_evaluated(name) if isinstance(self.args, UnlearnConfig) else None

    def evaluates_in_half(self) -> bool:
        """True if evaluations run under autocast, as training does."""
        full = isinstance(self.args, UnlearnConfig) and self.args.full_precision_eval
        return (self.args.bf16 or self.args.fp16) and not full

    def evaluation_precision(self) -> AbstractContextManager[None]:
        """Precision of evaluations; the forward of a trained model has autocast already."""
        half = torch.float16 if self.args.fp16 else torch.bfloat16
        return torch.autocast(self.args.device.type, half, enabled=self.evaluates_in_half())


class ImageTask(Task):
    """Image classification."""

    noun = "images"
    ways = ("forget_class", "forget_rows", "forget_data")
    bundled = DIGITS
    built_in = classifiers.NEW_CLASSIFIER
    configs = (storage.CONFIG,)
    reads = _OF_IMAGES
    foreign = _OF_TEXTS
    predictor = staticmethod(predict)
    has_test_split = staticmethod(images.has_test_split)

    def read(self, source: str, split: str) -> ImageData:
        data = images.read_images(source, split, **self.reading)
        if split == "train" and self.classes_of is not None:
            classes = classifiers.class_names(self.classes_of)
            if classes is not None and set(data.classes) <= set(classes):
                return data.with_classes(classes)
        return data

    def new_model(self, name: str, train: ImageData) -> Any:
        if len(train.classes) < 2:
            only = f"{train.source} has one class alone, {train.classes[0]}"
            raise HamuError(f"{only}; a classifier needs at least two")
        statistics = images.pixel_statistics(train)
        model = classifiers.new_classifier(name, train, *statistics, **self.trust)
        if not self.is_built_in(name):
            self._load_processor(name)
            if classifiers.named_as_in_training(model, train.classes):
                outputs = f"its first {len(train.classes)} outputs are trained for these"
                self.tell(f"the model names no class of {train.source}: {outputs}, and named so")
        return model

    def check_models(self) -> None:
        super().check_models()
        models = self.named_models()
        for role in models.keys() - {"model"} if "model" in models else ():
            classifiers.check_as_many_classes(models["model"], models[role], role)

    def load_model(self, source: str, base: str | None = None) -> Any:
        model = classifiers.load_classifier(source, **self.trust)
        self._load_processor(source)
        return model

    def _load_processor(self, source: str) -> None:
        self.processor = None
        try:
            self.processor = classifiers.load_image_processor(source, **self.trust)
        except HamuError as error:
            self.tell(f"warning: {error}")

    def fitted(self, model: Any, *sets: Any) -> list[Any]:
        for data in sets:
            if data is not None:
                classifiers.check_fits(model, data)
        config = model.config
        if None in (getattr(config, "image_mean", None), getattr(config, "image_std", None)):
            training = [data for data in sets[:-1] if data is not None]
            config.image_mean, config.image_std = images.pixel_statistics(*training)
            used = f"the mean and standard deviation of {training[0].source} are used"
            self.tell(f"the model does not say how images are normalised; {used}")
        statistics = (config.image_mean, config.image_std)
        found = [data if data is None else data.normalized(*statistics) for data in sets]
        if self.processor is not None:
            bilinear = getattr(self.processor, "resample", None) in (None, Resampling.BILINEAR)
            if self.data.image_size and not bilinear:
                self.tell(
                    f"warning: the image processor of {model.name_or_path} does not resize "
                    f"bilinearly, as --image_size does; figures hold for images so resized"
                )
            first, source = next(data for data in found if data is not None), model.name_or_path
            if not classifiers.prepares_as(self.processor, first, source):
                self.tell(
                    f"warning: the image processor of {source} crops, resizes or normalises "
                    f"otherwise; figures hold for images taken whole"
                )
        return found

    def report(self, predictions: Mapping[str, Any], problem: Problem, reference: Any) -> Figures:
        classes, target = problem.retain.classes, problem.target_class
        report = classifier_report(predictions, classes, target, reference, self.args.seed)
        report["metrics"] |= further_figures(predictions, reference, report["metrics"])
        return report


class TextTask(Task):
    """Causal language models."""

    noun = "records"
    ways = ("forget_data", "forget_rows", "forget_filter")
    bundled = MINIATURE
    built_in = language.TINY
    configs = storage.CONFIGS
    reads = ("question_template", "answer_prefix", "prompt_column", "answer_column")
    foreign = _OF_IMAGES
    predictor = staticmethod(predict_tokens)
    has_test_split = staticmethod(text.has_test_split)

    def read(self, source: str, split: str) -> TextRecords:
        found = text.read_text(source, split, **self.reading)
        named = {self.data.prompt_column, "question", "instruction"} & {*found.records[0].fields}
        if not named and self.given.keys() & {"question_template", "answer_prefix"}:
            template = "question_template and answer_prefix"
            self.tell(f"{template} are not used: {source} has no questions")
        return found

    def check_models(self) -> None:
        super().check_models()
        base, models = self.run.base_model, self.named_models().values()
        if base is not None and not any(map(language.saved_adapter, models)):
            self.tell(f"base_model {base} has no effect: no model is an adapter")
        for source in models if is_main() else ():
            self._check_base(source)

    def _check_base(self, source: str) -> None:
        """Warn of an adapter that a run of ours made for a base of other weights or precision."""
        base, run = self.base_of(source), Path(source).parent
        if base is None or not is_local(base) or not (run / INPUTS).is_file():
            return
        with suppress(HamuError):  # a damaged file tells nothing
            began = read_inputs(run).get("original model")
            if began and began.get("weights") != self._weights_digest(Path(base)):
                self.tell(
                    f"warning: the base model {base} has other weights than the adapter {source} "
                    f"was made for, by its inputs.json"
                )
            with reading(f"{run / CONFIG} cannot be read"):
                own = yaml.safe_load((run / CONFIG).read_text("utf-8"))
                is_packed = bool(dict(own or {}).get("load_in_4bit"))
            if is_packed and not self.run.load_in_4bit:
                self.tell(
                    f"warning: the run that made {source} had its base in 4 bits; figures differ "
                    f"without --load_in_4bit"
                )

    def new_model(self, name: str, train: TextRecords) -> Any:
        run = self.run
        if not self.is_built_in(name):
            self.check_models()
            return self.start_model(name)
        for option in ("lora", "merge", "load_in_4bit", "model_dtype"):
            if getattr(run, option):
                raise HamuError(f"{name} is new and trained whole, in float32; leave {option} out")
        if run.tokenizer is None:
            self.tokenizer = language.new_tokenizer(r.prompt + r.answer for r in train.records)
        else:
            self.load_tokenizer(name)
        return language.new_language_model(self.tokenizer, max_length=self.data.max_length)

    def load_tokenizer(self, model: str, base: str | None = None) -> Any:
        self.tokenizer = language.load_tokenizer(self.run.tokenizer or model, base, **self.trust)
        if self.tokenizer.eos_token_id is None:
            self.tell(
                "the tokenizer has no end token: answers run on to their limit, which counts in "
                "ROUGE-L F1 and as gibberish"
            )
        return self.tokenizer

    def adapter_of(self, source: str) -> language.AdapterSettings | None:
        """Settings of the adapter to train on a model; None to train all that is there."""
        run = self.run
        if run.lora:
            return language.AdapterSettings(*[getattr(run, name) for name in OF_AN_ADAPTER])
        if (run.load_in_4bit or run.merge) and self.base_of(source) is None:
            if run.load_in_4bit:
                raise HamuError("weights in 4 bits cannot be trained; train an adapter with --lora")
            raise HamuError("there is no adapter to merge; leave --merge out, or give --lora")
        return None

    def load_model(self, source: str, base: str | None = None, adapter: Any = None) -> Any:
        base, dtype = base or self._given_base(source), self.dtype()
        model = language.load_language_model(
            source, base_model=base, adapter=adapter, dtype=dtype, **self.trust
        )
        self.load_tokenizer(source, base)
        return model

    def start_model(self, source: str) -> Any:
        model = self.load_model(source, adapter=self.adapter_of(source))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self.check_trained_in(parameter.dtype, name)
        return model

    def check_trained_in(self, dtype: torch.dtype, name: str) -> None:
        """Check that a parameter of this name and type keeps small steps; a HamuError if not."""
        if dtype.itemsize < 4:
            why = f"{name} would be trained in half precision, which loses small steps"
            raise HamuError(f"{why}; leave --model_dtype out (use --bf16), or give --lora")

    def dtype(self) -> str:
        run = self.run
        if run.load_in_4bit and run.model_dtype is not None:
            raise HamuError(
                f"load_in_4bit and model_dtype {run.model_dtype} exclude each other; leave one out"
            )
        if run.load_in_4bit:
            return language.FOUR_BIT
        has_adapter = run.lora or storage.is_adapter(str(run.model))
        return run.model_dtype or language.default_dtype(has_adapter=has_adapter)

    def base_of(self, source: str, base: str | None = None) -> str | None:
        return language.base_of(source, base or self._given_base(source))

    def _given_base(self, source: str) -> str | None:
        """The base model given, of --model and the original; of others where their own is gone."""
        given, own = self.run.base_model, language.adapter_base(source)
        if given is None or own is None or language.place_of(given) == language.place_of(own):
            return given
        is_meant = source in (str(self.run.model), self.original_model)
        how = f"--base_model puts it on {given}" if is_meant else "it stays there"
        self.tell(f"the adapter {source} is of {own}; {how}")
        return given if is_meant else None

    def settle_adapter(self) -> None:
        run, source = self.run, str(self.run.model)
        saved = language.saved_adapter(source)
        given = {name: getattr(run, name) for name in OF_AN_ADAPTER if name in self.given}
        if saved is None:
            for name, value in given.items() if "lora" not in self.given else ():
                raise HamuError(f"{name} {value} is for a new adapter; give --lora too")
            return
        if "lora" in self.given and not run.lora:
            raise HamuError(f"{source} is an adapter, which is trained; leave out --lora False")
        run.lora = True
        targets = saved.get("target_modules")
        own = {name: saved.get(key) for name, key in _IN_PEFT.items()}
        own["lora_targets"] = ",".join(sorted(targets)) if isinstance(targets, list) else targets
        for name, value in own.items():
            if name not in given:
                setattr(run, name, value)
            elif value is not None and _in_order(given[name]) != _in_order(value):
                new = f"{name} {given[name]} is for a new adapter"
                raise HamuError(f"{new}, but {source} is one with {name} {value}; leave it out")

    def fitted(self, model: Any, *sets: Any) -> list[Any]:
        return [None if data is None else self._encoded(model, data) for data in sets]

    def _encoded(self, model: Any, data: TextRecords) -> TextData:
        longest = self.length_for(model)
        tokens = text.encode(data, self.tokenizer, longest, self.data.loss_on)  # type: ignore[arg-type]
        language.check_reads(model, tokens)
        if tokens.truncated:
            cut = f"{tokens.truncated} of {len(tokens)} records of {tokens.texts.source}"
            is_asked = longest == self.data.max_length and longest != language.longest_text(model)
            more = "raise --max_length, or " if is_asked else "the model reads no more, so "
            way = f"only these are read; {more}divide the records"
            self.tell(f"{cut} are cut to {longest} tokens, and {way}")
        earlier = [
            any(message.get("role") == "assistant" for message in record.messages[:-1])
            for record in data.records
        ]
        if any(earlier) and self.data.loss_on != "all":
            some = f"{sum(earlier)} of {len(earlier)} conversations of {data.source}"
            way = "make each answer a record of its own, or give --loss_on all"
            self.tell(f"{some} answer before their last message, which alone counts; {way}")
        return tokens

    def fitted_problem(self, model: Any, problem: Problem) -> Problem:
        fitted = super().fitted_problem(model, problem)
        column = self.data.alternative_column
        if not isinstance(self.args, UnlearnConfig) or not self.args.needs_alternatives:
            if column is not None:
                self.tell(f"alternative_column {column} is not read: no other answer is needed")
            return fitted
        others = problem.forget.alternatives(column)
        (encoded,) = self.fitted(model, others)
        return replace(fitted, forget=replace(fitted.forget, alternatives=encoded))

    def report(self, predictions: Mapping[str, Any], problem: Problem, reference: Any) -> Figures:
        sets = {name: data for name, data in problem.sets().items() if name != "retain"}
        texts = {}
        for name, data in sets.items():
            measured, most = self.some_records(data, self.limit(name)), predictions[name].lengths
            texts[name] = cut_texts(measured, self.tokenizer, self.data.loss_on, most.tolist())
        is_alike = splits_alike(predictions["forget"], (reference or predictions)["forget"])
        if not is_alike:
            self.tell(f"warning: {OTHER_TOKENS}")
        report = text_report(predictions, texts=texts, reference=reference if is_alike else None)
        if reference is not None:
            report["retain_model"] = text_report(reference, texts=texts)
            two = (report, report["retain_model"])
            both: Any = (one["membership_inference"] or {} for one in two)
            ours, theirs = (one.get("min_k_40") for one in both)
            is_defined = None not in (ours, theirs) and theirs != 1
            report["privleak"] = privleak(1 - ours, 1 - theirs) if is_defined else None
        report["metrics"] |= further_figures(predictions, reference, report["metrics"])
        return report

    def some_records(self, data: TextData | TextRecords, most: int | None) -> TextRecords:
        """At most this many records of a set, drawn at random; see `draw_positions`."""
        texts = data.texts if isinstance(data, TextData) else data
        return forget_sets.subset(texts, most, self.args.seed)  # type: ignore[no-any-return]

    def answers_of(self, model: Any, texts: TextRecords) -> list[str]:
        data = text.encode(texts, self.tokenizer, self.length_for(model))
        with self.evaluation_precision():
            return generate_answers(model, self.tokenizer, data, self.args.eval_batch_size)

    def length_for(self, model: Any) -> int:
        """The most tokens of a record: as asked for, or as many as the model reads."""
        return min(self.data.max_length, language.longest_text(model) or self.data.max_length)


def scored_texts(data: TextRecords, loss_on: str) -> list[str]:
    """The part of each record that the loss is taken of: its answer, or all of it."""
    return [((r.prompt if loss_on == "all" else "") + r.answer).strip() for r in data.records]


def cut_texts(data: TextRecords, tokenizer: Any, loss_on: str, lengths: Sequence[int]) -> list[str]:
    """The scored text of each record, up to the last of so many scored tokens."""
    whole, found = text.encode(data, tokenizer, sys.maxsize, loss_on), []  # type: ignore[arg-type]
    said = scored_texts(data, loss_on)
    rows = zip(data.records, said, whole.tokens, whole.scored_from, lengths, strict=True)
    for record, words, tokens, start, most in rows:
        end = max(1, start) + most  # nothing predicts the first token
        read = tokens[start if loss_on == "answer" else 0 : end]
        is_written = bool(record.messages) and loss_on == "all"  # by the chat template, with roles
        if is_written or end < len(tokens):
            words = tokenizer.decode(read, skip_special_tokens=True).strip()
        found.append(words)
    return found


def _in_order(value: Any) -> Any:
    """Targets in any order are the same."""
    return sorted(name.strip() for name in value.split(",")) if isinstance(value, str) else value
