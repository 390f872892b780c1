"""The ResNet of the paper, and loading of classifiers."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForImageClassification, ViTConfig, ViTForImageClassification

from hamu import HamuError
from hamu.data import read_images
from hamu.models import (
    SmallResNet,
    SmallResNetConfig,
    check_fits,
    class_names,
    load_classifier,
    new_classifier,
)
from hamu.models.classifiers import check_as_many_classes, named_as_in_training


def test_resnet20_has_the_parameters_of_he_et_al():
    model = SmallResNet(SmallResNetConfig(depth=20, num_labels=10))
    assert sum(p.numel() for p in model.parameters()) == 269_722
    assert model(torch.zeros(2, 3, 32, 32)).logits.shape == (2, 10)


def test_the_shortcut_subsamples_and_pads_with_zeros():
    model = SmallResNet(SmallResNetConfig(depth=8, num_labels=10)).eval()
    block = model.blocks[1]
    for parameter in block.parameters():
        torch.nn.init.zeros_(parameter)
    x = torch.rand(1, 16, 8, 8)
    out = block(x)
    assert torch.equal(out[:, 8:24], x[:, :, ::2, ::2])
    assert not out[:, :8].any()
    assert not out[:, 24:].any()


@pytest.mark.parametrize(
    "load", [SmallResNet.from_pretrained, AutoModelForImageClassification.from_pretrained]
)
def test_a_saved_model_comes_back_the_same(tmp_path, load):
    data = read_images("digits")
    model = new_classifier("resnet8", data, [0.5], [0.25]).eval()
    model.save_pretrained(tmp_path)
    back = load(tmp_path).eval()
    x = data[0]["pixel_values"][None]
    assert all(
        torch.equal(a, b)
        for a, b in zip(back.state_dict().values(), model.state_dict().values(), strict=True)
    )
    torch.testing.assert_close(back(x).logits, model(x).logits)
    assert back.config.image_mean == [0.5]
    assert back.config.id2label[3] == "3"
    assert {f.suffix for f in tmp_path.iterdir()} == {".json", ".safetensors"}


def vision_transformer(image_size):
    config = ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8,
                       image_size=image_size, patch_size=4, num_channels=1, num_labels=10)  # fmt: skip
    return ViTForImageClassification(config)


def test_any_hugging_face_classifier_loads(tmp_path):
    vision_transformer(image_size=8).save_pretrained(tmp_path)
    check_fits(load_classifier(str(tmp_path)), read_images("digits"))


def saved(path, **config):
    model = SmallResNet(
        SmallResNetConfig(**{"depth": 8, "num_labels": 10, "num_channels": 1} | config)
    )
    model.save_pretrained(path)
    return model


def test_weights_that_are_not_finite_are_refused(tmp_path):
    model = saved(tmp_path)
    with torch.no_grad():
        model.conv.weight[0] = torch.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(HamuError, match=r"weights that are not finite, first in conv\.weight"):
        load_classifier(str(tmp_path))


def test_a_missing_or_damaged_model_is_an_error_that_names_it(tmp_path):
    with pytest.raises(
        HamuError, match=r"nowhere is not a saved model: it has no config\.json; give"
    ):
        load_classifier("nowhere")
    saved(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(HamuError, match="cannot be loaded"):
        load_classifier(str(tmp_path))
    tensors = {
        name: value for name, value in saved(tmp_path).state_dict().items() if name != "conv.weight"
    }
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        HamuError, match=r"the model .* lacks conv\.weight; start from a whole copy"
    ):
        load_classifier(str(tmp_path))


def test_a_model_that_does_not_fit_the_data_is_an_error(tmp_path):
    data = read_images("digits")
    with pytest.raises(
        HamuError, match="label 9 of digits is out of range: the model has 5 classes"
    ):
        check_fits(saved(tmp_path, num_labels=5), data)
    with pytest.raises(
        HamuError, match="3 channels, those of digits have 1; give --num_channels 3"
    ):
        check_fits(saved(tmp_path, num_channels=3), data)
    names = [*"1023456789"]
    with pytest.raises(
        HamuError, match=r"numbers the classes a1, a0, a2, a3, \.\.\., the data a0, a1, a2, a3, "
    ):
        check_fits(saved(tmp_path, id2label={i: f"a{n}" for i, n in enumerate(names)}),
                   replace(data, classes=tuple(f"a{i}" for i in range(10))))  # fmt: skip
    order = {i: str(n) for i, n in enumerate(sorted(range(12), key=str))}
    with pytest.raises(
        HamuError, match=r"numbers the classes 0, 1, 10, 11, \.\.\., the data 0, 1, 2, 3, "
    ):
        check_fits(saved(tmp_path, num_labels=12, id2label=order), data)
    with pytest.raises(HamuError, match=r"numbers the classes 0, 1, \.\.\., the data 3, 7, "):
        check_fits(saved(tmp_path, id2label={i: str(i) for i in range(10)}),
                   replace(data, classes=("3", "7"), labels=data.labels % 2))  # fmt: skip
    check_fits(saved(tmp_path), data)  # LABEL_0 and the like are no names
    with pytest.raises(
        HamuError,
        match=r"the model has image_std \[0\.0\]; expected a number for each of 1 channels",
    ):
        check_fits(saved(tmp_path, image_mean=[0.5], image_std=[0.0]), data)
    with pytest.raises(
        HamuError, match=r"cannot take the images of digits, \(1, 8, 8\): .*; give --image_size 16"
    ):
        check_fits(vision_transformer(image_size=16), data)
    with pytest.raises(HamuError, match="no trainable parameter"):
        check_fits(saved(tmp_path).requires_grad_(False), data)
    with pytest.raises(HamuError, match=r"depth 6n\+2 .*; got 9"):
        new_classifier("resnet9", data, [0.5], [0.5])


@pytest.mark.parametrize(("classes", "message"), [
    (("CAT", "ANT", "BEE"), r"the model writes its classes ant, bee, cat, \.\.\., the data CAT, ANT, BEE, \.\.\.; they "
                            "differ in upper and lower case: write them alike"),
    (("owl", "fox", "elk"), r"the model has the classes ant, bee, cat, \.\.\., the data owl, fox, elk, \.\.\., and no "
                            "name is the same, so that it is not known which is which; name them alike"),
    (("0", "1", "2"), None),
])  # fmt: skip
def test_classes_that_share_no_name_are_not_taken_by_number(classes, message, tmp_path):
    data = read_images("digits")
    data = replace(data, classes=classes, labels=data.labels % 3)
    model = saved(tmp_path, num_labels=3, id2label=dict(enumerate(("ant", "bee", "cat"))))
    if message is None:
        check_fits(model, data)
    else:
        with pytest.raises(HamuError, match=message):
            check_fits(model, data)
    check_fits(saved(tmp_path), data)


def test_the_image_that_is_tried_goes_to_the_models_device(tmp_path):
    asked = []
    model = saved(tmp_path).to("meta")
    model.register_forward_pre_hook(
        lambda _, args, named: asked.extend([*args, *named.values()]), with_kwargs=True
    )
    check_fits(model, read_images("digits"))
    assert [image.device.type for image in asked if isinstance(image, torch.Tensor)] == ["meta"]


@pytest.mark.parametrize(
    ("written", "names"),
    [
        ({"1": "dog", "0": "cat"}, ("cat", "dog")),
        ({"0": "cat", "1": "cat"}, None),
        ({"0": "cat", "2": "dog"}, None),
        ({"first": "cat"}, None),
        (["cat"], None),
        (3, None),
    ],
)
def test_the_names_of_a_models_classes_are_read_from_its_config(tmp_path, written, names):
    assert class_names(str(tmp_path)) is None
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit", "id2label": written}))
    assert class_names(str(tmp_path)) == names


def test_a_number_of_classes_is_told_without_running_code(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", None)  # transformers would ask whether to run it
    for name, labels in (("ours", 3), ("theirs", 4)):
        (tmp_path / name).mkdir()
        own = {"auto_map": {"AutoConfig": "code.Config"}, "model_type": "own"}
        (tmp_path / name / "config.json").write_text(
            json.dumps(own | {"id2label": {str(n): f"class {n}" for n in range(labels)}})
        )
        (tmp_path / name / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(HamuError, match=r"ours has 3 classes, the retain model .*theirs 4"):
        check_as_many_classes(str(tmp_path / "ours"), str(tmp_path / "theirs"))
    assert not (tmp_path / "ran").exists()


def test_a_model_that_is_trained_further_has_the_names_of_its_new_classes():
    model = SimpleNamespace(
        config=SimpleNamespace(id2label={0: "tench", 1: "goldfish", 2: "shark"})
    )
    assert named_as_in_training(model, ("cat", "dog"))
    assert model.config.id2label == {0: "cat", 1: "dog", 2: "LABEL_2"}
    assert model.config.label2id["dog"] == 1
    assert not named_as_in_training(model, ("dog", "bird")), "it names one of them"
    assert not named_as_in_training(model, ("0", "1")), "numbers are no names"
    assert not named_as_in_training(model, ("a", "b", "c", "d")), "it has too few"
