"""Environment of a benchmark, and the JSON line that ends its output."""

import json
import platform
from collections.abc import Mapping

import torch


def print_report(name: str, figures: Mapping[str, float]) -> None:
    """Print the figures as the last line."""
    environment = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        environment["gpu"] = torch.cuda.get_device_name()
    print(json.dumps({"name": name, "figures": dict(figures), "environment": environment}))
