"""`hamu evaluate`: measure a model on an unlearning problem."""

from __future__ import annotations

from rich.console import Console

from hamu.cli.options import DataOptions, RunOptions, parse
from hamu.cli.problem import read_problem, sources
from hamu.cli.tables import membership_line, reference_table, report_table
from hamu.data import UnlearningData, pixel_statistics
from hamu.errors import HamuError
from hamu.evaluation import Predictions, classifier_report, predict
from hamu.models import check_fits, load_classifier
from hamu.run_folder import RunFolder
from hamu.training import TrainConfig
from hamu.training.original import collate
from hamu.training.pairing import subset


def run(argv: list[str], console: Console) -> int:
    """Measure, print, save evaluation.json."""
    data_options, run_options, args, resolved = parse(
        "evaluate", "Measure a model on the retain, forget and test data.", argv, DataOptions, RunOptions, TrainConfig
    )
    if run_options.model is None:
        raise HamuError("name the model with --model: a folder, or hub:OWNER/NAME")
    used = (*sources(data_options), *filter(None, (run_options.model, run_options.retain_model)))
    folder = RunFolder(args.output_dir, overwrite=run_options.overwrite, sources=used)
    problem = read_problem(data_options)
    predictions = predictions_of(run_options.model, problem, args)
    reference = None
    if run_options.retain_model is not None:
        reference = predictions_of(run_options.retain_model, problem, args)
    report = classifier_report(predictions, problem.retain.classes, problem.target_class, reference, args.seed)
    console.print(f"forget set: {problem.forget_name}")
    console.print(report_table({"": report}))
    console.print(membership_line(report))
    if reference is not None:
        console.print(reference_table(report))
    folder.write_config(resolved)
    path = folder.write_json("evaluation.json", report)
    console.print(f"all figures, per class too, are in {path}")
    return 0


def predictions_of(
    source: str, problem: UnlearningData, args: TrainConfig, most: int | None = None
) -> dict[str, Predictions]:
    """A saved model's predictions for every set (at most so many of each), normalised as that model was trained."""
    model = load_classifier(source).to(args.device)
    for data in (problem.retain, problem.forget, problem.test):
        if data is not None:
            check_fits(model, data)
    problem = normalized_for(model, problem)
    sets = {"retain": problem.retain, "forget": problem.forget, "test": problem.test}
    return {
        name: predict(model, subset(data, most, args.seed), args.eval_batch_size, collate)
        for name, data in sets.items()
        if data is not None
    }


def normalized_for(model: object, problem: UnlearningData) -> UnlearningData:
    """The problem's images, normalised as the model expects; by the retain set's statistics if it does not say."""
    config = getattr(model, "config", None)
    mean, std = getattr(config, "image_mean", None), getattr(config, "image_std", None)
    if mean is None or std is None:
        mean, std = pixel_statistics(problem.retain)
    return problem.normalized(mean, std)
