"""The jobs: one call does what one command does, with the same options, defaults and result."""

from hamu.unlearning.jobs.comparison import Compared, compare
from hamu.unlearning.jobs.measure import Assessed, Attacked, Evaluated, assess, attack, evaluate
from hamu.unlearning.jobs.plan import RunPlan
from hamu.unlearning.jobs.reporting import report
from hamu.unlearning.jobs.sources import Verified, verify
from hamu.unlearning.jobs.training import Trained, Unlearned, train, unlearn

__all__ = [
    "Assessed",
    "Attacked",
    "Compared",
    "Evaluated",
    "RunPlan",
    "Trained",
    "Unlearned",
    "Verified",
    "assess",
    "attack",
    "compare",
    "evaluate",
    "report",
    "train",
    "unlearn",
    "verify",
]
