"""Processes of a run, and the layouts of both gradients over them."""

from hamu.core.distributed.layout import (
    DataParallelLayout,
    SplitPairing,
    is_sharded,
    side_of_process,
)
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
