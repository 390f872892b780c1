"""Who holds which gradient: the processes of a run, and sums over them."""

from hamu.distributed.layout import Layout, Replicated
from hamu.distributed.processes import check_equal, is_main, processes, rank, summed
from hamu.distributed.split import SplitPairing

__all__ = ["Layout", "Replicated", "SplitPairing", "check_equal", "is_main", "processes", "rank", "summed"]
