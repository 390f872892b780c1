"""Which process reads which records: the same global batches for any number of processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accelerate.data_loader import DataLoaderShard
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import TrainingArguments


class ShareSampler(Sampler[list[int]]):
    """Batches of one process: its share of each global batch, which is the same for any number of processes.

    A last batch with fewer records than processes leaves some without a share. They get a record that is read for its
    shape alone, as ~index, so that all take part in the step; see `PairedDataset`.

    Args:
        length: the number of records.
        batch_size: of the global batch, over all processes.
        rank, processes: this process, and how many there are.
    """

    def __init__(self, length: int, batch_size: int, rank: int, processes: int) -> None:
        self._length, self._batch_size = length, batch_size
        self._rank, self._processes = rank, processes

    def __len__(self) -> int:
        return -(-self._length // self._batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(0, self._length, self._batch_size):
            whole = range(start, min(start + self._batch_size, self._length))
            yield list(whole[self._rank :: self._processes]) or [~start]


def shared_loader(
    data: Dataset[Any], sampler: ShareSampler, collate: Any, args: TrainingArguments
) -> DataLoader[Any]:
    """A loader of these batches that knows of epochs, and of batches to skip when a run is resumed."""
    return DataLoaderShard(
        data,
        batch_sampler=sampler,
        collate_fn=collate,
        num_workers=args.dataloader_num_workers,
        pin_memory=args.dataloader_pin_memory,
    )
