"""The paper's figures and tables as experiments that run at any scale: `hamu reproduce` runs them."""

from hamu.paper.constraints import Epochs, Fit, Varying
from hamu.paper.cost import Cost
from hamu.paper.experiment import Claim, Computed, Experiment, Measured, Scale, Trained, Wanted
from hamu.paper.language import Language, Metrics
from hamu.paper.practice import BatchSizes, Optimizers, Rates
from hamu.paper.similarity import AllBaselines, Baselines, Enforced, Similarity
from hamu.paper.stopping import Stopping
from hamu.paper.theory import Regimes, Updates

_ALL: tuple[type[Experiment], ...] = (
    Regimes, Updates, Similarity, Baselines, Enforced, Varying, Epochs, Fit, Stopping, Language, Rates,
    Optimizers, AllBaselines, Cost, BatchSizes, Metrics,
)  # fmt: skip
EXPERIMENTS: dict[str, Experiment] = {one.name: one() for one in _ALL}

__all__ = ["EXPERIMENTS", "Claim", "Computed", "Experiment", "Measured", "Scale", "Trained", "Wanted"]
