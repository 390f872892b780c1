"""`hamu train`: make the original model, or with --without_forget the retain model."""

from __future__ import annotations

import time

from rich.console import Console
from transformers import set_seed

from hamu.cli.dry_run import show_plan
from hamu.cli.options import DataOptions, RunOptions, parse
from hamu.cli.progress import ProgressBar
from hamu.cli.tasks import choose_task
from hamu.errors import HamuError
from hamu.run_folder import RunFolder
from hamu.training import TrainConfig, train_original


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
        raise HamuError("name the model with --model: resnet20, tiny-llama, a folder, or hub:OWNER/NAME")
    if run_options.dry_run:
        return show_plan(console, data_options, run_options, args)
    task = choose_task(data_options, run_options, console)
    folder = RunFolder(args.output_dir, overwrite=run_options.overwrite, sources=task.sources())
    task.fill_in(args, resolved)
    if run_options.without_forget:
        problem = task.problem()
        train, test = problem.retain, problem.test
        console.print(f"{len(train)} training {task.noun}, {len(problem.forget)} left out ({problem.forget_name})")
    else:
        train, test = task.train_and_test()
        console.print(f"{len(train)} training {task.noun} of {train.source}")
    set_seed(args.seed)
    model = task.new_model(run_options.model, train)
    train, test = task.fitted(model, train, test)
    args.disable_tqdm = True
    if args.save_strategy != "no":  # else an earlier run gives way only once training has succeeded
        folder.prepare()
    begin = time.perf_counter()
    try:
        train_original(model, train, args, task.collator(), [ProgressBar(console, "train")], test)
    finally:
        folder.discard_if_empty()
    figures = {"seconds": round(time.perf_counter() - begin, 1)}
    for name, data in (("train", train), ("test", test)):
        if data is not None:
            predictions = task.predict(model, data, args)
            figures[f"{name}_loss"] = predictions.losses.mean().item()
            figures[f"{name}_accuracy"] = predictions.correct.double().mean().item()
            console.print(f"{name}: loss {figures[f'{name}_loss']:.4f}, accuracy {figures[f'{name}_accuracy']:.2%}")
    folder.write_config(resolved)
    folder.write_json("evaluation.json", figures)
    path = task.save_model(folder, model)
    console.print(f"the model is in {path}")
    return 0
