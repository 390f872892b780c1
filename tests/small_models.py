"""Small models, and the data for them, that several tests work on."""

import json
from pathlib import Path

import numpy as np
import torch
from transformers import ViTConfig, ViTForImageClassification

from hamu.data import ImageData, TextRecords, encode, read_text
from hamu.evaluation import TokenPredictions
from hamu.models import SmallResNet, SmallResNetConfig
from hamu.models.language import AdapterSettings, new_language_model, new_tokenizer, with_adapter
from hamu.models.storage import save_model


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


def save_small_world(rows):
    """Data (a.npz, t.jsonl) and models (image, text, adapter) in the working folder, as small as can be."""
    images = np.random.default_rng(0).integers(0, 256, (12, 8, 8), dtype=np.uint8)
    np.savez("a.npz", images=images, labels=np.arange(12) % 3)
    Path("t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shape = {"depth": 8, "width": 2, "num_channels": 1, "num_labels": 3}
    grey = SmallResNetConfig(**shape, image_mean=[0.5], image_std=[0.3])
    SmallResNet(grey).save_pretrained("image")
    tokenizer = new_tokenizer((row["question"] for row in rows), vocabulary=300)
    text = new_language_model(tokenizer, hidden=16, layers=1, max_length=128)
    text.save_pretrained("text")
    adapted = with_adapter(text, AdapterSettings(rank=2))
    adapted.peft_config["default"].base_model_name_or_path = "text"
    Path("adapter").mkdir()
    save_model(adapted, Path("adapter"))
    for folder in ("text", "adapter"):
        tokenizer.save_pretrained(folder)


def small_vision_transformer(**settings):
    """A new ViT, by default of three channels and two classes."""
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "image_size"), 8)
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 1, "patch_size": 4}
    return ViTForImageClassification(ViTConfig(**sizes | settings))


def small_texts():
    """A tiny Llama, its tokenizer, and 24 records as its tokens."""
    records = read_text("miniature").select(range(24))
    tokenizer = new_tokenizer((one.prompt + one.answer for one in records.records), 400)
    torch.manual_seed(0)
    return new_language_model(tokenizer, hidden=16, layers=1), tokenizer, encode(records, tokenizer)


def drawn_images(count, seed=0, *, size=4, label=None):
    """Grey images of three classes; their labels are drawn too unless one is given."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (count, 1, size, size), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, 3, (count,), generator=generator)
    labels = labels if label is None else torch.full((count,), label)
    return ImageData(pixels, labels, ("a", "b", "c"), "made", torch.arange(count))


def text_records(*records, source="these"):
    return TextRecords(tuple(records), source, torch.arange(len(records)))


def token_predictions(losses, expected=-1.0, spread=1.0):
    """Predictions of some records with these losses of their tokens, right where below 1."""
    flat = torch.tensor([x for each in losses for x in each], dtype=torch.float64)
    record = torch.tensor([i for i, each in enumerate(losses) for _ in each], dtype=torch.long)
    moments = (torch.full_like(flat, value) for value in (expected, spread))
    return TokenPredictions(flat, flat < 1.0, *moments, record, len(losses))
