"""Images: reading, loading, normalising, reporting."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hamu.data import ImageData, UnlearningData, forget_class, pixel_statistics, read_images
from hamu.data.images import collate, has_test_split
from hamu.data.sources import DIGITS
from hamu.errors import HamuError
from hamu.evaluation import Predictions, classifier_report, further_figures, predict
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
from hamu.models.storage import check_is_saved
from hamu.unlearning.jobs.options import OriginalOptions
from hamu.unlearning.jobs.task import Task, evaluation_precision
from hamu.unlearning.trainer import TrainConfig


class ImageTask(Task[ImageData, ImageData, Predictions]):
    """Image classification."""

    noun = "images"
    ways = ("forget_class", "forget_rows", "forget_data")
    bundled = DIGITS
    built_in = NEW_CLASSIFIER
    has_test_split = staticmethod(has_test_split)
    processor: Any = None

    def __init__(self, *of_task: Any) -> None:
        super().__init__(*of_task)
        self._told: list[str] = []

    def read(self, source: str, split: str) -> ImageData:
        """Read images as the options say, and name the files that are left out; see `read_images`."""
        options = self.data_options
        data = read_images(
            source,
            split,
            image_size=options.image_size,
            num_channels=options.num_channels,
            image_column=options.image_column,
            label_column=options.label_column,
        )
        if data.left_out:
            self._tell_once(
                f"warning: files of {data.source} are left out ({len(data.left_out)}), first {data.left_out[0]}; only "
                f"images (by their endings, such as .png and .jpg) in a folder per class are read"
            )
        return data

    def numbered(self, train: ImageData) -> ImageData:
        """Labels as by the model, if that has all of the classes by name; the other sets follow the training data."""
        names = (
            class_names(self.classes_of) if train.named and self.classes_of is not None else None
        )
        return (
            train
            if names is None or not set(train.classes) <= set(names)
            else train.with_classes(names)
        )

    def divide_by_own_option(
        self, train: ImageData, test: ImageData | None
    ) -> UnlearningData[ImageData]:
        """Divide by a class that is forgotten; a share ρ of it is replaced by draws from all records not chosen yet."""
        options = self.data_options
        return forget_class(
            train, test, str(options.forget_class), options.rho, options.forget_seed
        )

    def new_model(self, name: str, train: ImageData) -> Any:
        """A new classifier, normalising by this data's statistics; or a saved one to go on with, as `load_model`."""
        if len(train.classes) < 2:
            raise HamuError(
                f"{train.source} has one class alone, {train.classes[0]}; a classifier needs at least two"
            )
        trusted = self.run_options.trust_remote_code
        model = new_classifier(name, train, *pixel_statistics(train), trust_remote_code=trusted)
        if not self.is_built_in(name):
            self.processor = self._processor_of(name)
            if named_as_in_training(model, train.classes):
                self._tell_once(
                    f"the model names none of the classes of {train.source}: its first {len(train.classes)} outputs "
                    f"are trained for these, and named so"
                )
        return model

    def check_models(self, options: OriginalOptions | None = None) -> None:
        """Check that the models which are named are classifiers of as many classes, but for those of the hub."""
        model, retain_model = self.run_options.model, self.run_options.retain_model
        original = None if options is None else options.original_model
        for name in (model, retain_model, original):
            if name is not None:
                check_is_saved(name, CLASSIFIER_CONFIGS)
        for role, other in (("retain", retain_model), ("original", original)):
            if model is not None and other is not None:
                check_as_many_classes(model, other, role)

    def load_model(self, source: str, base: str | None = None) -> Any:
        """A saved classifier; its image processor is kept, if it has one."""
        trusted = self.run_options.trust_remote_code
        model = load_classifier(source, trust_remote_code=trusted)
        self.processor = self._processor_of(source)
        return model

    def _processor_of(self, source: str) -> Any:
        """Its image processor, which is to go along; None where it has none, or one that cannot be made here."""
        try:
            return load_image_processor(
                source, trust_remote_code=self.run_options.trust_remote_code
            )
        except HamuError as error:
            self._tell_once(f"warning: {error}")
            return None

    def fitted(self, model: Any, *sets: ImageData | None) -> list[ImageData | None]:
        """Checked, and normalised as the model expects.

        If it does not say how, by the statistics of all sets but the last, the training data, whatever is to be
        forgotten; its config keeps them.
        """
        for data in sets:
            if data is not None:
                check_fits(model, data)
        config = model.config
        if (
            getattr(config, "image_mean", None) is None
            or getattr(config, "image_std", None) is None
        ):
            training = [data for data in sets[:-1] if data is not None]
            config.image_mean, config.image_std = pixel_statistics(*training)
            self._tell_once(
                f"the model does not say how images are normalised; the mean and standard deviation of "
                f"{training[0].source} are used"
            )
        return [
            None if data is None else data.normalized(config.image_mean, config.image_std)
            for data in sets
        ]

    def _tell_once(self, text: str) -> None:
        """Print a text unless it has been printed before, of another model."""
        if text not in self._told:
            self.console.print(text, soft_wrap=True)
            self._told.append(text)

    def beside_model(self) -> list[Any]:
        """The image processor that came with the model, if one did."""
        return [] if self.processor is None else [self.processor]

    def collator(self) -> Callable[[Any], Mapping[str, Any]]:
        """What makes a batch of images, which are fetched all at once."""
        return collate

    def predict(self, model: Any, data: ImageData, args: TrainConfig) -> Predictions:
        """The model's predictions, in the precision of evaluations; see `hamu.evaluation.predict`."""
        with evaluation_precision(args):
            return predict(model, data, args.eval_batch_size, collate)

    def report(
        self,
        predictions: Mapping[str, Predictions],
        problem: UnlearningData[Any],
        reference: Mapping[str, Predictions] | None,
        args: TrainConfig,
    ) -> dict[str, Any]:
        """The figures of `classifier_report`, and those that other packages measure."""
        report = classifier_report(
            predictions, problem.retain.classes, problem.target_class, reference, args.seed
        )
        return report | further_figures(predictions, reference)
