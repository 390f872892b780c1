"""Prompt and answer as tokens: tokenized as one text, and cut where the answer begins."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from hamu.errors import HamuError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hamu.data.text import TextRecord

TODAY = datetime(
    2024, 7, 26
)  # for chat templates that write the date: prompts must not change from day to day
_DIRECTIVES = ("-d", "-m", *"aAbBcdDeFHIjmMpSTxXyY")  # of strftime
_FIXED = "".join(f"|replace('%{sign}', '{TODAY.strftime('%' + sign)}')" for sign in _DIRECTIVES)
_DATE = f"{{% macro strftime_now(format) %}}{{{{ format{_FIXED} }}}}{{% endmacro %}}\n"  # in a template's own language


def prompts_and_answers(
    records: Sequence[TextRecord], tokenizer: PreTrainedTokenizerBase, source: str
) -> list[tuple[list[int], list[int]]]:
    """The tokens of each prompt, with those that start a text, and of its answer, without an end.

    The two are tokenized as one text, as a model reads them: a tokenizer that puts a space before a text puts none
    before the answer. Spaces at the end of a prompt are tokenized with the answer, for most tokenizers join them with
    the word that follows. A prompt's tokens are always its own, so that a generation begins as the training did; an
    answer is tokenized apart where the one text would not begin with them, as a token stands across the border.

    Raises:
        HamuError: if a conversation meets a tokenizer without a chat template, or with one that does not fit it.
    """
    pairs = [_cut(*_as_text(record, tokenizer, source)) for record in records]
    prompts = _ids([prompt for prompt, _ in pairs], tokenizer)
    wholes = _ids([prompt + answer for prompt, answer in pairs], tokenizer)
    joined = [whole[: len(prompt)] == prompt for prompt, whole in zip(prompts, wholes, strict=True)]
    apart = iter(
        _ids([answer for (_, answer), one in zip(pairs, joined, strict=True) if not one], tokenizer)
    )
    start, found = _start(tokenizer), []
    for record, prompt, whole, one in zip(records, prompts, wholes, joined, strict=True):
        answer = whole[len(prompt) :] if one else next(apart)
        found.append(
            _started([] if record.messages else start, prompt, answer, tokenizer.bos_token_id)
        )
    return found


def _ids(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """The tokens of each text alone, without special ones around it."""
    if not texts:
        return []
    return list(
        map(
            list,
            tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"],
        )
    )


def _start(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The special tokens that the tokenizer begins a text with."""
    bare, whole = (
        list(tokenizer("a", add_special_tokens=special)["input_ids"]) for special in (False, True)
    )
    if not bare:  # it knows no "a": what is there starts a text, or ends it
        return whole[:-1] if whole[-1:] == [tokenizer.eos_token_id] else whole
    return whole[: next((n for n in range(len(whole)) if whole[n : n + len(bare)] == bare), 0)]


def _started(
    start: list[int], prompt: list[int], answer: list[int], bos: int | None
) -> tuple[list[int], list[int]]:
    """With what starts a text before it, once; a chat template, or who wrote the text, may have written it already."""
    if prompt:
        return (prompt if prompt[: len(start)] == start else [*start, *prompt]), answer
    if not start and bos is not None:
        start = [bos]  # the first token of a text without a prompt is to be predicted too
    return start, (answer[len(start) :] if answer[: len(start)] == start else answer)


def _cut(prompt: str, answer: str) -> tuple[str, str]:
    """Spaces at the prompt's end go to the answer."""
    bare = prompt.rstrip(" ")
    return bare, prompt[len(bare) :] + answer


def _as_text(
    record: TextRecord, tokenizer: PreTrainedTokenizerBase, source: str
) -> tuple[str, str]:
    """Prompt and answer as the model is to see them."""
    if not record.messages:
        return record.prompt, record.answer
    if not tokenizer.chat_template:
        raise HamuError(
            f"{source} holds conversations, but the model's tokenizer has no chat template to write them; give prompt "
            f"and completion"
        )
    import jinja2

    try:
        template = _DATE + tokenizer.get_chat_template()
        before, whole = (
            tokenizer.apply_chat_template(
                list(messages), chat_template=template, tokenize=False, add_generation_prompt=start
            )
            for messages, start in ((record.messages[:-1], True), (record.messages, False))
        )
    except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise HamuError(
            f"a conversation of {source} does not fit the tokenizer's chat template: {error}"
        ) from error
    if not whole.startswith(before):
        raise HamuError(
            "the tokenizer's chat template does not put the last message behind what comes before it; give prompt and "
            "completion"
        )
    return before, whole[len(before) :]
