"""Options of the jobs beside those of training, in groups, and the jobs that each belongs to."""

from dataclasses import dataclass, field, fields
from math import inf
from typing import Any

from hamu.data.text import QUESTION_TEMPLATE
from hamu.errors import HamuError
from hamu.evaluation.attacks import AttackSettings
from hamu.evaluation.gains import Level
from hamu.unlearning.goals import check_goal_settings
from hamu.unlearning.trainer import TrainConfig, UnlearnConfig


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_OF_TRAIN = {"without_forget": "which is for hamu train"}
_OF_BOTH = dict.fromkeys(("dry_run", "resume"), "which is for hamu train and hamu unlearn")
_OF_OTHERS = _OF_TRAIN | _OF_BOTH
_IN_ADVANCE = _OF_OTHERS | dict.fromkeys(
    ("auto", "target_share", "max_retain_increase", "lasting"), "which is for hamu unlearn"
)
# Options that the dataclasses of a command have, but not the command, and why.
NOT_TAKEN: dict[str, dict[str, str]] = {
    "unlearn": _OF_TRAIN,
    "assess": _IN_ADVANCE,
    "compare": _IN_ADVANCE
    | {
        "method": "as it takes several, by --methods",
        "resume": "as the same command again goes on where it was",
    },
    "evaluate": _OF_OTHERS,
    "attack": _OF_OTHERS,
}
# Options of any command that may name files and folders.
PATHS = _names(
    "config output_dir work_dir output run runs data test_data data_dir forget_data forget_rows "
    "forget_perturbed retain_perturbed real_authors world_facts similar_data model base_model "
    "retain_model original_model tokenizer unrelated_data"
)
WITH_LINES = ("question_template", "answer_prefix")
# Least values, and those that are too much.
BOUNDS = {
    **dict.fromkeys(
        ("expected_retain", "expected_forget", "jobs", "trials", "max_length"), (1, inf)
    ),
    "generate": (0, inf),
    "lora_dropout": (0, 1),
    "forget_seed": (0, 1 << 63),
}
TOFU_SETS = ("forget_perturbed", "retain_perturbed", "real_authors", "world_facts")
OF_AN_ADAPTER = ("lora_rank", "lora_alpha", "lora_dropout", "lora_targets")
# `hamu unlearn` goes by goal unless one of these is given.
BY_HAND = _names("method learning_rate constraint constraint_mode forget_objective stopping")
# A run may be resumed with other values of these: none changes a result.
MAY_CHANGE = _names(
    "resume output_dir trust_remote_code shard pairing per_device_train_batch_size "
    "gradient_accumulation_steps per_device_eval_batch_size save_strategy save_steps "
    "save_total_limit report_to dataloader_num_workers"
)
# TrainingArguments that matter here, shown by --help; the rest is behind --help-all.
SHOWN = _names(
    "num_train_epochs max_steps learning_rate optim lr_scheduler_type warmup_steps weight_decay "
    "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps "
    "max_grad_norm seed bf16 fp16 use_cpu eval_strategy eval_steps logging_steps save_strategy "
    "save_steps load_best_model_at_end metric_for_best_model report_to channels_last "
    "gradient_checkpointing"
)
# Those of them, and of a run, that do nothing where nothing is trained.
OF_TRAINING = (SHOWN | {"merge"}) - _names(
    "per_device_eval_batch_size seed bf16 fp16 use_cpu channels_last"
)
# TrainingArguments without a place: a job writes into its output folder alone, and reaches no
# network but for names that begin with "hub:" and trackers.
_NAMES_BY_REASON = {
    "nothing is sent anywhere": "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy "
    "hub_always_push hub_revision",
    "--shard and --pairing lay out the processes of torchrun": "deepspeed fsdp fsdp_config "
    "accelerator_config parallelism_config",
    "give --resume and the --output_dir of a run": "resume_from_checkpoint ignore_data_skip "
    "restore_callback_states_from_checkpoint save_only_model enable_jit_checkpoint",
    "a job chooses it": "auto_find_batch_size length_column_name remove_unused_columns label_names "
    "include_for_metrics use_liger_kernel liger_kernel_config neftune_noise_alpha debug log_level "
    "log_level_replica logging_dir do_train do_eval do_predict local_rank batch_eval_metrics "
    "include_num_input_tokens_seen",
}
REFUSED = {name: why for why, names in _NAMES_BY_REASON.items() for name in names.split()}


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


def _as_unlearn(name: str) -> Any:
    same = UnlearnConfig.__dataclass_fields__[name]
    return field(default=same.default, metadata=same.metadata)


@dataclass
class DataOptions:
    """Options that name the data, and the records to forget."""

    data: str | None = _option(
        None,
        "Training data: a file (images: .parquet, .npz, .csv; text: .jsonl, .json, .csv, "
        ".parquet), a folder, hub:OWNER/NAME, or bundled: digits (images), miniature (text).",
    )
    task: str = _option(
        "auto",
        "image, text, or auto: text if --data is a file of texts, or a folder with one as train, "
        "or if --prompt_column or --answer_column is given; image otherwise.",
    )
    test_data: str | None = _option(
        None, "Data never trained on; by default the test split of --data, if it has one."
    )
    data_dir: str | None = _option(None, "Folder that the paths of the data are relative to.")
    forget_class: str | None = _option(None, "Forget this class (name or number).")
    rho: float = _option(
        0.0, "Share of the forget set that is drawn from all other records (paper, App. E.1)."
    )
    forget_rows: str | None = _option(None, "Forget these rows: 3,17,25 or a file of numbers.")
    forget_data: str | None = _option(None, "Forget the records of this second data set.")
    allow_missing: bool = _option(False, "Let --forget_data have records that --data lacks.")
    forget_filter: str | None = _option(
        None, "Text: forget the records with COLUMN=VALUE, COLUMN!=VALUE or COLUMN~REGEX."
    )
    forget_seed: int = _option(42, "Seed of the draw of --forget_class.")
    image_size: int | None = _option(None, "Resize images to this many pixels squared.")
    num_channels: int | None = _option(None, "Convert images to 1 (grey) or 3 (RGB) channels.")
    image_column: str | None = _option(None, "Name of the image column, if not a usual one.")
    label_column: str | None = _option(None, "Name of the label column, if not a usual one.")
    prompt_column: str | None = _option(None, "Text: name of the column of questions.")
    answer_column: str | None = _option(
        None, "Text: name of the column of answers; none for plain text beside such a column."
    )
    question_template: str = _option(QUESTION_TEMPLATE, "Text: prompt, with {question} in it.")
    answer_prefix: str = _option(" ", "Text: what stands between a question and its answer.")
    alternative_column: str | None = _option(
        None,
        "Text: column of other answers to the forget records, for --forget_objective dpo and idk; "
        "by default I don't know.",
    )
    loss_on: str = _option("answer", "Text: what the loss is taken of: answer, or all.")
    expected_retain: int | None = _option(None, "Records to retain: a --dry_run without data.")
    expected_forget: int | None = _option(None, "Records to forget: a --dry_run without data.")
    max_length: int = _option(512, "Text: cut longer records, in tokens.")


@dataclass
class RunOptions:
    """The model and the output."""

    model: str | None = _option(
        None,
        "A folder written by `hamu train` or save_pretrained (a PEFT adapter too), or "
        "hub:OWNER/NAME; for train also resnet20 or tiny-llama, which are new.",
    )
    trust_remote_code: bool = _option(
        False, "Run the code that comes with a model, which can do anything; a flag only."
    )
    base_model: str | None = _option(
        None, "Text: base model of --model, if not where its adapter says."
    )
    tokenizer: str | None = _option(
        None, "Text: take this model's tokenizer, so that losses of a tiny-llama compare with its."
    )
    model_dtype: str | None = _option(
        None,
        "Text: load the model in float32, bfloat16, float16, or auto (its own); by default in "
        "float32, on a GPU in bfloat16 under an adapter.",
    )
    load_in_4bit: bool = _option(False, "Text: linear layers in 4 bits (NF4) under an adapter.")
    lora: bool = _option(False, "Text: train a LoRA adapter alone: that of --model, or a new one.")
    lora_rank: int = _option(8, "Rank of the new adapter.")
    lora_alpha: float = _option(16.0, "Scale of the new adapter, over its rank.")
    lora_dropout: float = _option(0.0, "Dropout of the new adapter.")
    lora_targets: str = _option(
        "all-linear", "Layers to adapt: all-linear (all but the head), or names as q_proj,v_proj."
    )
    merge: bool = _option(False, "Save the adapter merged into its model too, in merged/.")
    dry_run: bool = _option(False, "Only count parameters and steps, and estimate memory.")
    retain_model: str | None = _option(None, "A model retrained without the forget set.")
    without_forget: bool = _option(False, "Train on the retain set alone: the retain model.")
    overwrite: bool = _option(False, "Replace an earlier run in --output_dir.")
    resume: bool = _option(False, "Go on with the run in --output_dir, by its own settings.")


@dataclass
class OriginalOptions:
    """The model before unlearning."""

    original_model: str | None = _option(
        None, "The model before unlearning: attacked too, or a text model's answers beside."
    )


@dataclass
class EvaluateOptions(OriginalOptions):
    """Options of `hamu evaluate`: measurements of a language model beyond its losses."""

    generate: int = _option(200, "Text: answer this many prompts of each set; 0 for none.")
    forget_perturbed: str | None = _option(
        None, "TOFU: forget records with paraphrased_answer and perturbed_answer."
    )
    retain_perturbed: str | None = _option(None, "TOFU: the same of retain records.")
    real_authors: str | None = _option(None, "TOFU: real authors, with perturbed_answer.")
    world_facts: str | None = _option(None, "TOFU: world facts, with perturbed_answer.")
    goal: str | None = _as_unlearn("goal")
    target_forget_loss: float | None = _as_unlearn("target_forget_loss")
    target_share: float = _as_unlearn("target_share")
    metrics: str = _option(
        "",
        "Further metrics that take longer, with commas: for images rmia, ulira (attacks by "
        "--shadow_models); for texts mia_gradnorm, verbmem.",
    )
    shadow_models: int = _option(
        8, "Models trained as the original, by the config.yaml beside it; even, at least 4."
    )
    lm_eval: str = _option(
        "", "Text: tasks of lm-evaluation-harness, with commas: names, or YAML files."
    )
    format: str | None = _option(None, "Text: open-unlearning also writes its keys.")

    def __post_init__(self) -> None:
        check_goal_settings(self.goal, self.target_forget_loss, self.target_share)

    def names(self, option: str) -> list[str]:
        """Names that `metrics` or `lm_eval` lists."""
        given = getattr(self, option).split(",")
        return list(dict.fromkeys(one.strip() for one in given if one.strip()))


@dataclass
class AssessOptions:
    """Options of `hamu assess`."""

    assess_batches: int | None = _option(None, "Random batches of each side; by default all.")
    curvature_samples: int | None = _option(
        None, "Retain records for the curvature, 0: none; by default as one epoch pays for."
    )
    conflicts: bool = _option(True, "Look for the records that are in conflict.")
    bootstrap_memory: float = _option(2.0, "GB for parts of the gradients, for the intervals.")


@dataclass
class CompareOptions:
    """Options of `hamu compare`."""

    methods: list[str] | None = field(default=None, metadata={"help": "By default all."})
    constraints: list[float] | None = field(default=None, metadata={"help": "Of methods with one."})
    learning_rates: list[float] | None = field(default=None, metadata={"help": "By default one."})
    seeds: list[int] | None = field(default=None, metadata={"help": "By default --seed alone."})
    jobs: int = _option(1, "Run this many at a time, each in a process of its own.")
    at: str | None = _option(
        None,
        "Rank by the other side's gain where runs have a loss: forget=LOSS or retain=LOSS, "
        "between evaluations by interpolation.",
    )
    trials: int | None = _option(
        None,
        "With --at: this many runs per method with random learning rates (a tenth to ten times "
        "--learning_rate) and strengths, then the best one with all seeds.",
    )

    def __post_init__(self) -> None:
        if self.at is not None:
            Level.parse(self.at)
        elif self.trials is not None:
            raise HamuError(f"trials {self.trials} are judged at a loss; give --at forget=LOSS")
        for name in ("constraints", "learning_rates") if self.trials is not None else ():
            if getattr(self, name) is not None:
                raise HamuError(f"{name} are drawn by --trials; leave out one of them")


TYPES: dict[str, tuple[type, ...]] = {
    "train": (DataOptions, RunOptions, TrainConfig),
    "assess": (DataOptions, RunOptions, AssessOptions, UnlearnConfig),
    "unlearn": (DataOptions, RunOptions, UnlearnConfig),
    "compare": (DataOptions, RunOptions, CompareOptions, AttackSettings, UnlearnConfig),
    "evaluate": (DataOptions, RunOptions, EvaluateOptions, AttackSettings, TrainConfig),
    "attack": (DataOptions, RunOptions, OriginalOptions, AttackSettings, TrainConfig),
}
# Settings of each command that a file may have; one to resume has them by then.
IN_FILES: dict[str, set[str]] = {
    command: {f.name for cls in types for f in fields(cls)}
    - {"resume", *NOT_TAKEN.get(command, {})}
    for command, types in TYPES.items()
}
