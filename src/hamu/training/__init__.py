"""The trainer: UnlearnConfig, UnlearnTrainer, and the training of the model to start from."""

from hamu.training.config import TrainConfig, UnlearnConfig
from hamu.training.original import train_original
from hamu.training.pairing import PairCollator, PairedDataset
from hamu.training.trainer import UnlearnTrainer

__all__ = ["PairCollator", "PairedDataset", "TrainConfig", "UnlearnConfig", "UnlearnTrainer", "train_original"]
