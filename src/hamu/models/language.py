"""Causal language models and their adapters: new, saved, or of the hub.

A model is "tiny-llama" (new, with its own tokenizer) or a saved one; see `hamu.models.storage`.
"""

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.pytorch_utils import Conv1D
from transformers.utils.peft_utils import find_adapter_config_file

from hamu.core.distributed import is_main
from hamu.core.forward import evaluating, predict_logits, without_autocast
from hamu.core.gram import trainable_parameters
from hamu.data import TextData
from hamu.errors import HamuError, reading
from hamu.files import HUB, is_of_hub, parse_json
from hamu.models.storage import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CONFIG,
    NO_SAFETENSORS,
    SAVES_EMBEDDINGS,
    USED_CACHE,
    check_is_saved,
    check_undamaged,
    from_pretrained,
    is_adapter,
    open_tensors,
    refuse_encoder,
)

TINY = "tiny-llama"
DTYPES = ("float32", "bfloat16", "float16", "auto")
FOUR_BIT = "4bit"  # NF4 (Dettmers et al. 2023), for a base whose adapter is trained
_END, _PAD = "<|end|>", "<|pad|>"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
ALL_LINEAR = "all-linear"  # PEFT's word for all but the head, which stands alone
# with a kernel that reads the weights of out_proj past any adapter; as in PEFT
_MAMBA = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h")
_OF_PROMPTS = ("PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING", "MULTITASK_PROMPT_TUNING", "CPT")
_WORTH_A_WARNING = 0.01  # of the weights of layers
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AdapterSettings:
    """A new LoRA adapter (Hu et al. 2022); rank and alpha are the paper's (App. F.2)."""

    rank: int = 8
    alpha: float = 16.0  # the update is scaled by alpha/rank
    dropout: float = 0.0
    targets: str = ALL_LINEAR  # or names of layers


def new_tokenizer(texts: Iterable[str], vocabulary: int = 4096) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of at most so many tokens; it can write any text."""
    from tokenizers import ByteLevelBPETokenizer, Tokenizer

    bpe = ByteLevelBPETokenizer()
    special = {"special_tokens": [_END, _PAD]}
    bpe.train_from_iterator(texts, vocabulary, min_frequency=0, show_progress=False, **special)
    made = Tokenizer.from_str(bpe.to_str())
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=_END, pad_token=_PAD)


def new_language_model(
    tokenizer: PreTrainedTokenizerBase, *, hidden: int = 256, layers: int = 4, max_length: int = 512
) -> LlamaForCausalLM:
    """Make a small Llama with random weights: 4.3 M parameters for 4,096 tokens by default."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=11 * hidden // 4,
        num_hidden_layers=layers,
        num_attention_heads=max(1, hidden // 64),
        max_position_embeddings=max_length,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def load_tokenizer(
    source: str, base_model: str | None = None, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer beside a model; beside its base model, if an adapter has none."""
    remedy = "; --tokenizer takes that of another model"
    if not is_of_hub(source) and not Path(source).is_dir():
        raise HamuError(f"the tokenizer {source} is no folder; name one, or hub:OWNER/NAME")
    try:
        with reading(f"the tokenizer of {source} cannot be loaded", remedy):
            tokenizer = AutoTokenizer.from_pretrained(
                source.removeprefix(HUB),
                local_files_only=not is_of_hub(source),
                trust_remote_code=trust_remote_code,
            )
            found = tokenizer("Does it work?", add_special_tokens=False)["input_ids"]
            if {*found} <= {tokenizer.unk_token_id}:
                raise ValueError("its vocabulary is missing")  # some types load all the same
    except HamuError:
        base = base_of(source, base_model)
        if base in (None, source) or any((Path(source) / one).is_file() for one in _TOKENIZERS):
            raise
        return load_tokenizer(str(base), base, trust_remote_code=trust_remote_code)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_language_model(
    source: str,
    *,
    base_model: str | None = None,
    adapter: AdapterSettings | None = None,
    dtype: str = "float32",
    trust_remote_code: bool = False,
) -> Any:
    """Load a saved causal language model, or a PEFT adapter on its base model.

    Args:
        source: a folder with config.json or adapter_config.json, or "hub:OWNER/NAME".
        base_model: where an adapter's base model lies, if not where the adapter says.
        adapter: puts a new adapter on a whole model; a saved one stays alone, and is trained on.
        dtype: "float32", "bfloat16", "float16", "auto" for the file's, or "4bit" for NF4 weights of
            the linear layers but the head, by bitsandbytes; adapters are float32.
        trust_remote_code: run the code that comes with the model; that can do anything.
    """
    weights = stored_in(dtype)
    check_is_saved(source)
    base_of_adapter = base_of(source, base_model)
    base = base_of_adapter or source
    model = from_pretrained(
        AutoModelForCausalLM,
        base,
        dtype=weights,
        trust_remote_code=trust_remote_code,
        all_of_it=True,
        **({"quantization_config": _four_bit()} if dtype == FOUR_BIT else {}),
    )
    setattr(model, USED_CACHE, getattr(model.config, "use_cache", None))
    model.config.use_cache = False
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):  # bitsandbytes would pack weights for
            module.support_avx512bf16_for_cpu = False  # evaluation, and pass no gradient after it
    if base_of_adapter is not None:
        model = _with_saved_adapter(model, source)
    elif adapter is not None:
        model = with_adapter(model, adapter)
    for config in getattr(model, "peft_config", {}).values():  # saved, to be found from anywhere
        config.base_model_name_or_path = place_of(base)
    check_undamaged(model, source)
    return model


def place_of(source: str) -> str:
    """Return the name that PEFT finds a model by: of the hub, or the whole path."""
    return source.removeprefix(HUB) if is_of_hub(source) else str(Path(source).resolve())


def default_dtype(*, has_adapter: bool) -> str:
    """Name the type in which to load a model: under an adapter bfloat16, if the GPU has it."""
    has_it = torch.cuda.is_bf16_supported(including_emulation=False)
    return "bfloat16" if has_adapter and has_it else "float32"


def stored_in(dtype: str) -> Any:
    """Return the type of the weights that are no NF4, in which those are multiplied; or "auto"."""
    if dtype not in (*DTYPES, FOUR_BIT):
        raise HamuError(f"model_dtype {dtype!r} is unknown; choose one of {', '.join(DTYPES)}")
    if dtype == FOUR_BIT:
        dtype = default_dtype(has_adapter=True)
    return dtype if dtype == "auto" else getattr(torch, dtype)


def _four_bit() -> Any:
    from transformers import BitsAndBytesConfig

    remedy = "; pip install 'hamu[quantize]', or leave load_in_4bit out"
    with reading("4-bit weights need bitsandbytes", remedy):
        import bitsandbytes  # noqa: F401

        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=stored_in(FOUR_BIT),
        )


def _with_saved_adapter(model: Any, source: str) -> Any:
    from peft import PeftModel, get_peft_model_state_dict, load_peft_weights

    where = place_of(source)
    # PEFT looks for what is not there on the hub, and then for pickles: neither is to happen
    if not is_of_hub(source) and not (Path(where) / ADAPTER_WEIGHTS).is_file():
        raise HamuError(f"the adapter {source} {NO_SAFETENSORS}")
    settings = saved_adapter(source) or {}
    if settings.get("peft_type") in _OF_PROMPTS:
        raise HamuError(
            f"the adapter {source} is of type {settings['peft_type']}, which leaves the model as "
            f"it is; unlearn with the whole model, or with an adapter of its layers, such as LoRA"
        )
    for other in sorted(Path(where).glob(f"*/{ADAPTER_CONFIG}")) if is_main() else ():
        _logger.warning("the adapter in %s is not used; name that folder for it", other.parent)
    remedy = (
        "; name the base model that it was made for with --base_model; if tokens were added before "
        "it was trained, resize the embeddings of that (resize_token_embeddings), and save it"
    )
    with reading(f"the adapter {source} is damaged", "; start from a whole copy"):
        open_tensors(Path(where).glob(ADAPTER_WEIGHTS))
    with reading(f"the adapter {source} cannot be loaded", remedy):
        model = PeftModel.from_pretrained(model, where, is_trainable=True)
        own = get_peft_model_state_dict(model, save_embedding_layers=False).keys()
        saved = load_peft_weights(where).keys()
        with_embeddings = get_peft_model_state_dict(model, save_embedding_layers=True).keys()
    if own - saved:
        raise HamuError(f"the adapter {source} lacks {min(own - saved)}; start from a whole copy")
    setattr(model, SAVES_EMBEDDINGS, bool((with_embeddings - own) & saved))
    return model


def saved_adapter(source: str) -> dict[str, Any] | None:
    """Read the settings of a saved adapter, as PEFT has them; None for anything else."""
    with reading(f"the adapter {source} cannot be loaded"):
        found: Any = Path(source) / ADAPTER_CONFIG if is_adapter(source) else None
        if is_of_hub(source):
            found = find_adapter_config_file(source.removeprefix(HUB))
        return None if found is None else {**parse_json(Path(found))}


def base_of(source: str, base_model: str | None = None) -> str | None:
    """Name the base model of a saved adapter, by default where the adapter says; None for a whole
    model. Only a user's own words send the search to the hub.
    """
    settings = saved_adapter(source)
    if settings is None:
        return None
    if base_model is not None:
        check_is_saved(base_model)
        return base_model
    base = str(settings.get("base_model_name_or_path") or "")
    if is_of_hub(source) and not Path(base).is_dir():
        return f"{HUB}{base}"
    if not (Path(base) / CONFIG).is_file():
        raise HamuError(
            f"the adapter {source} was made for the base model {base!r}, which is not a folder "
            f"here; name it with --base_model: a folder, or hub:OWNER/NAME"
        )
    return base


def adapter_base(source: str) -> str | None:
    """Return the folder of the base model that a local adapter names, None without one."""
    settings = None if is_of_hub(source) else saved_adapter(source)
    base = str((settings or {}).get("base_model_name_or_path") or "")
    return base if base and Path(base).is_dir() else None


def with_adapter(model: nn.Module, settings: AdapterSettings) -> Any:
    """Put a new LoRA adapter on a model; it alone is trained."""
    if settings.rank < 1 or not settings.alpha > 0:
        raise HamuError(
            f"lora_rank {settings.rank} must be at least 1 and lora_alpha {settings.alpha} positive"
        )
    from peft import LoraConfig, get_peft_model

    targets = [name.strip() for name in settings.targets.split(",") if name.strip()]
    is_mamba = getattr(model.config, "model_type", "") in _MAMBA
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]
        lora_dropout=settings.dropout,
        target_modules=ALL_LINEAR if targets == [ALL_LINEAR] else targets,
        exclude_modules=["out_proj"] if is_mamba and targets == [ALL_LINEAR] else None,
        task_type="CAUSAL_LM",
    )
    linear = [n for n, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    layers = dict.fromkeys(name.rpartition(".")[2] for name in linear)
    remedy = f"; name layers with --lora_targets; there are {','.join(layers)}"
    with reading("the adapter does not fit the model", remedy):
        adapted = get_peft_model(model, config)
    if targets == [ALL_LINEAR] and is_main():
        _warn_of_what_is_left_out(adapted)
    return adapted


def _warn_of_what_is_left_out(model: Any) -> None:
    """Warn of weights of layers, such as experts in one tensor, that have no adapter."""
    inner = model.get_base_model()
    head = inner.get_output_embeddings()
    ends = [one for one in inner.modules() if one is head or isinstance(one, nn.Embedding)]
    others = {p for end in ends for p in end.parameters()}
    matrices = {
        name: p.numel()
        for name, p in inner.named_parameters()
        if p.dim() > 1 and p not in others and "lora_" not in name
    }
    bare = {name: size for name, size in matrices.items() if ".base_layer." not in name}
    share = sum(bare.values()) / max(1, sum(matrices.values()))
    if share > _WORTH_A_WARNING:
        kinds = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in bare)
        warning = "the adapter does not reach %.0f%% of the layers' weights: %s; without --lora all"
        _logger.warning(f"{warning} are trained", 100 * share, ", ".join([*kinds][:4]))


def longest_text(model: Any) -> int | None:
    """Return the most tokens that the model can read at once, None if it does not say."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or None


def check_reads(model: Any, data: TextData) -> None:
    """Check that vocabulary and length fit the data, and try the shortest record of it."""
    trainable_parameters(model)
    _check_vocabulary(model, max(int(ids.max()) for ids in data.tokens))
    longest, most = max(len(ids) for ids in data.tokens), longest_text(model)
    if most is not None and longest > most:
        raise HamuError(
            f"{data.texts.source} has {longest} tokens, the model reads {most}; give --max_length"
        )
    shortest = min(data.tokens, key=len).long().to(next(model.parameters()).device)[None]
    with reading(f"the model cannot read the records of {data.texts.source}"):
        check_causal_mask(model, {"input_ids": shortest, "labels": shortest})


def _check_vocabulary(model: Any, highest: int) -> None:
    rows = len(model.get_input_embeddings().weight)  # an adapter around it has the weight too
    if highest >= rows:
        raise HamuError(
            f"the tokenizer has token {highest}, the model {rows} embeddings; use its own tokenizer"
        )


def check_causal_mask(model: nn.Module, batch: Mapping[str, Tensor]) -> None:
    """Check that no prediction depends on later tokens, for labels are shifted by one.

    A record of a batch of input_ids and labels, [B, T], is tried with another last token; other
    batches pass. All processes of a sharded model must call it.
    """
    ids = batch.get("input_ids")
    if ids is None or ids.dim() != 2 or batch["labels"].shape != ids.shape:
        return
    if hasattr(model, "get_input_embeddings"):
        _check_vocabulary(model, int(ids.max()))
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", type(model).__name__)
    refuse_encoder(config, kind)
    real = batch.get("attention_mask", torch.ones_like(ids))
    row = int(real.sum(1).argmax())
    place = int(real[row].nonzero().max())
    two = {  # copied
        name: value[[row, row]]
        for name, value in batch.items()
        if isinstance(value, Tensor) and value.shape[:1] == ids.shape[:1] and name != "labels"
    }
    two["input_ids"][1, place] = int(ids[row, place] == 0)  # another token that any vocabulary has
    with torch.no_grad(), evaluating(model), without_autocast(model):
        before, after = predict_logits(model, two)[:, :place].float()
    precision = next(p.dtype for p in model.parameters() if p.is_floating_point())
    rounding = min(100 * torch.finfo(precision).eps, 0.05)
    if place and (before - after).abs().max() > rounding * before.abs().max():
        raise HamuError(
            f"a model of type {kind} is not a causal language model: its predictions change with "
            f"later tokens; give one that was trained to predict the next token"
        )
