"""General ability of a language model, measured by lm-evaluation-harness (Gao et al. 2024)."""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from hamu.errors import HamuError, first_line


def harness_tasks(names: Sequence[str]) -> tuple[Any, list[Any]]:
    """Find the tasks of lm-evaluation-harness: its manager, and the tasks for `harness_figures`.

    Args:
        names: names of its tasks, or YAML files.

    Raises:
        HamuError: if it is not installed, or a task is unknown.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise HamuError(
            f"lm_eval {','.join(names)} needs lm-evaluation-harness, which is not installed; pip "
            f"install 'hamu[lm-eval]', or leave it out"
        ) from error
    files = [name for name in names if name.endswith((".yaml", ".yml"))]
    manager = TaskManager(include_defaults=len(files) < len(names))
    for name in names:
        if not (Path(name).is_file() if name in files else manager.match_tasks([name])):
            known = "a YAML file, or a name of `lm-eval ls tasks`"
            raise HamuError(f"lm_eval task {name!r} is unknown; expected {known}")
    return manager, list(names)


def harness_figures(
    tasks: tuple[Any, list[Any]], model: Any, tokenizer: Any, batch_size: int
) -> dict[str, float]:
    """Measure the model on tasks of `harness_tasks`; figures by task and metric, "TASK_METRIC".

    Raises:
        HamuError: if a task cannot be run.
    """
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    manager, names = tasks
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    how: dict[str, Any] = {"task_manager": manager, "bootstrap_iters": 0, "log_samples": False}
    try:
        with redirect_stderr(io.StringIO()):  # bars of every step
            wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
            found = lm_eval.simple_evaluate(wrapped, tasks=names, **how)
    except Exception as error:  # of its own, of data that are not there, of a task's own code
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise HamuError(f"lm_eval {','.join(names)} cannot be run: {reason}") from error
    return {
        f"{task}_{metric.removesuffix(',none')}": float(value)
        for task, figures in found["results"].items()
        for metric, value in figures.items()
        if isinstance(value, float) and "_stderr" not in metric
    }
