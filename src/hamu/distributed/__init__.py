"""Who holds which gradient: the processes of a run, and sums over them."""

from hamu.distributed.processes import is_main, processes, rank, summed

__all__ = ["is_main", "processes", "rank", "summed"]
