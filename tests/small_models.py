"""A language model that the documentation's commands can unlearn from."""

import torch

from hamu.models.language import new_language_model, new_tokenizer


def save_fine_tuned(folder, records):
    """Save a tiny Llama that was trained on some records until its loss is at most 1, and its tokenizer."""
    torch.manual_seed(0)
    tokenizer = new_tokenizer((record.prompt + record.answer for record in records), 400)
    model = new_language_model(tokenizer, hidden=32, layers=1)
    batch = tokenizer(
        [record.prompt + record.answer for record in records], return_tensors="pt", padding=True
    )
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(400):
        loss = model(**batch, labels=labels).loss
        if loss.item() <= 1.0:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() <= 1.0
    for part in (model, tokenizer):
        part.save_pretrained(folder)
