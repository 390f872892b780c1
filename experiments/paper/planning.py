"""From what an experiment wants to ordinary runs of `hamu unlearn`; wanted twice, a run is made once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from experiments.paper.batches import Batches
from experiments.paper.experiment import Wanted
from experiments.paper.sampling import OF_SOURCES, Sample
from hamu.core.methods import build_method
from hamu.unlearning.compare.runs import Runs
from hamu.unlearning.trainer.config import unused_settings

# What all runs share: as the paper's comparisons, without the stopping criterion (Sec. 6) and shuffled once (App. E.3);
# what cannot be met is met as far as it can, so that no run of a comparison is shorter than another for it
_COMMON = {
    "eval_strategy": "epoch", "stopping": "off", "on_infeasible": "clamp", "shuffle": "once", "logging_steps": 1,
    "check_steps": 0, "save_strategy": "epoch", "save_total_limit": 1,
}  # fmt: skip
OF_EXPERIMENTS = (  # their own choice
    *_COMMON, "method", "num_train_epochs", "max_steps", "gradient_accumulation_steps", "eval_on_start",
)  # fmt: skip
_CONSTANT = ("constant", None)  # schedules under which a longer run begins as a shorter one
_PASS = 128  # records in a forward and backward pass, where the recipe does not say


@dataclass(frozen=True)
class PaperRun:
    """A run by its settings.

    Attributes:
        method: its name.
        digest: of all settings but the number of epochs.
        epochs: how many.
    """

    method: str
    digest: str
    epochs: float

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.method}-{self.digest}-e{self.epochs:g}"

    @property
    def setting(self) -> str:
        """The name that runs of all lengths share."""
        return f"{self.method}-{self.digest}"


class PaperRuns(Runs):
    """The runs of experiments; they differ in the problem too, so that they are listed but not compared."""

    remedy = "choose another --work_dir, or remove the folders of such runs"

    def summary(self) -> dict[str, Any]:
        """The row of each run, as comparison.json holds them."""
        return {"runs": self.rows}


def batches_of(wanted: Wanted, base: Mapping[str, Any], retain: int) -> Batches:
    """The batches of a run, no more records in a pass than the recipe has.

    Args:
        wanted: the run.
        base: the recipe's settings.
        retain: records to retain, without paraphrases.
    """
    return Batches.of(
        retain, wanted.steps_per_epoch, int(base.get("per_device_train_batch_size", _PASS))
    )


def settings_of_run(
    wanted: Wanted,
    base: Mapping[str, Any],
    sample: Sample,
    batches: Batches,
    model: str,
    seed: int,
    device: Mapping[str, Any],
) -> dict[str, Any]:
    """All settings of a run, for --config.

    Args:
        wanted: the run.
        base: the recipe's settings.
        sample: the data.
        batches: of the run.
        model: where the original model is.
        seed: of the run.
        device: settings that say where it runs.
    """
    found = {key: value for key, value in base.items() if key not in (*OF_SOURCES, *OF_EXPERIMENTS)}
    found |= _COMMON | dict(sample.settings)
    found |= {
        "model": model,
        "method": wanted.method,
        "seed": seed,
        "num_train_epochs": wanted.epochs,
        "per_device_train_batch_size": batches.size,
        "gradient_accumulation_steps": batches.passes,
    }
    unused = unused_settings(build_method(wanted.method))
    found |= dict(device) | dict(wanted.changes)
    return {key: value for key, value in found.items() if key not in unused}


def run_of(settings: Mapping[str, Any]) -> PaperRun:
    """The run that settings describe."""
    rest = {key: value for key, value in settings.items() if key != "num_train_epochs"}
    digest = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()[:10]
    return PaperRun(str(settings["method"]), digest, float(settings["num_train_epochs"]))


def longest(
    wanted: Mapping[PaperRun, Mapping[str, Any]],
    finished: Iterable[PaperRun],
    whole: Container[PaperRun],
    failed: Collection[PaperRun] = (),
) -> dict[PaperRun, PaperRun]:
    """Find for each wanted run the one to make or to take: the longest that begins alike, if there is any.

    Args:
        wanted: the settings of each run.
        finished: runs that are at hand.
        whole: runs for which no longer one will do.
        failed: runs that serve no other, because they have failed; each is still the one for itself.
    """
    at_hand = set(finished) - set(failed)
    found = {}
    for run, settings in wanted.items():
        longer = [run]
        if settings.get("lr_scheduler_type") in _CONSTANT and run not in whole:
            longer = [
                other
                for other in {*at_hand, *wanted, run}
                if (other == run or other not in failed)
                and other.setting == run.setting
                and other.epochs >= run.epochs
            ]
        done = [other for other in longer if other in at_hand]
        found[run] = (
            min(done, key=lambda r: r.epochs) if done else max(longer, key=lambda r: r.epochs)
        )
    return found
