"""The job itself: what must be forgotten, how a run gets there, and how it lasts."""

import logging

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns when PEFT imports it
