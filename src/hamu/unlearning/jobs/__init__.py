"""The jobs: one call does what one command does, with the same options, defaults and result.

The options are those of the command, by keyword; `hamu COMMAND --help-all` lists them. A `console`
shows progress, by default none does. Each raises a `HamuError` if an option is unknown or does not
fit the others, the data or the model, before anything is written.
"""

from hamu.unlearning.jobs.comparison import Compared, compare
from hamu.unlearning.jobs.measure import Assessed, Attacked, Evaluated, assess, attack, evaluate
from hamu.unlearning.jobs.plan import RunPlan
from hamu.unlearning.jobs.review import Verified, report, verify
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
