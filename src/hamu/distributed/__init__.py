"""Who holds which gradient: the processes of a run, and sums over them."""

from hamu.distributed.layout import DataParallelLayout, is_sharded
from hamu.distributed.layout_split import SplitPairing, side_of_process
from hamu.distributed.processes import (
    all_reduced,
    barrier,
    broadcast,
    check_equal,
    from_main,
    is_main,
    leave,
    processes,
    rank,
)

__all__ = [
    "DataParallelLayout",
    "SplitPairing",
    "all_reduced",
    "barrier",
    "broadcast",
    "check_equal",
    "from_main",
    "is_main",
    "is_sharded",
    "leave",
    "processes",
    "rank",
    "side_of_process",
]
