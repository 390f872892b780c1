"""Before the run: how hard will it be?"""

from hamu.assess.hardness import Hardness, measure_hardness

__all__ = ["Hardness", "measure_hardness"]
