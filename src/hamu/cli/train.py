"""`hamu train`: make the original model, or with --without_forget the retain model."""

from __future__ import annotations

import time

from rich.console import Console
from transformers import set_seed

from hamu.cli.options import DataOptions, RunOptions, parse
from hamu.cli.problem import read_problem, read_train_and_test, sources
from hamu.cli.progress import ProgressBar
from hamu.data import pixel_statistics
from hamu.errors import HamuError
from hamu.evaluation.predictions import predict
from hamu.models import check_fits, new_classifier
from hamu.run_folder import RunFolder
from hamu.training import TrainConfig, train_classifier
from hamu.training.original import collate


def run(argv: list[str], console: Console) -> int:
    """Train, save the model, print its figures."""
    data_options, run_options, args, resolved = parse(
        "train",
        "Train the original model; with --without_forget, the retain model.",
        argv,
        DataOptions,
        RunOptions,
        TrainConfig,
    )
    if run_options.model is None:
        raise HamuError("name the model with --model: resnet20, a folder, or hub:OWNER/NAME")
    used = (*sources(data_options), run_options.model)
    folder = RunFolder(args.output_dir, overwrite=run_options.overwrite, sources=used)
    if run_options.without_forget:
        problem = read_problem(data_options)
        train, test = problem.retain, problem.test
        console.print(f"{len(train)} training images, {len(problem.forget)} left out ({problem.forget_name})")
    else:
        train, test = read_train_and_test(data_options)
        console.print(f"{len(train)} training images of {train.source}")
    set_seed(args.seed)
    mean, std = pixel_statistics(train)
    model = new_classifier(run_options.model, train, mean, std)
    mean, std = model.config.image_mean, model.config.image_std
    check_fits(model, train)
    args.disable_tqdm = True
    folder.prepare()
    begin = time.perf_counter()
    eval_data = None if test is None else test.normalized(mean, std)
    try:
        train_classifier(model, train.normalized(mean, std), args, [ProgressBar(console, "train")], eval_data)
    finally:
        folder.discard_if_empty()
    seconds = time.perf_counter() - begin
    figures = {"seconds": round(seconds, 1)}
    for name, data in (("train", train), ("test", test)):
        if data is not None:
            predictions = predict(model, data.normalized(mean, std), args.eval_batch_size, collate)
            figures[f"{name}_loss"] = predictions.losses.mean().item()
            figures[f"{name}_accuracy"] = predictions.correct.double().mean().item()
            console.print(f"{name}: loss {figures[f'{name}_loss']:.4f}, accuracy {figures[f'{name}_accuracy']:.2%}")
    folder.write_config(resolved)
    folder.write_json("evaluation.json", figures)
    path = folder.save_model(model)
    console.print(f"the model is in {path}")
    return 0
