"""The folder of a run, finished or not, and what its models say of its data; nothing is written."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import yaml
from torch import Tensor

from hamu import files
from hamu.core.methods import method_classes
from hamu.core.objectives import Bounded, CrossEntropy
from hamu.data import ImageData, TextRecords
from hamu.errors import HamuError, first_line
from hamu.evaluation import Predictions, TokenPredictions, rouge_l
from hamu.evaluation.gains import Gains, gains_of, trajectory_of
from hamu.unlearning.record import schema, violations
from hamu.unlearning.record.inputs import digests_in, read_inputs

ROLES = ("before", "after")
_SHOWN = 12  # images


class AnsweredRecord(NamedTuple):
    """A prompt, the expected answer, and each model's name, answer and ROUGE-L recall."""

    prompt: str
    expected: str
    answers: tuple[tuple[str, str, float], ...]


@dataclass(frozen=True)
class ImageObservations:
    """Predictions of the classifiers, by role ("before", "after") and set, and what goes with them.

    `sizes` are the images of each set, of which some are predicted; `classes` the names in the
    data, of which a model may have more outputs; `pictures` forget images, by
    `most_and_least_changed`; `embeddings` [N, D] by role and set, or the reason `no_embedding`.
    """

    predictions: Mapping[str, Mapping[str, Predictions]]
    sizes: Mapping[str, int]
    classes: Sequence[str]
    pictures: Mapping[str, ImageData]
    embeddings: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    no_embedding: str = ""
    seed: int = 42


@dataclass(frozen=True)
class TextObservations:
    """Predictions of the language models, by role and set, of the records in `texts`.

    `answers` are some prompts with both answers, by set; empty for the reason `no_answers`.
    """

    predictions: Mapping[str, Mapping[str, TokenPredictions]]
    texts: Mapping[str, TextRecords]
    answers: Mapping[str, Sequence[AnsweredRecord]] = field(default_factory=dict)
    no_answers: str = ""


Observations = ImageObservations | TextObservations


def answered(texts: TextRecords, answers: Mapping[str, Sequence[str]]) -> list[AnsweredRecord]:
    """Score the answers of each model, by its name and in the records' order."""
    expected = [record.answer.strip() for record in texts.records]
    scores = {name: rouge_l(given, expected).tolist() for name, given in answers.items()}
    found = []
    for n, record in enumerate(texts.records):
        said = tuple((name, given[n], scores[name][n]) for name, given in answers.items())
        found.append(AnsweredRecord(record.prompt.strip(), expected[n], said))
    return found


def right_probability(predictions: Predictions) -> np.ndarray:
    """Probability of the right class, [N]."""
    return np.exp(-predictions.losses.numpy())  # type: ignore[no-any-return]


def most_and_least_changed(
    predictions: Mapping[str, Mapping[str, Predictions]],
) -> dict[str, list[int]]:
    """Positions of the forget images whose right class changed most and least in probability."""
    before, after = (right_probability(predictions[role]["forget"]) for role in ROLES)
    order = np.argsort(-np.abs(after - before), kind="stable")
    most = order[:_SHOWN].tolist()
    return {"changed most": most, "changed least": order[len(most) :][::-1][:_SHOWN].tolist()}


SIDES = ("forget", "retain")


@dataclass(frozen=True)
class Run:
    """A run as its folder holds it, and what its models were asked for the report.

    `steps` has a row for each logged step and a column for each figure; `layers` cosθ ("cos") and
    ‖Δw‖ ("change") by step and block, both NaN where not known; `entries` the evaluations along the
    way; `notes` name files that could not be read; `failed` is the error of a failed run of a
    comparison; `observed` is None for the reason `unobserved`.
    """

    name: str
    method: str
    place: Path
    steps: pd.DataFrame = field(default_factory=pd.DataFrame)
    entries: Sequence[Mapping[str, Any]] = ()
    layers: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    evaluation: Mapping[str, Any] | None = None
    record: Mapping[str, Any] | None = None
    attack: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    failed: str = ""
    observed: Observations | None = None
    unobserved: str = ""

    @property
    def points(self) -> list[Gains]:
        """The points of its trajectory, see `trajectory_of`."""
        return trajectory_of(self.entries)

    @property
    def gains(self) -> Gains | None:
        """Gains of the model saved; None for an unfinished run."""
        return None if self.evaluation is None else gains_of(self.evaluation)

    @property
    def goal(self) -> Mapping[str, Any] | None:
        """Goal of a finished run with its counts, None without one."""
        return (self.evaluation or {}).get("goal")

    @property
    def last_step(self) -> int:
        """The last step known."""
        known = [*self.steps.get("step", ()), *(entry["step"] for entry in self.entries)]
        ended = (self.record or {}).get("steps", {}).get("ended_at", 0)  # not all are logged
        return int(max([*known, ended]))

    @property
    def earlier_state(self) -> str:
        """State of the model saved, in words, if the run went back; else ""."""
        found = self.evaluation or {}
        taken = found.get("steps_taken", 0)
        kept = found.get("steps_in_model", taken)
        return "" if kept == taken else f"one with {kept:,} of {taken:,} steps behind it"

    def objective(self, side: str) -> str | None:
        """Name of the objective that the steps log; None if method or settings are unknown."""
        method = method_classes().get(self.method)
        if method is None or not self.settings:
            return None
        if side == "forget":
            if self.settings.get("auto") or self.settings.get("lasting"):
                return Bounded.name
            return self.settings.get("forget_objective") or method.forget_objective
        return method.retain_objective

    def logs_loss(self, side: str) -> bool:
        """True if the steps log the mean loss of a side, comparable with that of sets and runs."""
        return self.objective(side) == CrossEntropy.name


def run_folders(path: Path) -> list[Path]:
    """Folders of runs that a folder stands for: itself, or the runs of a comparison."""
    if not path.is_dir():
        raise HamuError(f"there is no folder {path}; name the --output_dir of a `hamu unlearn`")
    if (path / files.COMPARISON).is_file():
        if found := sorted(one.parent for one in path.glob(f"*/{files.CONFIG}")):
            return found
        raise HamuError(
            f"the comparison in {path} has no run to show: none has begun yet, or all have failed, "
            f"for which comparison.json has the reasons"
        )
    if not any((path / name).is_file() for name in (files.STEPS, files.RECORD)):
        raise HamuError(
            f"{path} holds no run: it has neither steps.jsonl nor record.json; name the "
            "--output_dir of a `hamu unlearn` or `hamu compare`"
        )
    return [path]


def read_run(path: Path) -> Run:
    """Read the files of a run as far as possible; `notes` names those that cannot be read."""
    place, notes = path.resolve(), list[str]()
    evaluation = _read(path / files.EVALUATION, notes, "evaluation", is_needed=True)
    record = _read(path / files.RECORD, notes, "record")
    for name, digest in (record or {}).get("files", {}).items():
        if (path / name).is_file() and files.file_digest(path / name) != digest:
            notes.append(
                f"{name} is not as the run left it (hamu verify): its figures may be wrong"
            )
    settings = _read(path / files.CONFIG, notes, parse=_settings, is_needed=True) or {}
    named = {"method": "hamu-q", **settings} if settings else record or {}
    attack = _attack(path, record, notes)
    steps = pd.DataFrame(_lines(path / files.STEPS, notes)).select_dtypes("number").astype(float)
    compared = (_read(place.parent / files.COMPARISON, []) or {}).get("runs", ())
    return Run(
        name=place.name,
        method=str(named.get("method", "unknown")),
        place=place,
        steps=steps.loc[:, np.isfinite(steps).any()],
        entries=evaluation["trajectory"] if evaluation else (),
        layers=_layers(_lines(path / files.LAYERS, notes), notes),
        evaluation=evaluation,
        record=record,
        attack=attack,
        settings=settings,
        inputs=_read(path / files.INPUTS, notes, parse=lambda file: read_inputs(file.parent)) or {},
        notes=notes,
        failed=next((str(row["failed"]) for row in compared if row["run"] == place.name), ""),
    )


def _attack(path: Path, record: Mapping[str, Any] | None, notes: list[str]) -> Any:
    """Attacks on the model and forget set of a run; None, with a note, if they were on others."""
    places = (path / files.ATTACK_FOLDER / files.ATTACK, path / files.ATTACK)
    found = next(filter(None, (_read(one, notes, "attack") for one in places)), None)
    if found is None or record is None:
        return found
    own = [digests_in(record["models"][role]) for role in ("after", "merged")]
    attacked = digests_in(found.get("models", {}).get("unlearned"))  # older files lack both
    forgotten = found.get("forget_set", {}).get("sha256")
    is_packed = record["settings"].get("load_in_4bit", False)
    if attacked is not None and attacked not in own:
        other = "another model"
    elif forgotten not in (None, record["forget_set"]["sha256"]):
        other = "another forget set"
    elif attacked == own[0] and found.get("load_in_4bit", is_packed) != is_packed:
        other = "a base in another precision"
    else:
        return found
    notes.append(f"attack.json is left out, as it is of {other} than that of this run")
    return None


def told_apart(runs: Sequence[Run]) -> list[Run]:
    """Name the runs of folders that share their name by the way from the folder above all."""
    places = {run.place for run in runs}
    if len({place.name for place in places}) == len(places):
        return list(runs)
    above = os.path.commonpath({place.parent for place in places})
    return [replace(run, name=run.place.relative_to(above).as_posix()) for run in runs]


def _read(
    path: Path,
    notes: list[str],
    shape: str = "",
    parse: Callable[[Path], Any] = files.parse_json,
    *,
    is_needed: bool = False,
) -> Any:
    """Content of a file; None if it is missing or damaged or has another shape, with a note."""
    if not path.is_file():
        notes += [f"{path.name} is missing"] * is_needed
        return None
    try:
        found = parse(path)
        wrong = next(violations(found, _shape(shape), path.stem), "") if shape else ""
    except (OSError, ValueError, yaml.YAMLError) as error:
        found, wrong = None, first_line(error)
    if not wrong:
        return found
    # behind this the name of a class follows
    notes.append(f"{path.name} cannot be read: {wrong.partition('.per_class_')[0]}")
    return None


def _shape(name: str) -> Any:
    """Schema of the parts of a file that a report shows."""
    if name == "record":
        return schema()
    shapes = files.parse_json(Path(__file__).with_name("shapes.json"))
    return {"$ref": f"#/$defs/{name}", "$defs": shapes["$defs"]}


def _settings(path: Path) -> dict[str, Any]:
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found if isinstance(found, dict) else {}


def _lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Whole lines of a log; a note counts the others."""
    text = _read(path, notes, parse=lambda file: file.read_text("utf-8", "replace"), is_needed=True)
    found, unread = [], 0
    for line in (text or "").splitlines():
        try:
            entry = json.loads(line)
            found.append(entry | {"step": int(entry["step"])})
        except (ValueError, TypeError, KeyError, OverflowError):
            unread += 1
    if unread:
        are = "1 line is" if unread == 1 else f"{unread:,} lines are"
        notes.append(f"of {path.name}, {are} damaged and skipped")
    return found


def _layers(lines: Sequence[Mapping[str, Any]], notes: list[str]) -> dict[str, pd.DataFrame]:
    blocks = lines[0].get("blocks") if lines else None
    if not blocks or len(lines) == 1:
        return {}
    none = [None] * len(blocks)  # of a step that was not taken
    steps = [one["step"] for one in lines[1:]]
    rows = {key: [one.get(key) or none for one in lines[1:]] for key in ("cos", "change")}
    try:
        return {key: pd.DataFrame(rows[key], steps, blocks, float) for key in rows}
    except (ValueError, TypeError) as error:
        notes.append(f"layers.jsonl cannot be read: {first_line(error)}")
        return {}
