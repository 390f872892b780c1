"""The demo on images: a ResNet-8 forgets a handwritten digit that is mixed with others."""

from __future__ import annotations

from typing import Any, ClassVar

from hamu.cli.demo import ABOUT_GOALS, Scenario
from hamu.data import forget_class, pixel_statistics, read_images
from hamu.data.images import collate
from hamu.evaluation import membership_inference
from hamu.models import new_classifier
from hamu.unlearning.trainer import UnlearnTrainer

_FORGET = 3
_RHO = 0.25


class Digits(Scenario):
    """scikit-learn's digits, 8x8 pixels."""

    similarity = "rho"
    train_settings: ClassVar[dict[str, Any]] = {
        "learning_rate": 3e-3,
        "lr_scheduler_type": "linear",
        "optim": "adamw_torch",
        "num_train_epochs": 2,
        "per_device_train_batch_size": 64,
    }
    unlearn_settings: ClassVar[dict[str, Any]] = {
        "learning_rate": 5e-3,
        "num_train_epochs": 5,
        "per_device_train_batch_size": 128,
        # Half of what the gradients allow: an absolute demand becomes infeasible as the retain gradient shrinks.
        "constraint": 0.5,
        "constraint_mode": "relative",
        "stopping": "off",  # as in the paper's comparisons; the table says where the criterion would have stopped
    }
    next = f"""\
What next, on your own data:
  hamu train    --data IMAGES/ --model resnet20 --output_dir runs/original
  hamu unlearn  --data IMAGES/ --model runs/original/model \\
                --forget_class NAME --output_dir runs/unlearned
  hamu evaluate --data IMAGES/ --model runs/unlearned/model \\
                --forget_class NAME --output_dir runs/check
{ABOUT_GOALS}
IMAGES/ has one subfolder of images per class; .parquet, .npz and
hub:OWNER/NAME work too. To forget single images, use --forget_rows 3,17,25
and --test_data with images that the model never saw.
Language models: `hamu demo --task text`. `hamu unlearn --help` shows the
settings, `hamu methods` the methods."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        train, test = read_images("digits"), read_images("digits", "test")
        self._statistics = pixel_statistics(train)
        self._train, test = train.normalized(*self._statistics), test.normalized(*self._statistics)
        self.collate = collate
        self.intro = (
            f"Train a ResNet-8 on {len(train)} handwritten digits (scikit-learn's, 8x8 pixels)."
        )
        self.question = f"How hard is it to forget digit {_FORGET}?"
        self.title = f"Forgetting digit {_FORGET} at ρ = {_RHO:g}: a marker per epoch"
        self.problem = forget_class(self._train, test, _FORGET, _RHO, seed)
        self.problems = {
            f"{rho:g}": forget_class(self._train, test, _FORGET, rho, seed)
            for rho in (0.0, 0.5, 1.0)
        }

    def new_model(self) -> tuple[Any, Any]:
        """A new ResNet-8, and the digits to train it on."""
        return new_classifier("resnet8", self._train, *self._statistics), self._train

    def membership_auc(self, trainer: UnlearnTrainer) -> float | None:
        """The AUC of the attack on the per-image loss."""
        inference = membership_inference(
            trainer.predictions["forget"], trainer.predictions["test"], self.seed
        )
        return None if inference is None else inference.auc
