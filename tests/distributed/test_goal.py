"""A run by goal starts with the same settings in every process, whatever each has measured."""

import os
import subprocess
import sys

PROGRAM = """
import os
from types import SimpleNamespace
import torch.distributed as dist
from torch import nn
from rich.console import Console
from hamu import UnlearnConfig
from hamu.cli import goal

dist.init_process_group("gloo")
rank = dist.get_rank()
found = SimpleNamespace(
    trusted_rate=lambda share: 0.125 * (1 + rank),
    verdict=SimpleNamespace(constraint=0.25 + 0.5 * rank, headline="found"),
    hamu_q=SimpleNamespace(kappa=1.0, cos=0.5),
)
goal.assess = lambda *args, **settings: found
problem = SimpleNamespace(retain=[], forget=[])
args = UnlearnConfig(output_dir="unused", use_cpu=True)
goal.tune(nn.Linear(1, 1), problem, args, None, Console(quiet=True))
print(args.learning_rate, args.constraint, args.trust_region)
dist.destroy_process_group()
"""


def test_all_processes_take_what_the_main_one_has_found(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    launched = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--tee", "1"]
    done = subprocess.run(
        [*launched, str(program)], env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    said = [line.split("]:")[-1].strip() for line in done.stdout.splitlines()]
    assert said == ["0.125 0.25 True"] * 2, done.stderr[-3000:]
