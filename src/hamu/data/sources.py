"""What a name of data or of a model stands for: something bundled, something of the hub, or a local path."""

from __future__ import annotations

from pathlib import Path

from hamu.errors import HamuError

HUB = "hub:"  # only a name that begins so may use the network
DIGITS = "digits"  # images that come with scikit-learn
MINIATURE = "miniature"  # texts that come with this package


def is_of_hub(source: str) -> bool:
    """Whether it is a data set or model of the Hugging Face hub."""
    return source.startswith(HUB)


def is_local(source: str, bundled: str) -> bool:
    """Whether it is a path.

    Args:
        source: a data set or model.
        bundled: the name of the bundled data of its kind, `DIGITS` or `MINIATURE`.
    """
    return source != bundled and not is_of_hub(source)


def located(source: str, data_dir: str | Path | None, bundled: str) -> str:
    """Where a data set is: relative to a folder, if one is given, unless it is bundled or of the hub.

    Args:
        source: the data set.
        data_dir: the folder.
        bundled: see `is_local`.
    """
    return (
        source
        if data_dir is None or not is_local(source, bundled)
        else str(Path(data_dir) / source)
    )


def existing(source: str) -> Path:
    """The path of a local data set.

    Raises:
        HamuError: if nothing is there.
    """
    path = Path(source)
    if not path.exists():
        raise HamuError(
            f"{source} is neither a file nor a folder; check the path (--data_dir sets the folder that it is relative "
            f"to), or write hub:OWNER/NAME for a data set of the Hugging Face hub"
        )
    return path
