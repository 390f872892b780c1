"""Models that several benchmarks measure."""

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from hamu.models.language import new_language_model


def new_llama(vocabulary: int, hidden: int, layers: int) -> LlamaForCausalLM:
    """A Llama with random weights: 4.3 M parameters for (4096, 256, 4), 111 M for (32000, 768, 12)."""
    words = Tokenizer(
        WordLevel({str(number): number for number in range(vocabulary)}, unk_token="0")
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="0", pad_token="1")
    return new_language_model(tokenizer, hidden=hidden, layers=layers)
