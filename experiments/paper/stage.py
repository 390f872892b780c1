"""The runs of some experiments at one scale: what is the same for all of them, and which are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from experiments.paper.batches import Batches
from experiments.paper.experiment import Experiment, Measured, Scale, Trained, Wanted
from experiments.paper.finished_run import FinishedRun
from experiments.paper.planning import PaperRun, batches_of, longest, run_of, settings_of_run
from experiments.paper.results import result_of
from experiments.paper.sampling import (
    OF_SOURCES,
    Sample,
    place_of,
    resolved,
    sample_images,
    sample_texts,
)
from hamu.errors import HamuError
from hamu.files import (
    CONFIG,
    EVALUATION,
    INPUTS,
    MODEL,
    RECORD,
    file_digest,
    is_local,
    is_of_hub,
    read_json,
)
from hamu.models.language import base_of
from hamu.unlearning.compare.children import Call
from hamu.unlearning.compare.runs import Plan, Row, written_environment
from hamu.unlearning.jobs.settings import every_option
from hamu.unlearning.jobs.tasks import WAYS
from hamu.unlearning.record import versions
from hamu.unlearning.record.inputs import (
    Inputs,
    as_recorded,
    digests_in,
    read_inputs,
    recorded,
    saved_model_entry,
)
from hamu.unlearning.run_folder import RunFolder


@dataclass(frozen=True)
class Stage:
    """All that is the same for the runs of one task.

    Attributes:
        scale: of its experiments.
        train: settings for `hamu train`, the recipe's or the user's.
        device: settings that say where and how runs are made.
        model: the original model, None to train one.
        train_fraction: of the data, that an original model is trained on; at least that of the runs, whose data are
            then among them.
        paraphrases: where the forget set stands in other words, None if nowhere.
        work: where data, models and runs are kept.
    """

    scale: Scale
    train: Mapping[str, Any]
    device: Mapping[str, Any]
    model: str | None
    train_fraction: float
    paraphrases: str | None
    work: Path

    @property
    def runs(self) -> Path:
        """The folder of all runs."""
        return self.work / "runs"

    def _original(self, similar: bool) -> Path:
        """The folder of an original model, that of the data with the paraphrases if it is trained on them too."""
        scale = self.scale
        kind = ("-bf16" if "bf16" in self.device else "") + ("-similar" if similar else "")
        return self.work / "models" / f"{scale.recipe}-{self.train_fraction:g}-s{scale.seed}{kind}"

    @cached_property
    def sample(self) -> Sample:
        """The data that runs read."""
        return self._drawn(self.scale.fraction, similar=False)

    @cached_property
    def similar(self) -> Sample:
        """The data, with the forget set said again in what is retained."""
        return self._drawn(self.scale.fraction, similar=True)

    def _drawn(self, fraction: float, similar: bool) -> Sample:
        scale = self.scale
        with RunFolder(self.work / "data", resume=True) as folder:
            if scale.is_text:
                drawn = self.paraphrases if similar else None
                return sample_texts(scale.base, fraction, scale.seed, folder, drawn)
            return sample_images(scale.base, fraction, scale.seed, folder)

    def check(self) -> None:
        """Check that the model and the data are named, and are there.

        Raises:
            HamuError: if not.
        """
        forgetting = "forget_data" if self.scale.is_text else "forget_class"
        for key in ("data", forgetting):
            if key not in self.scale.base:
                raise HamuError(f"{self.scale.recipe} has no {key}, which these experiments need")
        if self.model is not None and not Path(self.model).is_dir() and not is_of_hub(self.model):
            raise HamuError(
                f"the model {self.model} is not there; give a folder written by `hamu train`"
            )
        named = [
            place_of(self.scale.base, key)
            for key in ("data", "test_data", "forget_data")
            if key in self.scale.base
        ]
        for source in [*named, self.paraphrases]:
            if source is not None and is_local(source) and not Path(source).exists():
                raise HamuError(
                    f"the data {source} are not there; say with --data_dir where they are"
                )

    def training(self, similar: bool = False) -> Call | None:
        """Settings that train an original model on its fraction of the data; None if it is there.

        Args:
            similar: whether it is that of the data with paraphrases.
        """
        folder = self._original(similar)
        if self.model is not None or (folder / EVALUATION).is_file():
            return None
        sample = self._drawn(self.train_fraction, similar)
        device = {key: value for key, value in self.device.items() if key != "full_precision_eval"}
        settings = (
            {k: v for k, v in self.train.items() if k not in (*OF_SOURCES, *WAYS)}
            | dict(sample.settings)
            | device
        )
        if (
            "test_data" in self.scale.base
        ):  # the recipe may let it decide which state is the original
            settings.setdefault("test_data", place_of(self.scale.base, "test_data"))
        batch = int(settings.get("per_device_train_batch_size", 128))
        settings["per_device_train_batch_size"] = max(1, round(batch * self.train_fraction))
        begun = (folder / CONFIG).is_file()
        how = {"resume": True} if begun else {**settings, "overwrite": True}
        return Call("the original model", "train", how | {"output_dir": str(folder)})

    @cached_property
    def inputs(self) -> Inputs:
        """Inputs that the runs of all experiments share: the original model, if it was given."""
        if self.model is None:
            return {}
        base = (
            base_of(self.model, self.scale.base.get("base_model")) if self.scale.is_text else None
        )
        return {"original model": saved_model_entry(self.model, base)}

    def settings(self, wanted: Wanted) -> dict[str, Any]:
        """All settings of a run."""
        model = (
            resolved(self.model)
            if self.model
            else str((self._original(wanted.similar) / MODEL).resolve())
        )
        sample, batches = self._sample_of(wanted), self.batches(wanted)
        return settings_of_run(
            wanted, self.scale.base, sample, batches, model, self.scale.seed, self.device
        )

    def batches(self, wanted: Wanted) -> Batches:
        """The batches of a run, as large with the paraphrases as without."""
        batches = batches_of(wanted, self.scale.base, self.sample.retain)
        return batches.over(self.similar.retain) if wanted.similar else batches

    def _sample_of(self, wanted: Wanted) -> Sample:
        return self.similar if wanted.similar else self.sample

    def description(self) -> dict[str, Any]:
        """Scale as a result holds it."""
        scale, device = self.scale, self._device
        return {
            "recipe": scale.recipe,
            "is_text": scale.is_text,
            "fraction": scale.fraction,
            "retain": self.sample.retain,
            "seed": scale.seed,
            "device": f"{device}, steps in bfloat16" if "bf16" in self.device else device,
            "model": "given" if self.model else self.trained_on,
        }

    @property
    def trained_on(self) -> str:
        """Share of the data that an original model is trained on, in words."""
        share = self.train_fraction
        if share == self.scale.fraction:
            return "trained on the same data"
        return f"trained on {'all' if share == 1 else f'{share:g}'} of the data"

    def measured(self, one: Measured, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Environment of a measurement in this process, as a result holds that of a run."""
        data, model = Path(str(settings["data"])), str(settings["model"])
        base = base_of(model, settings.get("base_model")) if self.scale.is_text else None
        inputs = {"original model": saved_model_entry(model, base)}
        inputs |= {"data": {"sha256": file_digest(data)}} if data.is_file() else {}
        return {
            "settings": recorded(
                {name: settings[name] for name in one.takes if name in settings}, {}
            ),
            "inputs": _digests(inputs),
            "environment": written_environment({"device": self._device, "versions": versions()}),
            "date": datetime.now(UTC).date().isoformat(),
        }

    @property
    def _device(self) -> str:
        on_cpu = (dict(self.scale.base) | dict(self.device)).get("use_cpu", False)
        return "cuda" if torch.cuda.is_available() and not on_cpu else "cpu"


class Order:
    """Runs that some experiments need of a stage, each with the run that is made or taken for it.

    Args:
        stage: of the experiments.
        experiments: by whom runs are wanted.
    """

    def __init__(self, stage: Stage, experiments: Sequence[Trained | Measured]) -> None:
        self._stage = stage
        self._wanted = {one.name: one.runs(stage.scale) for one in experiments}
        self._settings = {
            name: {key: stage.settings(wanted) for key, wanted in runs.items()}
            for name, runs in self._wanted.items()
        }
        self._asked = {run_of(s): s for runs in self._settings.values() for s in runs.values()}
        self._whole = {
            run_of(self._settings[name][key])
            for name, runs in self._wanted.items()
            for key, wanted in runs.items()
            if wanted.whole
        }
        self._measures = any(isinstance(one, Measured) for one in experiments)
        self._finished, self._failed = _finished(stage.runs), set[PaperRun]()
        self._made = longest(self._asked, self._finished, self._whole)

    @property
    def settings_of_data(self) -> list[bool]:
        """True if the data have paraphrases, for each kind of data that is wanted."""
        kinds = {wanted.similar for runs in self._wanted.values() for wanted in runs.values()}
        return sorted(kinds | ({False} if self._measures else set()))

    def by_model(self, finished: Mapping[str, Path]) -> list[dict[str, Path]]:
        """Folders of runs by their names, apart for each original model that they were to start from."""
        models: dict[str, dict[str, Path]] = {}
        for run, settings in self._asked.items():
            name = self._made[run].name
            if name in finished:
                models.setdefault(str(settings["model"]), {})[name] = finished[name]
        return list(models.values())

    def pass_over(self, rows: Mapping[str, Row]) -> None:
        """Have what a longer run that has failed was to serve made by shorter ones.

        Args:
            rows: what has come out of runs, by their names.
        """
        self._failed |= {run for run in self._made.values() if rows.get(run.name, {}).get("failed")}
        self._made = longest(self._asked, self._finished, self._whole, self._failed)

    def plans(self, one: Experiment) -> list[Plan]:
        """Every run that is made or taken for an experiment."""
        runs = [self._made[run_of(settings)] for settings in self._settings[one.name].values()]
        return [self._planned(run) for run in dict.fromkeys(runs)]

    def _planned(self, run: PaperRun) -> Plan:
        """A longer run that is at hand has the settings of the run that it serves."""
        own = next(
            settings for other, settings in self._asked.items() if other.setting == run.setting
        )
        settings = {**own, "num_train_epochs": run.epochs}
        columns = {"setting": run.setting, **vars(run)}
        return Plan(run.name, columns, settings, every_option(settings))

    def result(self, one: Trained | Measured, rows: Mapping[str, Row]) -> dict[str, Any]:
        """Result of an experiment.

        Args:
            one: the experiment.
            rows: what has come out of each run, by its name.
        """
        found, failed, listed = {}, {}, {}
        for key, wanted in self._wanted[one.name].items():
            own = self._settings[one.name][key]
            made = self._made[run_of(own)]
            row, folder = rows[made.name], self._stage.runs / made.name
            batches = self._stage.batches(wanted)
            listed[key] = {
                "run": row["run"],
                "epochs": wanted.epochs,
                "paper_epochs": wanted.paper_epochs,
                "learning_rate": float(own["learning_rate"]),
                "batch": batches.records,
                "steps_per_epoch": batches.steps,
                "paper_steps_per_epoch": wanted.paper_steps_per_epoch,
                "seconds": row["seconds"],
                "settings": recorded({**own, "num_train_epochs": made.epochs}, {}),
                "inputs": _digests(read_inputs(folder)) if (folder / INPUTS).is_file() else None,
                "environment": row.get("environment"),
                "date": None,
            }
            if row["failed"]:
                failed[key] = row["failed"]
            else:
                found[key] = FinishedRun(folder, wanted.epochs, batches)
                record = read_json(folder / RECORD, remove=folder)
                listed[key] |= {
                    name: record[name] for name in ("settings", "date")
                }  # those that were not given too
        scale, measured = self._stage.scale, None
        if isinstance(one, Measured):
            settings = self._stage.settings(scale.wanted("hamu-q", 1))
            figures = one.measure(settings, scale)
            measured = self._stage.measured(one, settings)
        else:
            figures = one.figures(found, scale)
        start = next((run.points[0] for run in found.values()), None)
        return result_of(one, figures) | {
            "scale": self._stage.description(),
            "start": start,
            "runs": listed,
            "failed": failed,
            "measured": measured,
        }


def _finished(folder: Path) -> list[PaperRun]:
    found = []
    for record in folder.glob(f"*/{RECORD}"):
        setting, _, epochs = record.parent.name.rpartition("-e")
        method, _, digest = setting.rpartition("-")
        found.append(PaperRun(method, digest, float(epochs)))
    return found


def _digests(inputs: Inputs) -> dict[str, Any]:
    """The sets and models that there are, without what they are called, which may be a place."""
    kept = {name: digests_in(entry) for name, entry in as_recorded(inputs).items()}
    return {name: entry for name, entry in kept.items() if entry is not None}
