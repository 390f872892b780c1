"""The settings of an adapter: those of a new one, or what a saved one has."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from hamu.cli.options import OF_AN_ADAPTER, RunOptions
from hamu.errors import HamuError
from hamu.models.language import saved_adapter

_AS_PEFT = {"lora_rank": "r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout"}


def settle_adapter(run: RunOptions, given: Collection[str]) -> None:
    """Check the settings of a new adapter; of a saved one put its own in their place.

    Args:
        run: the options of a run, which is to train.
        given: the names of those that were given.

    Raises:
        HamuError: if one was given that can have no effect.
    """
    source = str(run.model)
    saved = saved_adapter(source)
    if saved is not None:
        own = _own(saved)
        if "lora" in given and not run.lora:
            raise HamuError(
                f"{source} is an adapter, which alone is trained; leave out --lora False"
            )
        for name in OF_AN_ADAPTER:
            if name not in given:
                setattr(run, name, own[name])
            elif own[name] is not None and _plain(getattr(run, name)) != _plain(own[name]):
                raise HamuError(
                    f"{name} {getattr(run, name)} is for a new adapter, but {source} is one with {name} {own[name]}; "
                    f"give that, or leave it out"
                )
        run.lora = True
    elif "lora" not in given:
        for name in OF_AN_ADAPTER:
            if name in given:
                raise HamuError(
                    f"{name} {getattr(run, name)} is for a new adapter; give --lora too, or leave it out"
                )


def _own(saved: dict[str, Any]) -> dict[str, Any]:
    """The settings of a saved adapter by our names, None for what its kind has not."""
    targets = saved.get("target_modules")
    named = ",".join(sorted(targets)) if isinstance(targets, list) else targets
    return {name: saved.get(key) for name, key in _AS_PEFT.items()} | {"lora_targets": named}


def _plain(value: Any) -> Any:
    """Targets in any order are the same."""
    return sorted(name.strip() for name in value.split(",")) if isinstance(value, str) else value
