"""The verdict of the attacks: whether what was forgotten stays forgotten."""

from __future__ import annotations

from hamu.evaluation.attacks.result import ORIGINAL, RETRAINED, UNLEARNED, AttackResult
from hamu.evaluation.attacks.settings import QUANTIZE, RELEARN_FEW, RELEARN_RETAIN

STEPS = 20  # of relearn-retain, after which the verdict looks first
_AGAIN = 40  # and then, if it was run that far: some models hold for 20 steps and give way after
MARGIN = 0.10  # as a share: what may be given back
_KNOWLEDGE = (
    "recognised",
    "extraction_strength",
    "exact_memorization",
)  # high where a record is known


def lasts(result: AttackResult) -> bool | None:
    """True if unlearning lasts; None where the attacks cannot tell.

    It lasts if 20 steps of relearn-retain, and 40 where they were run, give back at most 10 percentage points more
    than they give the retain model, or without a retain model at most 10% of what was forgotten. Given back is, of
    images, the share of forgotten records that is recognised; of texts, the share of the rise of the forget loss
    (from the original to the attacked model) that is lost again. A text model whose loss stays at or above the
    retain model's lasts.

    Without an original, all images count as forgotten that are not recognised at the start.
    """
    return _judged(result)[0]


def given_back(result: AttackResult, role: str = UNLEARNED, steps: int = STEPS) -> float:
    """Share that this many steps of relearn-retain give back to a model, see `lasts`; texts need the original."""
    outcome = result.outcomes[RELEARN_RETAIN][role]
    after = outcome.mean(result.figure, steps)
    if result.kind == "image":
        return after
    before = outcome.mean("loss", 0)
    rise = before - result.outcomes[RELEARN_RETAIN][ORIGINAL].mean("loss", 0)
    return (before - after) / rise if rise > 0 else 0.0


def _judged(result: AttackResult) -> tuple[bool | None, str]:
    """The verdict, and where there is none the reason."""
    by_model = result.outcomes.get(RELEARN_RETAIN)
    if by_model is None:
        return None, f"{RELEARN_RETAIN} was not run"
    ours = by_model[UNLEARNED]
    if STEPS not in ours.at:
        return None, f"{RELEARN_RETAIN} was run for fewer than {STEPS} steps"
    is_text = result.kind == "text"
    if is_text and ORIGINAL not in by_model:
        return None, "the share of the loss that comes back needs --original_model"
    start = ours.mean(result.figure, 0)
    known = by_model[ORIGINAL].mean(result.figure, 0) if ORIGINAL in by_model else 1.0
    forgotten = start - known if is_text else known - start
    if forgotten <= 0:
        return None, "the model remembers the forget set as well as the original does"
    steps = _worst(result)
    back = given_back(result, steps=steps)
    if RETRAINED in by_model:
        theirs = by_model[RETRAINED]
        is_above = is_text and ours.mean("loss", steps) >= theirs.mean("loss", steps)
        return is_above or back - given_back(result, RETRAINED, steps) <= MARGIN, ""
    return (back if is_text else (back - start) / forgotten) <= MARGIN, ""


def _worst(result: AttackResult) -> int:
    """The number of steps, of those that the verdict looks at, that give back most beyond the retain model."""
    by_model = result.outcomes[RELEARN_RETAIN]

    def excess(steps: int) -> float:
        theirs = given_back(result, RETRAINED, steps) if RETRAINED in by_model else 0.0
        return given_back(result, steps=steps) - theirs

    return max((steps for steps in (STEPS, _AGAIN) if steps in by_model[UNLEARNED].at), key=excess)


def sentence(result: AttackResult) -> str:
    """The verdict in a plain sentence."""
    verdict, reason = _judged(result)
    if verdict is None:
        return f"Whether it lasts is open: {reason}."
    by_model, steps = result.outcomes[RELEARN_RETAIN], _worst(result)
    theirs = ""
    if RETRAINED in by_model:
        theirs = f" (a model retrained without them: {given_back(result, RETRAINED, steps):.0%})"
    back = f"{given_back(result, steps=steps):.0%}"
    if result.kind == "image":
        start = f"{by_model[UNLEARNED].mean('recognised', 0):.0%}"
        what = f"bring the share of forgotten records that it recognises from {start} to {back}{theirs}"
    else:
        what = f"give back {back} of what the loss on the forgotten records had risen{theirs}"
    head = "It lasts" if verdict else "It does not last"
    return f"{head}: {steps} steps of fine-tuning on the retain data {what}."


def robustness(result: AttackResult) -> dict[str, float]:
    """Robustness to relearning (R) and to quantization (Q), named after Dorna et al. 2025; 1 is best.

    With a metric m that is high where a record is known (`recognised`, `extraction_strength`,
    `exact_memorization`), means over seeds:

    R = min(Δ_retrained / Δ_unlearned, 1), Δ = m after relearn-few less m before. They relearn the whole forget
    set for one epoch; here the other forgotten records are looked at. 1 where Δ_unlearned is not above 0, and
    never below 0. It needs the retain model.

    Q = min(after / before, 1) of 1 - m, that is of the share forgotten, at 4 bits; 1 where that is 0 before.
    """
    found: dict[str, float] = {}
    few, rounded = result.outcomes.get(RELEARN_FEW, {}), result.outcomes.get(QUANTIZE, {})
    for name in _KNOWLEDGE:
        if RETRAINED in few and name in few[UNLEARNED].figures:
            ours, theirs = (
                few[role].mean(name, few[role].at[-1]) - few[role].mean(name, 0)
                for role in (UNLEARNED, RETRAINED)
            )
            found[f"R_{name}"] = 1.0 if ours <= 0 else min(max(theirs / ours, 0.0), 1.0)
        if UNLEARNED in rounded and name in rounded[UNLEARNED].figures:
            before, after = (1 - rounded[UNLEARNED].mean(name, bits) for bits in (0, 4))
            found[f"Q_{name}"] = 1.0 if before <= 0 else min(after / before, 1.0)
    return found
