"""Names the records behind a figure: all of a set, a sample of it, or the batches of a step."""

from __future__ import annotations

from hamu.report.elements import counted
from hamu.report.run import Run

_OF_A_STEP = ("criterion", "target", "no forgetting", "retain loss", "infeasible")  # kinds of end


def measured_on(run: Run, name: str) -> str:
    """The records of a set on which a run's evaluations measured it.

    Args:
        run: finished or not.
        name: "forget", "retain" or "test".
    """
    after = (run.evaluation or {}).get("after", {}).get(name, {})
    count = after.get("samples", after.get("records"))
    total = ((run.record or {}).get(f"{name}_set") or {}).get("records")
    if count is None:
        most = run.settings.get("max_eval_samples")
        return f"at most {most:,} records" if isinstance(most, int) else "the set's records"
    if total is None:
        return counted(count, "records")
    return (
        f"all {counted(total, 'records')}"
        if count >= total
        else f"a sample of {count:,} of {total:,} records"
    )


def end_measured_on(run: Run) -> str:
    """The records behind the figures of a run's stop reason, in brackets; "" if it has none."""
    if (run.evaluation or {}).get("steering") is not None:
        return " (figures of the measurements that steered the run, not of the evaluation above)"
    return " (figures of that step's batches)" if run.ended_kind in _OF_A_STEP else ""
