"""Run experiments: `python -m experiments NAME [options]`.

`falling`, `forgotten`, `lasting`, `league` and `stopping` measure what docs/results shows of them; `plane` draws the methods; `figure-4`, `table-2`, ..., `all`
are the paper's figures and tables. Without a name it lists these.
"""

from __future__ import annotations

import importlib
import sys

from hamu.cli import run_experiments

OWN = ("falling", "forgotten", "lasting", "league", "plane", "stopping")


def main(argv: list[str] | None = None) -> int:
    """Run the experiment that is named first, or the figures and tables that are."""
    words = sys.argv[1:] if argv is None else argv
    if words and words[0] in OWN:
        importlib.import_module(f"experiments.{words[0]}").main(words[1:])
        return 0
    from experiments.reproduce import run

    return run_experiments(words, run)


if __name__ == "__main__":
    sys.exit(main())
