"""Causal language models and their adapters: new, saved, or of the hub.

A model is "tiny-llama" (new, with a tokenizer of its own), a folder written by `save_pretrained` (a whole model, or a
PEFT adapter), or "hub:OWNER/NAME". Only the last may use the network. Code that comes with a model runs
only where `trust_remote_code` is given.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from hamu.core.gram import trainable_parameters
from hamu.data.sources import HUB, is_of_hub
from hamu.errors import HamuError, first_line
from hamu.models.causality import check_is_causal
from hamu.models.loading import (
    ADAPTER_CONFIG,
    check_is_saved,
    check_undamaged,
    from_pretrained,
    is_adapter,
    reading,
)
from hamu.models.saving import set_saves_embeddings

if TYPE_CHECKING:
    from hamu.data import TextData

TINY = "tiny-llama"
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "auto": "auto",
}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_ADAPTER_WEIGHTS = "adapter_model.safetensors"
_OTHER_VOCABULARY = re.compile(  # what torch says of tensors with other rows, the same width
    r"size mismatch for \S*(?:embed_tokens|lm_head|wte|word_embeddings|embed_in|embed_out)\.\S*weight: .*"
    r"\[(\d+), (\d+)\].*\[(?!\1,)\d+, \2\]"
)
_END, _PAD = "<|end|>", "<|pad|>"
_ALL_LINEAR = "all-linear"  # PEFT's word, which stands alone


@dataclass(frozen=True)
class AdapterSettings:
    """A new LoRA adapter (Hu et al. 2022); the defaults are the paper's (App. F.2).

    Attributes:
        rank: r, the rank of each update.
        alpha: α; the update is scaled by α/r.
        dropout: dropout of the adapter's input while it trains.
        targets: names of the layers to adapt, "all-linear" for all but the head, "" for what PEFT knows about the
            architecture.
    """

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    targets: str = ""


def new_tokenizer(texts: Iterable[str], vocabulary: int = 4096) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on these texts; it can write any text.

    Args:
        texts: what to train it on.
        vocabulary: the most tokens that it may have.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[_END, _PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_END, pad_token=_PAD)


def new_language_model(
    tokenizer: PreTrainedTokenizerBase, *, hidden: int = 256, layers: int = 4, max_length: int = 512
) -> LlamaForCausalLM:
    """A small Llama with random weights, input and output embeddings shared: 4.3 M parameters for 4,096 tokens.

    Args:
        tokenizer: gives the vocabulary and the special tokens.
        hidden: the width; heads have 64 of it each.
        layers: the depth.
        max_length: the longest text in tokens.
    """
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
    """The tokenizer that lies beside a model; beside its base model, if an adapter has none.

    The end-of-sequence token pads where it has no padding token.

    Raises:
        HamuError: if there is none, or it cannot be loaded.
    """
    settings = saved_adapter(source)
    if settings is None:
        return _tokenizer_beside(source, trust_remote_code)
    if is_of_hub(source):  # what is there is known only by trying
        try:
            return _tokenizer_beside(source, trust_remote_code)
        except HamuError:
            return _tokenizer_beside(_base_of(source, settings, base_model), trust_remote_code)
    beside = any((Path(source) / name).is_file() for name in _TOKENIZER_FILES)
    return _tokenizer_beside(
        source if beside else _base_of(source, settings, base_model), trust_remote_code
    )


def _tokenizer_beside(source: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source.removeprefix(HUB),
            local_files_only=not is_of_hub(source),
            trust_remote_code=trust_remote_code,
        )
        tokenizer("Does it work?")
    except Exception as error:  # as `reading`
        raise HamuError(
            f"the tokenizer of {source} cannot be loaded: {first_line(error)}; --tokenizer takes that of another model"
        ) from error
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
    """A saved causal language model, or a PEFT adapter on its base model.

    Args:
        source: a folder with config.json or adapter_config.json, or "hub:OWNER/NAME".
        base_model: where an adapter's base model lies, if not where the adapter says.
        adapter: puts a new adapter on a whole model; all else is frozen then. A saved adapter stays the only one, and
            is trained on.
        dtype: "float32", "bfloat16", "float16", or "auto" for that of the file. Adapters are float32 in any case.
        trust_remote_code: run the code that comes with the model; that can do anything.

    Returns:
        A PreTrainedModel, or with an adapter a PeftModel.

    Raises:
        HamuError: if the dtype is unknown, or the model is not there, cannot be loaded, or has weights that are not
            finite.
    """
    if dtype not in _DTYPES:
        raise HamuError(f"model_dtype {dtype!r} is unknown; choose one of {', '.join(_DTYPES)}")
    check_is_saved(source)
    base_of_adapter = base_of(source, base_model)
    base = base_of_adapter or source
    model = from_pretrained(
        AutoModelForCausalLM,
        base,
        dtype=_DTYPES[dtype],
        trust_remote_code=trust_remote_code,
        all_of_it=True,
    )
    model.config.use_cache = False
    if base_of_adapter is not None:
        model = _with_saved_adapter(model, source)
    elif adapter is not None:
        model = with_adapter(model, adapter)
    for config in getattr(
        model, "peft_config", {}
    ).values():  # saved with the adapter, to be found from anywhere
        config.base_model_name_or_path = (
            base.removeprefix(HUB) if is_of_hub(base) else str(Path(base).resolve())
        )
    check_undamaged(model, source)
    return model


def _with_saved_adapter(model: Any, source: str) -> Any:
    from peft import PeftModel, get_peft_model_state_dict, load_peft_weights

    where = source.removeprefix(HUB)
    if not is_of_hub(source):
        # PEFT looks for what is not there on the hub, and then for pickles: neither is to happen.
        if not (Path(source) / _ADAPTER_WEIGHTS).is_file():
            raise HamuError(
                f"the adapter {source} has no {_ADAPTER_WEIGHTS}, and no other file is read, for a pickle can run "
                f"code; save it again with save_pretrained"
            )
        where = str(Path(source).resolve())
    with reading(f"the adapter {source}"):
        try:
            model = PeftModel.from_pretrained(model, where, is_trainable=True)
        except RuntimeError as error:
            if _OTHER_VOCABULARY.search(str(error)):
                raise HamuError(
                    f"the adapter {source} was saved with a vocabulary of another size than its base model has: tokens "
                    f"were added before it was trained; call resize_token_embeddings on the base model, save it with "
                    f"the adapter's tokenizer, and name it with --base_model"
                ) from error
            raise
        own = get_peft_model_state_dict(model, save_embedding_layers=False).keys()
        saved = load_peft_weights(where).keys()
        with_embeddings = get_peft_model_state_dict(model, save_embedding_layers=True).keys()
    if own - saved:
        raise HamuError(f"the adapter {source} lacks {min(own - saved)}; start from a whole copy")
    set_saves_embeddings(model, bool((with_embeddings - own) & saved))
    return model


def saved_adapter(source: str) -> dict[str, Any] | None:
    """The settings of a saved adapter, as PEFT has them; None for anything else."""
    if is_of_hub(source):
        from transformers.utils.peft_utils import find_adapter_config_file

        with reading(f"the model {source}"):
            found = find_adapter_config_file(source.removeprefix(HUB))
        if found is None:
            return None
        path = Path(found)
    else:
        if not is_adapter(source):
            return None
        path = Path(source) / ADAPTER_CONFIG
    with reading(f"the adapter {source}"):
        settings = json.loads(path.read_text(encoding="utf-8"))
        return {**settings}


def base_of(source: str, base_model: str | None = None) -> str | None:
    """The base model of a saved adapter, as `load_language_model` finds it; None for a whole model.

    Args:
        source: see `load_language_model`.
        base_model: where it lies, if not where the adapter says.

    Raises:
        HamuError: if it is not there.
    """
    settings = saved_adapter(source)
    return None if settings is None else _base_of(source, settings, base_model)


def adapter_base(source: str) -> str | None:
    """The folder of the base model that a local adapter names, None if there is no such folder."""
    if is_of_hub(source):
        return None
    base = str((saved_adapter(source) or {}).get("base_model_name_or_path") or "")
    return base if base and Path(base).is_dir() else None


def with_adapter(model: nn.Module, settings: AdapterSettings) -> Any:
    """The model with a new LoRA adapter, which alone is trained.

    Raises:
        HamuError: if a setting is out of range, or the architecture has no such layers.
    """
    if settings.rank < 1 or not settings.alpha > 0:
        raise HamuError(
            f"lora_rank {settings.rank} must be at least 1 and lora_alpha {settings.alpha} positive"
        )
    from peft import LoraConfig, get_peft_model

    targets = [name.strip() for name in settings.targets.split(",") if name.strip()]
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=_ALL_LINEAR if targets == [_ALL_LINEAR] else targets or None,
        task_type="CAUSAL_LM",
    )
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        raise HamuError(
            f"the adapter does not fit the model: {first_line(error)}; name its layers with --lora_targets"
        ) from error


def longest_text(model: Any) -> int | None:
    """The most tokens that the model can read at once, None if it does not say."""
    config = getattr(model, "config", None)
    inner = config.get_text_config() if hasattr(config, "get_text_config") else config
    value = getattr(inner, "max_position_embeddings", None)
    return int(value) if value else None


def check_reads(model: Any, data: TextData) -> None:
    """Check that the model can read this data, in the end by trying its shortest record.

    Raises:
        HamuError: if the model has no trainable parameter, vocabulary or length do not fit, or a later token changes
            what it says before.
    """
    trainable_parameters(model)
    highest = max(int(ids.max()) for ids in data.tokens)
    rows = len(model.get_input_embeddings().weight)  # an adapter around it has the weight too
    if highest >= rows:
        raise HamuError(
            f"the tokenizer has token {highest}, the model only {rows} embeddings; use the model's own tokenizer"
        )
    longest, most = max(len(ids) for ids in data.tokens), longest_text(model)
    if most is not None and longest > most:
        raise HamuError(
            f"a record of {data.texts.source} has {longest} tokens, the model reads {most}; give --max_length {most}"
        )
    shortest = min(data.tokens, key=lambda ids: (len(ids) < 2, len(ids))).long()
    changed = shortest.clone()
    changed[-1] = (shortest[-1] + 1) % rows
    both = torch.stack([shortest, changed]).to(next(model.parameters()).device)
    try:
        check_is_causal(model, {"input_ids": both}, len(shortest) - 1)
    except HamuError:
        raise
    except (ValueError, RuntimeError, IndexError) as error:
        raise HamuError(
            f"the model cannot read the records of {data.texts.source}: {first_line(error)}"
        ) from error


def _base_of(source: str, settings: dict[str, Any], base_model: str | None) -> str:
    """Where an adapter's base model is; a name that is not a folder is never looked up without being asked for."""
    if base_model is not None:
        check_is_saved(base_model)
        return base_model
    base = str(settings.get("base_model_name_or_path") or "")
    if is_of_hub(source) and not Path(base).is_dir():
        return f"{HUB}{base}"
    if not (Path(base) / "config.json").is_file():
        raise HamuError(
            f"the adapter {source} was made for the base model {base!r}, which is not a folder here; name it with "
            f"--base_model: a folder, or hub:OWNER/NAME"
        )
    return base
