"""Records in, batches out: texts, images, the forget set, and pairs of both sides."""

from hamu.data.forget_sets import (
    PairedDataset,
    UnlearningData,
    batch_of,
    draw_positions,
    forget_class,
    forget_data,
    forget_rows,
    lists_rows,
    matching,
    parse_rows,
    subset,
)
from hamu.data.images import ImageData, pixel_statistics, read_images
from hamu.data.text import TextData, TextRecord, TextRecords, collate, encode, read_text

__all__ = ["ImageData", "PairedDataset", "TextData", "TextRecord"]
__all__ += ["TextRecords", "UnlearningData", "batch_of", "collate", "draw_positions", "encode"]
__all__ += ["forget_class", "forget_data", "forget_rows", "lists_rows", "matching", "parse_rows"]
__all__ += ["pixel_statistics", "read_images", "read_text", "subset"]
