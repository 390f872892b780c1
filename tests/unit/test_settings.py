"""Settings out of range are refused with a message that says what to do; the registry builds and names methods."""

import math
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import Holder, random_gram
from torch import nn

from hamu import (
    HamuError,
    HamuQ,
    HamuU,
    Method,
    PairedGradients,
    StoppingRule,
    build_method,
)
from hamu.core import plugins
from hamu.core.methods import method_classes, method_rows


@pytest.mark.parametrize("method", [HamuQ, HamuU])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"constraint": 0.0}, "constraint 0.0 must be a positive number"),
        ({"constraint": -1.0}, "constraint -1.0 must be a positive number"),
        ({"constraint": math.nan}, "constraint nan must be a positive number"),
        ({"constraint": math.inf}, "constraint inf must be a positive number"),
        (
            {"constraint_mode": "share"},
            "constraint_mode 'share' is unknown; choose absolute or relative",
        ),
        (
            {"constraint": 1.5, "constraint_mode": "relative"},
            r"share of what is possible, in \(0, 1\]; got 1.5",
        ),
        ({"radius": "large"}, "radius 'large' must be positive"),
        ({"radius": 0.0}, r"radius 0.0 must be positive \(R/η\)"),
        ({"radius": math.inf}, "radius inf must be positive"),
        (
            {"on_infeasible": "ignore"},
            "on_infeasible 'ignore' is unknown; choose stop, clamp or skip",
        ),
        ({"distribution": "fair"}, "distribution 'fair' is unknown; choose norm_product, uniform"),
        (
            {"distribution": [1.0, -1.0]},
            "shares of the constraint must be finite, non-negative and not all zero",
        ),
        ({"distribution": [0.0, 0.0]}, "non-negative and not all zero"),
        ({"distribution": [1.0, math.nan]}, "non-negative and not all zero"),
        ({"distribution": [1.0, math.inf]}, "shares of the constraint"),
        ({"stopping": "sometimes"}, "stopping criterion 'sometimes' is unknown"),
        (
            {"stopping": None},
            "stopping None must be aggregate, any, global or off, or a StoppingRule that has one",
        ),
        ({"stopping": False}, "stopping False must be aggregate"),
        ({"constraint": "0.5"}, "constraint '0.5' must be a positive number"),
        ({"constraint": None}, "constraint None must be a positive number"),
        ({"radius": None}, r"radius None must be positive \(R/η\)"),
        ({"distribution": None}, "shares of the constraint must be finite"),
        ({"distribution": ["a"]}, "shares of the constraint must be finite"),
        ({"constraint": torch.tensor([0.1, 0.2])}, "must be a positive number"),
    ],
)
def test_a_method_refuses(method, settings, message):
    with pytest.raises(HamuError, match=message):
        method(**settings)


def test_shares_must_match_the_blocks():
    with pytest.raises(
        HamuError, match="the constraint has 3 shares, but there are 4 blocks; give one each"
    ):
        HamuQ(distribution=[1, 1, 1]).weigh(random_gram(0, blocks=4))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_grad_norm": 0.0}, "max_grad_norm 0.0 must be positive, or None for no clipping"),
        ({"max_grad_norm": math.nan}, "max_grad_norm nan must be positive"),
        (
            {"blocks": "layer"},
            "blocks 'layer' is unknown; choose tensor, module, model, or give a function",
        ),
    ],
)
def test_paired_gradients_refuse(settings, message):
    with pytest.raises(HamuError, match=message):
        PairedGradients(nn.Linear(2, 2), HamuQ(), **settings)


def test_complex_parameters_are_refused():
    model = nn.Linear(2, 2, dtype=torch.complex64)
    with pytest.raises(
        HamuError, match=r"^weight is complex; keep its real and imaginary part as two parameters"
    ):
        PairedGradients(model, HamuQ())
    model.requires_grad_(False)
    PairedGradients(nn.Sequential(model, nn.Linear(2, 2)), HamuQ())


@pytest.mark.parametrize("method", ["hamu-q", HamuQ, None])
def test_paired_gradients_take_a_method_that_is_made(method):
    with pytest.raises(
        HamuError, match=r"is not a Method; pass an instance, such as HamuQ\(\) or build_method"
    ):
        PairedGradients(nn.Linear(2, 2), method)


def test_a_model_without_trainable_parameters_is_refused():
    with pytest.raises(
        HamuError, match="no trainable parameter; set requires_grad on those that may change"
    ):
        PairedGradients(nn.Linear(2, 2).requires_grad_(False), HamuQ())


def test_a_hamu_error_is_a_value_error():
    assert issubclass(HamuError, ValueError)


def test_every_method_is_built_by_its_name():
    assert list(method_classes()) == [
        "hamu-q",
        "hamu-u",
        "ft",
        "ga",
        "gdiff",
        "kl",
        "scrub",
        "gru",
        "pcgrad",
        "cagrad",
        "npo",
        "simnpo",
    ]
    for name, cls in method_classes().items():
        assert type(build_method(name, constraint=0.25, nothing_of_the_kind=1)) is cls
    assert build_method("hamu-u", constraint=0.25).constraint == 0.25


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(
        HamuError, match="method 'magic' is unknown; choose one of hamu-q, hamu-u, ft, ga"
    ):
        build_method("magic")


class Third(Method):
    name, summary, source = "third", "a method of somebody else", "them"

    def weigh(self, gram):
        raise NotImplementedError


def install(monkeypatch, cls):
    point = SimpleNamespace(load=lambda: cls, name="third", value="them:Third", dist=None)
    monkeypatch.setattr(
        plugins, "points_of", lambda group: [point] if group == "hamu.methods" else []
    )


def test_an_installed_package_adds_a_method(monkeypatch):
    install(monkeypatch, Third)
    assert isinstance(build_method("third"), Third)


def test_an_installed_method_may_not_take_a_known_name(monkeypatch):
    install(monkeypatch, type("Usurper", (Third,), {"name": "hamu-q"}))
    with pytest.raises(
        HamuError, match=re.escape("'hamu-q' of them:Third has a name that is taken; rename it")
    ):
        method_classes()


@pytest.mark.parametrize(
    ("blocks", "names"),
    [
        ("tensor", ["0.weight", "0.bias", "1.weight", "1.bias"]),
        ("module", ["0", "1"]),
        ("model", ["model"]),
        (lambda name: name.endswith("bias"), ["False", "True"]),
    ],
)
def test_blocks_group_the_parameters(blocks, names):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    pair = PairedGradients(
        model, HamuQ(0.5, constraint_mode="relative", stopping="off"), blocks=blocks
    )
    assert pair.block_names == names
    x = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))
    with pair.retain():
        model(x).square().sum().backward()
    with pair.forget():
        model(x).sin().sum().backward()
    step = pair.combine()
    assert step.weights.retain.shape == (len(names),)


def test_settings_survive_a_checkpoint_and_others_are_refused_by_name():
    model = Holder([torch.zeros(3)])
    state = PairedGradients(model, HamuQ(0.5)).state_dict()
    PairedGradients(model, HamuQ(0.5)).load_state_dict(state)
    changed = {
        r"constraint 0.5 \(now 0.7\)": PairedGradients(model, HamuQ(0.7)),
        r"method 'hamu-q' \(now 'hamu-u'\)": PairedGradients(model, HamuU(0.5)),
        r"max_grad_norm 1.0 \(now None\)": PairedGradients(model, HamuQ(0.5), max_grad_norm=None),
        r"blocks '1 \(\w+\)' \(now '2 \(\w+\)'\)": PairedGradients(
            Holder([torch.zeros(3)] * 2), HamuQ(0.5)
        ),
        r"stopping .*'patience': 1.* \(now .*'patience': 2": PairedGradients(
            model, HamuQ(0.5, stopping=StoppingRule(patience=2))
        ),
    }
    for message, pair in changed.items():
        with pytest.raises(HamuError, match=message):
            pair.load_state_dict(state)


HEAVY = {"transformers", "datasets", "accelerate", "matplotlib", "sklearn", "pandas", "PIL", "rich"}


@pytest.mark.parametrize(("code", "unwanted"), [
    ("import hamu", {"torch", *HEAVY}),
    ("from hamu.core.methods import method_rows; assert len(method_rows()) == 12", {"torch", *HEAVY}),
    ("from hamu import HamuQ, PairedGradients, StepGuard", HEAVY),
])  # fmt: skip
def test_imports_load_no_more_than_they_need(code, unwanted):
    code = f"{code}\nimport sys\nassert not {unwanted} & sys.modules.keys(), sys.modules.keys() & {unwanted}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_table_of_methods_agrees_with_their_classes():
    for row, cls in zip(method_rows(), method_classes().values(), strict=True):
        assert row[:-1] == tuple(getattr(cls, field) for field in row._fields[:-1])


def test_an_unknown_name_of_the_package_is_an_attribute_error():
    import hamu

    with pytest.raises(AttributeError, match="no attribute 'HamuX'"):
        _ = hamu.HamuX
