"""Who holds which gradient: the processes of a run, and sums over them."""

from hamu.core.distributed.layout import DataParallelLayout, is_sharded
from hamu.core.distributed.layout_split import SplitPairing, side_of_process
from hamu.core.distributed.processes import (
    all_reduced,
    barrier,
    broadcast,
    check_equal,
    from_main,
    is_main,
    leave,
    rank,
    world_size,
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
    "rank",
    "side_of_process",
    "world_size",
]
