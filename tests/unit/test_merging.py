"""An adapter merged into its model: the model on disk says what model and adapter said, tied embeddings or not."""

import pytest
import torch
from peft import AdaptionPromptConfig, LoraConfig, get_peft_model

from hamu import HamuError
from hamu.data import read_text
from hamu.models.language import (
    AdapterSettings,
    load_language_model,
    new_language_model,
    new_tokenizer,
    with_adapter,
)
from hamu.models.saving import check_can_merge, merged, save_model


def saved_besides(**of_lora):
    """An adapter that has whole modules of its own."""
    return lambda model: get_peft_model(
        model, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", **of_lora)
    )


def adapting(targets):
    return lambda model: with_adapter(model, AdapterSettings(targets=targets))


def small_model():
    tokenizer = new_tokenizer(
        (record.prompt for record in read_text("miniature").select(range(3)).records), 300
    )
    return new_language_model(tokenizer, hidden=16, layers=1, max_length=64)


def test_what_cannot_be_merged_is_known_before():
    check_can_merge(saved_besides()(small_model()))
    with pytest.raises(
        HamuError,
        match=r"the adapter has a bias at .*q_proj, where its model has none to merge it into",
    ):
        check_can_merge(saved_besides(lora_bias=True)(small_model()))
    prompts = AdaptionPromptConfig(adapter_len=2, adapter_layers=1, task_type="CAUSAL_LM")
    with pytest.raises(
        HamuError,
        match="an adapter of type ADAPTION_PROMPT cannot be merged into its model; leave --m",
    ):
        check_can_merge(get_peft_model(small_model(), prompts))


@pytest.mark.parametrize(("adapted", "is_tied"), [
    (adapting("q_proj"), True),
    (adapting("lm_head"), False),
    (adapting("embed_tokens"), False),
    (adapting("q_proj,embed_tokens,lm_head"), False),
    (saved_besides(modules_to_save=["lm_head"]), False),
    (saved_besides(modules_to_save=["lm_head"], ensure_weight_tying=True), True),
], ids=["inside", "output", "input", "both", "whole output", "whole both"])  # fmt: skip
def test_merged_on_disk_is_the_model_with_its_adapter(adapted, is_tied, tmp_path):
    torch.manual_seed(0)
    tokenizer = new_tokenizer(
        (record.prompt for record in read_text("miniature").select(range(3)).records), 300
    )
    model = adapted(new_language_model(tokenizer, hidden=16, layers=1, max_length=64)).eval()
    ids = torch.arange(40, 60)[None]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_()
        separate = model(input_ids=ids).logits
        save_model(merged(model), tmp_path)
        whole = load_language_model(str(tmp_path)).eval()
        torch.testing.assert_close(whole(input_ids=ids).logits, separate, rtol=1e-4, atol=1e-4)
    assert whole.config.tie_word_embeddings == is_tied
