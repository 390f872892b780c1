"""Who holds which gradient: the processes of a run, and sums over them."""

from hamu.distributed.layout import Agreed, Layout, Replicated, is_sharded
from hamu.distributed.layout_split import SplitPairing
from hamu.distributed.processes import (
    check_equal,
    from_main,
    is_main,
    leave,
    processes,
    rank,
    spread,
    summed,
    wait_for_all,
)

__all__ = [
    "Agreed",
    "Layout",
    "Replicated",
    "SplitPairing",
    "check_equal",
    "from_main",
    "is_main",
    "is_sharded",
    "leave",
    "processes",
    "rank",
    "spread",
    "summed",
    "wait_for_all",
]
