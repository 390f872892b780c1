"""The trainer: UnlearnConfig, UnlearnTrainer, and the training of the model to start from."""

from hamu.unlearning.trainer.config import TrainConfig, UnlearnConfig
from hamu.unlearning.trainer.resumable import train_original
from hamu.unlearning.trainer.trainer import UnlearnTrainer

__all__ = ["TrainConfig", "UnlearnConfig", "UnlearnTrainer", "train_original"]
