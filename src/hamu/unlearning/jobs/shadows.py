"""Shadow models of RMIA and U-LiRA: trained as the original model, and unlearned as the run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import set_seed

from hamu.data.forget_sets import UnlearningData
from hamu.errors import HamuError
from hamu.evaluation.membership import FEWEST, ShadowPredictions, matched_by_class
from hamu.files import CONFIG, RECORD
from hamu.unlearning.jobs.options import DataOptions, RunOptions
from hamu.unlearning.jobs.progress import task_bar
from hamu.unlearning.jobs.settings import settings_of
from hamu.unlearning.jobs.tasks import Task, choose_task
from hamu.unlearning.trainer import UnlearnConfig, train_original
from hamu.unlearning.trainer.trainer import quiet_trainer

# A shadow model leaves nothing behind, and is measured here alone.
_ALONE = {
    "save_strategy": "no",
    "eval_strategy": "no",
    "load_best_model_at_end": False,
    "report_to": "none",
}


class Shadows:
    """Pool of forget records and as many test records, and the models that train on half of it.

    Two models at a time take the two halves of a random division by class, so that as many were
    trained on a record as were not; all train on the retain set.
    """

    def __init__(
        self, task: Task, problem: UnlearningData[Any], count: int, *, ulira: bool
    ) -> None:
        if count < 4 or count % 2:
            raise HamuError(f"shadow_models {count} must be an even number of at least 4")
        if problem.test is None:
            raise HamuError("rmia and ulira need data never trained on; give --test_data")
        self._task, self._problem, self._count = task, problem, count
        self._test: Any = problem.test
        self._train, self._unlearn = _settings_behind(str(task.run.model))
        if ulira and self._unlearn is None:
            raise HamuError(
                f"ulira repeats the run that made the model, and {task.run.model} is in no folder "
                f"of hamu unlearn; leave out ulira"
            )
        self._unlearn = self._unlearn if ulira else None
        seed = task.args.seed
        self._drawn = matched_by_class(problem.forget.labels, problem.test.labels, seed)[1]
        if len(self._drawn) < FEWEST:
            raise HamuError(
                f"rmia and ulira need at least {FEWEST} test images of the classes that are "
                f"forgotten; there are {len(self._drawn)}"
            )

    def predictions(self) -> ShadowPredictions:
        """Train all shadow models, one after the other, and predict the pool with each."""
        pool = self._problem.forget.joined(self._test.select(self._drawn))
        seed, generator = self._task.args.seed, torch.Generator()
        trained, unlearned, holds = [], [], []
        with TemporaryDirectory() as place, task_bar(self._task.console) as bar:
            for number in bar.track(range(self._count), description="shadow models"):
                generator.manual_seed(seed + number // 2)
                half = _half_of_each(pool.labels, generator)
                half = ~half if number % 2 else half
                found = self._trained(pool, half, seed + number, place)
                trained.append(found[0])
                unlearned += found[1:]
                holds.append(half)
        after = torch.stack(unlearned) if unlearned else None
        return ShadowPredictions(torch.stack(trained), after, torch.stack(holds))

    def _trained(self, pool: Any, half: Tensor, seed: int, place: str) -> list[Tensor]:
        """Logits [N, K] of one model for the pool, after training and, if asked for, unlearning."""
        problem, task = self._problem, self._task
        mine, rest = half.nonzero().flatten(), (~half).nonzero().flatten()
        data = problem.retain.joined(pool.select(mine))
        how = {**_ALONE, "output_dir": place, "seed": seed}
        options = {"config": str(self._train), "eval_on_start": False, **how}
        settings = settings_of("train", options)
        maker = choose_task(settings, Console(quiet=True))
        set_seed(seed)
        model = maker.new_model(str(maker.run.model), data)
        data, known = maker.fitted(model, data, pool)
        maker.args.disable_tqdm = True
        train_original(model, data, maker.args, task.collator)
        found = [task.predict(model, known).logits]
        if self._unlearn is None:
            return found
        options = {"config": str(self._unlearn), **how}
        kinds = (DataOptions, RunOptions, UnlearnConfig)
        args = settings_of("unlearn", options, kinds).of(UnlearnConfig)
        args.settle_batch_sizes(is_text=False)
        sets = {"forget": pool.select(mine), "test": self._unseen(pool, rest)}
        own = maker.fitted_problem(model, replace(problem, **sets))
        quiet_trainer(model, own, args, [], task.collator).train()
        return [*found, task.predict(model, known).logits]

    def _unseen(self, pool: Any, rest: Tensor) -> Any:
        """Test data that a model was not trained on, with the half of the pool that it lacks."""
        others = torch.ones(len(self._test), dtype=torch.bool)
        others[self._drawn] = False
        return self._test.select(others.nonzero().flatten()).joined(pool.select(rest))


def _half_of_each(labels: Tensor, generator: torch.Generator) -> Tensor:
    """Random half of the records of each class, [N] bool; of an odd number one more or less."""
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    for label in set(labels.tolist()):
        places = (labels == label).nonzero().flatten()
        places = places[torch.randperm(len(places), generator=generator)]
        extra = int(torch.randint(2, (), generator=generator))
        chosen[places[: (len(places) + extra) // 2]] = True
    return chosen


def _settings_behind(model: str) -> tuple[Path, Path | None]:
    """The config.yaml of the training behind a model, and that of the run that unlearned it."""
    config, unlearn = Path(model).parent / CONFIG, None
    if config.with_name(RECORD).is_file():
        unlearn = config
        options = settings_of("unlearn", {"config": str(config)}, (RunOptions,))
        config = Path(str(options.of(RunOptions).model)).parent / CONFIG
    if not config.is_file():
        raise HamuError(
            f"rmia and ulira train shadow models as the original model was trained, and {config} "
            f"is not there; name a model of hamu train, or of a run of hamu unlearn from one"
        )
    return config, unlearn
