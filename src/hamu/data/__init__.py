"""Reading data and dividing it into what must go and what must stay."""

from hamu.data.forget_sets import forget_class, forget_data, forget_rows, parse_rows
from hamu.data.images import ImageData, pixel_statistics
from hamu.data.readers import read_images
from hamu.data.split import UnlearningData

__all__ = [
    "ImageData",
    "UnlearningData",
    "forget_class",
    "forget_data",
    "forget_rows",
    "parse_rows",
    "pixel_statistics",
    "read_images",
]
