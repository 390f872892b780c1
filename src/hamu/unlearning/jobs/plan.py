"""Plan of a run: parameters, steps and memory; nothing is trained or written."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.pytorch_utils import Conv1D

from hamu.core.forward import evaluating, predict_logits
from hamu.core.objectives import build_objective
from hamu.errors import HamuError, reading
from hamu.files import is_of_hub
from hamu.models import language
from hamu.models.storage import check_is_saved, refuse_encoder
from hamu.unlearning.goal_run import steps_of_a_run
from hamu.unlearning.goals import choose_goal
from hamu.unlearning.jobs.options import DataOptions
from hamu.unlearning.jobs.settings import Settings
from hamu.unlearning.jobs.tasks import Task, TextTask, choose_task
from hamu.unlearning.trainer import UnlearnConfig
from hamu.unlearning.trainer.resumable import set_up_layers

# Published shapes of models that recipes name, so that a plan needs no look at the hub; all that
# is not named is the default of transformers.
KNOWN = {"hub:meta-llama/Llama-2-7b-chat-hf": partial(LlamaConfig, max_position_embeddings=4096)}


@dataclass(frozen=True)
class RunPlan:
    """Result of a dry run."""

    rows: tuple[tuple[str, str], ...]  # names and sizes, in words
    note: str  # the assumptions of the estimate, and the ways to need less


def plan(settings: Settings, console: Console) -> RunPlan:
    """Parameters, steps and memory of a run; nothing is trained or written."""
    has_data = settings.of(DataOptions).data is not None
    task = choose_task(settings, console) if has_data else TextTask(settings, console)
    args, model = task.args, str(task.run.model)
    unlearns, is_built_in = isinstance(args, UnlearnConfig), task.is_built_in(model)
    if task.run.model is None or (unlearns and is_built_in):
        raise HamuError("a dry run needs --model, a folder or hub:OWNER/NAME")
    task.classes_of = None if is_built_in else model
    if model not in KNOWN:  # which is no adapter, and needs no look at the hub
        task.settle_adapter()
    sets, batch = _sets(task), args.per_device_train_batch_size
    of_kind = _of_texts if isinstance(task, TextTask) else _of_images
    net, kept, most = of_kind(task, sets)
    parameters = sum(p.numel() for p in net.parameters())
    trained = sum(p.numel() for p in net.parameters() if p.requires_grad)
    memory = _of_weights(args, 4 * trained, frozen_bytes(net, task.dtype())) | kept
    per_step = batch * args.gradient_accumulation_steps
    batches = len(next(iter(sets.values()))) / batch
    batches = math.floor(batches) if args.dataloader_drop_last else math.ceil(batches)
    epoch = max(1, math.ceil(batches / args.gradient_accumulation_steps))
    steps = args.max_steps if args.max_steps > 0 else math.ceil(epoch * args.num_train_epochs)
    if isinstance(args, UnlearnConfig) and args.auto and args.max_steps <= 0:
        steps = steps_of_a_run(args, len(sets["retain"]), per_step)
    rows = [("parameters", f"{parameters:,}")]
    rows.append(("trained", f"{trained:,} ({trained / parameters:.2%})"))
    for name, one in sets.items():
        stated = " (stated)" if isinstance(one, range) else ""
        rows.append((f"{name} {task.noun}", f"{len(one):,}{stated}"))
    rows.append((f"{task.noun}{' of each side' * unlearns} in a step", f"{per_step:,}"))
    rows.append(("steps", f"{steps:,} ({epoch:,} an epoch)"))
    for name, size in (memory | {"sum, on each device": sum(memory.values())}).items():
        written = f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
        rows.append((f"memory: {name}", written))
    shorter = ", --max_length" if isinstance(task, TextTask) else ""
    if net.supports_gradient_checkpointing:
        shorter += ", --gradient_checkpointing"
    note = (
        f"Activations are those of {batch} {most}. Smaller: --per_device_train_batch_size with "
        f"--gradient_accumulation_steps{shorter}"
    )
    return RunPlan(tuple(rows), note)


def _sets(task: Task) -> dict[str, Any]:
    """The records that a run goes through, by set; a range where only their number is known."""
    counts = {"retain": task.data.expected_retain, "forget": task.data.expected_forget}
    sets: dict[str, Any] = {name: range(count) for name, count in counts.items() if count}
    sources = task.data_sources()
    is_here = sources and all(s == task.bundled or Path(s).exists() for s in sources)
    unlearns, without_forget = isinstance(task.args, UnlearnConfig), task.run.without_forget
    needs_data = not isinstance(task, TextTask) or task.classes_of is None
    if is_here or needs_data or len(sets) < len(counts):
        if not unlearns and not without_forget:
            return {"training": task.train_and_test()[0]}
        sets = task.problem().sets()
        if isinstance(task.args, UnlearnConfig):
            has_model, is_needed = task.run.retain_model is not None, task.args.needs_goal
            choose_goal(sets, task.args, has_retain_model=has_model, is_needed=is_needed)
    if unlearns:
        return {"retain": sets["retain"], "forget": sets["forget"]}
    everything = range(sum(map(len, sets.values())))
    return {"training": sets["retain"] if without_forget else everything}


def _of_texts(task: Any, sets: dict[str, Any]) -> tuple[Any, dict[str, float], str]:
    """The model without weights, bytes of activations, and the records of a batch in words."""
    args, run = task.args, task.run
    if task.classes_of is None:  # its vocabulary follows from the records
        model = task.new_model(task.built_in, sets["training"])
    else:
        if run.model not in KNOWN:
            check_is_saved(run.model)
        adapter = task.adapter_of(run.model)
        model = meta_model(run.model, adapter, base_model=run.base_model, **task.trust)
        if not hasattr(model, "peft_config"):  # an adapter is float32
            name, _ = next(model.named_parameters())
            task.check_trained_in(_loaded_in(model, task.dtype()), name)
    length = task.length_for(model)
    tokens = args.per_device_train_batch_size * length
    kept = activations(model, tokens, checkpointing=args.gradient_checkpointing)
    return model, kept, f"records of {length} tokens"


def _of_images(task: Any, sets: dict[str, Any]) -> tuple[Any, dict[str, float], str]:
    """The same from the model itself, new or loaded, and a forward pass of one image."""
    args, source = task.args, task.run.model
    is_loaded, first = isinstance(args, UnlearnConfig), next(iter(sets.values()))
    model = task.start_model(source) if is_loaded else task.new_model(source, first)
    set_up_layers(model, args, channels_last=False)
    image = task.fitted(model, *sets.values(), None)[0][0]["pixel_values"]
    kept = kept_for_backward(model, {"pixel_values": image[None]})
    counted = "images" + ", none recomputed" * args.gradient_checkpointing
    return model, {"activations": args.per_device_train_batch_size * kept}, counted


def meta_model(
    source: str,
    adapter: language.AdapterSettings | None,
    *,
    base_model: str | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """Make what `load_language_model` would load, without weights, from the configuration alone."""
    from peft import PeftConfig, get_peft_model

    base = None if source in KNOWN else language.base_of(source, base_model)
    whole, trusted = base or source, {"trust_remote_code": trust_remote_code}
    with (
        reading(f"a language model after the configuration of {whole} cannot be loaded"),
        torch.device("meta"),
    ):
        config: Any = KNOWN[whole]() if whole in KNOWN else None
        config = config or AutoConfig.from_pretrained(
            language.place_of(whole), local_files_only=not is_of_hub(whole), **trusted
        )
        refuse_encoder(config, whole)
        model: Any = AutoModelForCausalLM.from_config(config, **trusted)
        if base is None:
            return model if adapter is None else language.with_adapter(model, adapter)
        form: Any = PeftConfig.from_pretrained(language.place_of(source))
        form.inference_mode = False
        if hasattr(form, "init_lora_weights"):
            form.init_lora_weights = True  # other ways need the weights
        return get_peft_model(model, form)


def frozen_bytes(model: Any, dtype: str) -> float:
    """Count the bytes of what is not trained, loaded as a `dtype` of `load_language_model`."""
    own = _loaded_in(model, dtype)
    frozen: float = own.itemsize * sum(p.numel() for p in model.parameters() if not p.requires_grad)
    if dtype != language.FOUR_BIT:
        return frozen
    # half a byte, and a float32 scale for each 64 weights
    head, kinds = model.get_output_embeddings(), (nn.Linear, Conv1D)
    linear = [m for m in model.modules() if isinstance(m, kinds) and m is not head]
    packed: float = sum(m.weight.numel() for m in linear if not m.weight.requires_grad)
    return frozen - packed * (own.itemsize - 0.5 - 4 / 64)


def _loaded_in(model: Any, dtype: str) -> torch.dtype:
    """Type of the weights that `load_language_model` would load as a `dtype`."""
    own = language.stored_in(dtype)
    return (model.config.dtype or torch.float32) if own == "auto" else own


def activations(model: Any, tokens: int, *, checkpointing: bool) -> dict[str, float]:
    """Estimate the bytes that a language model keeps of a forward pass, from above.

    After Korthikanti et al. 2022: 34 bytes per token, layer and unit of width in half precision.
    """
    text = model.config.get_text_config()  # a model for images and text has one inside
    layers, per_layer = text.num_hidden_layers, 34 * tokens * text.hidden_size
    whole = per_layer * layers
    kept = 2 * tokens * text.hidden_size * layers + per_layer if checkpointing else whole
    return {"activations": kept, "logits": 10 * tokens * text.vocab_size}


def _of_weights(args: Any, trained: int, frozen: float) -> dict[str, float]:
    """Bytes of all but activations, from those of the weights."""
    names, copies = [], 0
    if isinstance(args, UnlearnConfig):
        names = [name for name in args.objectives().values() if name]
        checked = args.check_steps != 0 and args.optim != "sgd"  # against both kept gradients
        # of a controller, a look ahead, a check and a `StepGuard`
        of_step = max(2 * checked, args.correct_steps or args.trust_region)
        copies = 2 * args.auto + 4 * args.lasting + of_step
    keeps = any(build_objective(name).needs_original for name in names)
    return {
        "weights": frozen + trained,
        "gradients": (len(names) or 1) * trained,
        "optimizer state": 2 * trained if "adam" in args.optim else 0,
        "original model": trained if keeps else 0,
        "copies of what is trained": copies * trained,
    }


def kept_for_backward(model: nn.Module, batch: Mapping[str, Tensor]) -> int:
    """Count the bytes of activations that a forward pass keeps for its backward pass."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with evaluating(model), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = predict_logits(model, batch)  # held until all is counted, or memory is reused
    weights = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    del logits
    return sum(size for place, size in kept.items() if place not in weights)
