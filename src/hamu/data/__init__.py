"""Reading data and dividing it into what must go and what must stay."""

from hamu.data.forget_sets import forget_class, forget_data, forget_rows, lists_rows, parse_rows
from hamu.data.image_readers import read_images
from hamu.data.images import ImageData, pixel_statistics
from hamu.data.split import UnlearningData
from hamu.data.text import TextCollator, TextData, TextRecord, TextRecords, encode
from hamu.data.text_readers import matching, read_text

__all__ = [
    "ImageData",
    "TextCollator",
    "TextData",
    "TextRecord",
    "TextRecords",
    "UnlearningData",
    "encode",
    "forget_class",
    "forget_data",
    "forget_rows",
    "lists_rows",
    "matching",
    "parse_rows",
    "pixel_statistics",
    "read_images",
    "read_text",
]
