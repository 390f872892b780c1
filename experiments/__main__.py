"""Run an experiment: `python -m experiments NAME [options]`; `--help` after the name shows them."""

from __future__ import annotations

import importlib
import sys

NAMES = ("forgotten", "lasting")


def main() -> None:
    """Run the experiment that is named."""
    if len(sys.argv) < 2 or sys.argv[1] not in NAMES:
        sys.exit(f"usage: python -m experiments {{{','.join(NAMES)}}} [options]")
    importlib.import_module(f"experiments.{sys.argv[1]}").main(sys.argv[2:])


if __name__ == "__main__":
    main()
