"""Both sides of a run: items are checked when a trainer is made, losses may call for its end."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from transformers import T5Config

from hamu import HamuError, UnlearnConfig, UnlearnTrainer
from hamu.core.objectives import Scored
from hamu.unlearning.goals import StopReason
from hamu.unlearning.trainer.sides import EarlyEnds

GOOD = [{"pixel_values": torch.ones(3), "labels": 0}] * 4


def trainer_of(tmp_path, retain=GOOD, forget=GOOD, model=None, settings=None, **given):
    settings = {"eval_on_start": False, "eval_strategy": "no"} | (settings or {})
    args = UnlearnConfig(output_dir=str(tmp_path / "out"), **settings)
    given |= {"retain_dataset": retain, "forget_dataset": forget}
    return UnlearnTrainer(model or nn.Linear(3, 2), args, **given)


@pytest.mark.parametrize(
    ("side", "item", "found"),
    [
        ("retain", {"image": 0, "label": 1}, "a mapping with the keys image, label"),
        ("forget", {"text": "a", "labels": 1}, "a mapping with the keys text, labels"),
        ("test_dataset", (torch.ones(3), 1), "of type tuple"),
    ],
)
def test_an_item_of_another_form_is_named_with_the_form_expected(tmp_path, side, item, found):
    named = f"an item of the {side.removesuffix('_dataset')} set is {found}"
    with pytest.raises(HamuError, match=f"{named}; expected a mapping with pixel_values and lab"):
        trainer_of(tmp_path, **{side: [item] * 4})
    assert not (tmp_path / "out").exists(), "before anything is written"


def test_a_collator_or_a_model_of_ones_own_may_have_other_items(tmp_path):
    pairs = TensorDataset(torch.ones(4, 3), torch.zeros(4).long())

    def own(items):
        pixels, labels = map(torch.stack, zip(*items, strict=True))
        return {"pixel_values": pixels, "labels": labels}

    assert trainer_of(tmp_path, pairs, pairs, data_collator=own)
    numbers = [(pixels.numpy(), label) for pixels, label in pairs]
    assert trainer_of(
        tmp_path,
        numbers,
        numbers,
        data_collator=lambda items: own([(torch.tensor(x), y) for x, y in items]),
    )
    of_texts = {"input_ids": pairs[0], "labels": pairs[0]}  # whose lengths are needed before
    for made in ({"x": 1}, of_texts):
        with pytest.raises(HamuError, match="an item of the retain set is of type tuple"):
            trainer_of(tmp_path, pairs, pairs, data_collator=lambda _, made=made: made)
    model = nn.Linear(3, 2)
    model.main_input_name = "input_values"
    records = [{"input_values": torch.ones(3), "labels": 0}] * 4
    assert trainer_of(tmp_path, records, records, model)
    with pytest.raises(HamuError, match="keys input_values, labels"):
        trainer_of(tmp_path, records, records)


TEXT = {"input_ids": [1, 2, 3], "labels": [1, 2, 3]}


def with_images():
    """A module that reads images beside texts."""
    model = nn.Linear(3, 2)
    model.forward = lambda input_ids, inputs_embeds=None, pixel_values=None, position_ids=None: None
    return model


class Adapted(nn.Linear):
    """As PEFT wraps a model: its own forward takes anything."""

    peft_config = None

    def __init__(self):
        super().__init__(3, 2)

    def forward(self, *given, **more):
        pass

    def get_base_model(self):
        return with_images()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"labels": 1}, r"has labels of shape \(\) for input_ids of shape \(3,\); give each token"),
        ({"pixel_values": [1.0]}, "has pixel_values, which the model reads and the default data_c"),
        ({"pixel_values": torch.ones(2)}, "has pixel_values, which the model reads"),
        ({"pixel_values": [[1], [2, 3]], "inputs_embeds": None}, "has pixel_values, which the mod"),
        ({"position_ids": [2, 3, 4]}, "has position_ids, which the model reads"),
    ],
)
def test_texts_with_a_label_in_all_or_with_more_than_tokens_are_refused(tmp_path, more, message):
    items = [TEXT | more] * 4
    with pytest.raises(HamuError, match=f"an item of the retain set {message}"):
        trainer_of(tmp_path, items, [TEXT] * 4, with_images())
    assert trainer_of(tmp_path, [TEXT | {"source": "a book"}] * 4, [TEXT] * 4, with_images())
    for more in ({"pixel_values": torch.zeros(2)}, {"position_ids": [0, 1, 2]}):
        assert trainer_of(tmp_path, [TEXT | more] * 4, [TEXT] * 4, with_images())
    adapted = Adapted()
    with pytest.raises(HamuError, match="has pixel_values, which the model reads"):
        trainer_of(tmp_path, [TEXT | {"pixel_values": [1.0]}] * 4, [TEXT] * 4, adapted)


def test_sets_by_name_are_refused(tmp_path):
    with pytest.raises(HamuError, match="the retain set is a mapping with the keys train, test; "):
        trainer_of(tmp_path, {"train": GOOD, "test": GOOD})
    assert trainer_of(tmp_path, dict(enumerate(GOOD)))


def test_a_model_that_would_lose_small_steps_or_its_encoder_is_refused(tmp_path):
    half = nn.Linear(3, 2).bfloat16()
    with pytest.raises(HamuError, match=r"weight is trained in torch\.bfloat16, which loses small"):
        trainer_of(tmp_path, model=half)
    kept = {"correct_steps": True}, {"optim": "adamw_anyprecision"}
    given = {"optimizers": (torch.optim.SGD(half.parameters(), 0.1), None)}
    assert trainer_of(tmp_path, model=half, **given)
    assert trainer_of(tmp_path, model=half, optimizer_cls_and_kwargs=(torch.optim.SGD, {}))
    assert all(trainer_of(tmp_path, model=half, settings=one) for one in kept)
    for one in half.parameters():
        one.requires_grad_(one.dim() == 1)
    half.bias = nn.Parameter(torch.zeros(2))  # as an adapter
    assert trainer_of(tmp_path, model=half)
    half.config = T5Config()
    with pytest.raises(HamuError, match="the model Linear is of type t5 and would lose its encod"):
        trainer_of(tmp_path, model=half)


def test_a_loss_of_ones_own_is_not_left_uncalled(tmp_path):
    class Weighted(UnlearnTrainer):
        def compute_loss(self, *given, **more):
            raise AssertionError

    args = UnlearnConfig(output_dir=str(tmp_path / "out"))
    with pytest.raises(HamuError, match="compute_loss is never called; make the loss an objective"):
        Weighted(nn.Linear(3, 2), args, retain_dataset=GOOD, forget_dataset=GOOD)


def scored(logits, labels):
    return Scored.of(torch.tensor(logits), torch.tensor(labels))


def test_a_record_that_is_read_for_its_shape_alone_counts_for_nothing():
    """A process without a share of a last batch has one, of weight 0."""
    ends = EarlyEnds(max_retain_loss=1.0, max_forget_loss=0.6)
    ends.add("retain", scored([[9.0, 0.0]], [1]), 0.0)
    ends.add("forget", scored([[0.0, 0.0]], [0]))
    ends.add("forget", scored([[9.0, 0.0]], [1]), 0.0)
    assert ends.end() == StopReason("target", "the forget loss of a step, 0.6931, has reached 0.6")


@pytest.mark.parametrize(
    ("logits", "limits", "kind"),
    [
        ([0.0, 0.0], {"max_forget_loss": 0.3}, "target"),
        ([9.0, 0.0], {"min_forget_loss": 0.1}, "no forgetting"),
        ([-9.0, 0.0], {"max_retain_loss": 0.4}, "retain loss"),
        # a record without any probability reaches no target, but diverges
        ([-torch.inf, 0.0], {"max_forget_loss": 0.5}, None),
        ([-torch.inf, 0.0], {"max_retain_loss": 0.5}, "retain loss"),
    ],
)
def test_each_limit_has_its_stop_reason(logits, limits, kind):
    ends = EarlyEnds(**limits)
    for side in ("retain", "forget"):
        ends.add(side, scored([logits, [-9.0, 9.0]], [0, 1]))
    stop = ends.end()
    assert kind == (stop and stop.kind)
