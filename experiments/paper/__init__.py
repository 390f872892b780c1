"""The paper's figures and tables as experiments that run at any scale: `python -m experiments` runs them."""

from experiments.paper.constraints import Epochs, Fit, Varying
from experiments.paper.cost import Cost
from experiments.paper.experiment import (
    Claim,
    Computed,
    Experiment,
    Measured,
    Scale,
    Trained,
    Wanted,
)
from experiments.paper.language import Language, Metrics
from experiments.paper.practice import BatchSizes, Optimizers, Rates
from experiments.paper.similarity import AllBaselines, Baselines, Enforced, Similarity
from experiments.paper.stopping import Stopping
from experiments.paper.theory import Regimes, Updates

_ALL: tuple[type[Experiment], ...] = (
    Regimes, Updates, Similarity, Baselines, Enforced, Varying, Epochs, Fit, Stopping, Language, Rates,
    Optimizers, AllBaselines, Cost, BatchSizes, Metrics,
)  # fmt: skip
EXPERIMENTS: dict[str, Experiment] = {one.name: one() for one in _ALL}

__all__ = [
    "EXPERIMENTS",
    "Claim",
    "Computed",
    "Experiment",
    "Measured",
    "Scale",
    "Trained",
    "Wanted",
]
