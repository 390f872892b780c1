"""What computed a run: device and versions. Runs of one table may differ in it, as finished ones are not made again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hamu.unlearning.record.record import versions


def written_environment(environment: Mapping[str, Any]) -> str:
    """The environment that a record names, as text."""
    numbers = ", ".join(f"{name} {number}" for name, number in environment["versions"].items())
    return f"{environment['device']}, {numbers}"


def this_environment(device: str) -> str:
    """The environment of this process on a device, as text."""
    return written_environment({"device": device, "versions": versions("torch", "transformers")})


def differing_environments(runs: Mapping[str, str | None]) -> str:
    """What tells the environments of runs apart, and whose each is; "" if they are the same.

    Args:
        runs: the environment of each, by name; None where it is not known, which tells nothing.
    """
    names: dict[str, list[str]] = {}
    for name, environment in runs.items():
        if environment is not None:
            names.setdefault(environment, []).append(name)
    if len(names) < 2:
        return ""
    common = set.intersection(*(set(environment.split(", ")) for environment in names))
    groups = []
    for environment, of in names.items():
        own = [part for part in environment.split(", ") if part not in common] or ["nothing else"]
        groups.append(f"{', '.join(own)} ({', '.join(of)})")
    return "; ".join(groups)
