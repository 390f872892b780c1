"""Give the commands random inputs: settings, flags, data, models, checkpoints and records, valid ones made wrong.

    python benchmarks/fuzz.py [--inputs 2000] [--seed 0]

Every command runs in this process, on tiny data, with a copy of the same small files. What must hold of each: it
returns one of its exit codes within 20 seconds; refused, it says so in one line and has written nothing; it never
writes outside its output folder, reaches for the network, or prints what is not its own. Prints how many inputs ended
how; ends with code 1 if anything did not hold, with the inputs that show it.
"""

from __future__ import annotations

import argparse
import faulthandler
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
from _report import print_report
from fuzzing import INPUTS, Input, World
from hypothesis import HealthCheck, Phase, given, seed, settings

MEMORY = (
    12e9  # bytes of address space: what takes more is an error here, not a machine without memory
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (int(MEMORY), int(MEMORY)))
    outcomes: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as place:
        world = World(place)

        @seed(options.seed)
        @settings(max_examples=options.inputs, phases=[Phase.generate], deadline=None, database=None,
                  suppress_health_check=list(HealthCheck))  # fmt: skip
        @given(INPUTS)
        def every(tried: Input) -> None:
            faulthandler.dump_traceback_later(300, exit=True)  # what no signal reaches
            begin = time.monotonic()
            outcome = world.run(tried)
            faulthandler.cancel_dump_traceback_later()
            outcomes[outcome.name] += 1
            kinds[tried.kind] += 1
            if outcome.wrong or outcome.name == "refused, not foreseen":
                print(
                    f"{outcome.name} ({time.monotonic() - begin:.1f} s): {tried}\n  {outcome.wrong or outcome.said}",
                    flush=True,
                )

        every()
    for counts in (kinds, outcomes):
        for name, count in sorted(counts.items()):
            print(f"{count:6} {name}")
    print_report(
        "fuzz", {name.replace(" ", "_"): count for name, count in sorted(outcomes.items())}
    )
    return 1 if outcomes["violation"] else 0


if __name__ == "__main__":
    sys.exit(main())
