"""`--auto`: unlearning by goal. The user says what must go and what may be paid; the rest follows from measurements.

Learning rate from the curvature, first constraint from the frontier; from there on the `Steering` leads.
"""

from __future__ import annotations

import math

from hamu.assess import Assessment
from hamu.errors import HamuError
from hamu.training.config import UnlearnConfig
from hamu.training.steering import MOST_GROWTH

_FIRST_ERROR_RATIO = 0.5
# the settings that a run by goal finds by itself
TUNED = (
    "learning_rate", "constraint", "constraint_mode", "stopping", "lr_scheduler_type", "trust_region",
    "trust_region_growth",
)  # fmt: skip


def apply_assessment(args: UnlearnConfig, found: Assessment) -> None:
    """Change the settings to those of a run by goal: learning rate and first constraint from the assessment, the trust
    region on.

    Raises:
        HamuError: if the curvature was not measured.
    """
    rate = found.trusted_rate(_FIRST_ERROR_RATIO)
    if rate is None:
        raise HamuError("auto needs the curvature for the learning rate; assess with curvature_samples above 0")
    args.learning_rate = rate if math.isfinite(rate) else args.learning_rate
    args.method, args.constraint_mode, args.constraint = "hamu-q", "relative", max(0.05, found.verdict.constraint)
    args.stopping, args.lr_scheduler_type = "off", "constant"  # the steering decides when to stop
    args.trust_region, args.trust_region_growth = True, MOST_GROWTH
