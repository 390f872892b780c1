"""What of evaluation.json a report looks at, as a schema: a file that does not fit cannot be shown."""

from __future__ import annotations

from typing import Any

_NUMBER = {"type": "number"}
_PERHAPS = {"type": ["number", "null"]}
_COUNT = {"type": "integer"}
_SET = {
    "type": "object",
    "required": ["loss", "accuracy"],
    "properties": {
        "loss": _NUMBER,
        "accuracy": _NUMBER,
        "probability": _PERHAPS,
        "samples": _COUNT,
        "records": _COUNT,
        "per_class_accuracy": {"type": "object", "additionalProperties": _PERHAPS},
    },
}
_INFERENCE = {"type": ["object", "null"], "properties": {"auc": _PERHAPS, "min_k": _PERHAPS}}
_MODEL = {
    "type": "object",
    "required": ["forget", "retain"],
    "properties": {
        "forget": _SET,
        "retain": _SET,
        "test": _SET,
        "membership_inference": _INFERENCE,
        "retain_model": {"type": "object", "properties": {"membership_inference": _INFERENCE}},
    },
}
_STANDING = {
    "type": "object",
    "required": ["records", "forgotten", "loss_quantiles", "worst"],
    "properties": {
        "records": _COUNT,
        "forgotten": _COUNT,
        "loss_quantiles": {
            "type": "object",
            "required": ["min", "q25", "median", "q75", "max"],
            "additionalProperties": _PERHAPS,
        },
        "worst": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["loss", "target"],
                "properties": {"loss": _PERHAPS, "target": _PERHAPS},
            },
        },
    },
}
_GOAL = {
    "type": ["object", "null"],
    "required": ["kind", "share", "loss", "budget", "reached", "before", "after"],
    "properties": {
        "kind": {"enum": ["unseen", "retrained", "erased", "loss"]},
        "share": _NUMBER,
        "loss": _PERHAPS,
        "budget": _PERHAPS,
        "reached": {"type": "boolean"},
        "before": _STANDING,
        "after": _STANDING,
    },
}
ENTRY: dict[str, Any] = {  # an evaluation along the way
    "type": "object",
    "required": ["step", "eval_forget_gain", "eval_retain_gain"],
    "properties": {
        "step": _COUNT,
        "eval_forget_gain": _NUMBER,
        "eval_retain_gain": _NUMBER,
        "eval_forget_loss": _NUMBER,
        "eval_retain_loss": _NUMBER,
    },
}
EVALUATION: dict[str, Any] = {
    "type": "object",
    "required": ["before", "after", "trajectory"],
    "properties": {
        "before": _MODEL,
        "after": _MODEL,
        "trajectory": {"type": "array", "items": ENTRY},
        "steps_taken": _COUNT,
        "steps_skipped": _COUNT,
        "goal": _GOAL,
        "promise": {"type": ["object", "null"], "properties": {"kept": _PERHAPS, "judged": _COUNT}},
    },
}
SUMMARY: dict[str, Any] = {  # of a demo
    "type": "object",
    "required": ["methods"],
    "properties": {
        "methods": {
            "type": "object",
            "additionalProperties": {
                "type": "object",
                "required": ["trajectory"],
                "properties": {
                    "trajectory": {"type": "array", "items": {"type": "array", "items": _NUMBER}}
                },
            },
        },
    },
}

_ROWS = {"type": "array", "items": {"type": "array", "items": _NUMBER}}
_OUTCOME = {
    "type": "object",
    "required": ["at", "figures", "retain_accuracy"],
    "properties": {
        "at": {"type": "array", "items": _COUNT},
        "figures": {"type": "object", "additionalProperties": _ROWS},
        "retain_accuracy": {"type": "array", "items": _NUMBER},
    },
}
ATTACK: dict[str, Any] = {
    "type": "object",
    "required": [
        "format",
        "lasts",
        "verdict",
        "kind",
        "outcomes",
        "records",
        "skipped",
        "settings",
    ],
    "properties": {
        "format": {"enum": ["hamu-attack"]},
        "lasts": {"type": ["boolean", "null"]},
        "verdict": {"type": "string"},
        "kind": {"enum": ["image", "text"]},
        "outcomes": {
            "type": "object",
            "additionalProperties": {
                "type": "object",
                "required": ["unlearned"],
                "properties": {},
                "additionalProperties": _OUTCOME,
            },
        },
        "records": {
            "type": "object",
            "required": ["forget", "measured"],
            "properties": {"forget": _COUNT, "measured": _COUNT},
        },
        "skipped": {"type": "object", "additionalProperties": {"type": "string"}},
        "settings": {"type": "object"},
    },
}
