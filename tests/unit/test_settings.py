"""Settings out of range are refused with a message that says what to do; the registry builds and names methods."""

import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import Holder, random_gram
from torch import nn
from torch._subclasses import FakeTensorMode

import hamu
from hamu import HamuError, HamuQ, HamuU, PairedGradients, StoppingRule, build_method
from hamu.core.methods import method_classes, method_rows


@pytest.mark.parametrize("method", [HamuQ, HamuU])
@pytest.mark.parametrize(("settings", "message"), [
    *(({"constraint": value}, f"constraint {value!r} must be a positive number")
      for value in (0.0, -1.0, math.nan, math.inf, "0.5", None, True)),
    ({"constraint": torch.tensor([0.1, 0.2])}, "must be a positive number"),
    ({"constraint_mode": "share"}, "constraint_mode 'share' is unknown; choose one of absolute, relative"),
    ({"constraint": 1.5, "constraint_mode": "relative"}, r"share of what is possible, in \(0, 1\]; got 1.5"),
    *(({"radius": value}, rf"radius {value!r} must be positive \(R/η\)")
      for value in ("large", 0.0, math.inf, None)),
    ({"on_infeasible": "ignore"}, "on_infeasible 'ignore' is unknown; choose one of stop, clamp, skip"),
    ({"distribution": "fair"}, "distribution 'fair' is unknown; choose one of norm_product, uniform, one share per"),
    *(({"distribution": shares}, "shares of the constraint must be finite, non-negative and not all zero")
      for shares in ([1.0, -1.0], [0.0, 0.0], [1.0, math.nan], [1.0, math.inf], ["a"], None)),
    ({"stopping": "sometimes"}, "stopping criterion 'sometimes' is unknown"),
    *(({"stopping": value}, f"stopping criterion {value} is unknown; choose one of aggregate, any, global, off")
      for value in (None, False)),
])  # fmt: skip
def test_a_method_refuses(method, settings, message):
    with pytest.raises(HamuError, match=message):
        method(**settings)


def test_shares_may_be_a_tensor():
    assert HamuQ(distribution=torch.tensor([1.0, 3.0])).distribution == (1.0, 3.0)


LINEAR, COMPLEX = nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.complex64)
META = nn.Linear(2, 2, device="meta")
with FakeTensorMode():
    ON_MPS = Holder([torch.empty(2, 2, device="mps")])
MADE = r"is not a Method; pass an instance, such as HamuQ\(\)"
BOTH = "needs both whole gradients in each process"


def pair(model=LINEAR, method=HamuQ(), **settings):  # noqa: B008
    return PairedGradients(model, method, **settings)


def parted(**settings):
    pair(**settings).use(SimpleNamespace(is_whole=False))


@pytest.mark.parametrize(("refused", "message"), [
    (lambda: pair(max_grad_norm=0.0), "max_grad_norm 0.0 must be positive, or None for no clipping"),
    (lambda: pair(max_grad_norm=math.nan), "max_grad_norm nan must be positive"),
    (lambda: pair(blocks="layer"), "blocks 'layer' is unknown; choose one of tensor, module, model, a function"),
    *((lambda method=method: pair(method=method), MADE) for method in ("hamu-q", HamuQ, None)),
    (lambda: pair(LINEAR.parameters()), "a generator is no module; pass the model itself"),
    (lambda: pair(COMPLEX), "^weight is complex or on the meta device"),
    (lambda: pair(META), "^weight is complex or on the meta device"),
    (lambda: pair(ON_MPS), "the model is on mps, which has no float64; move it to the CPU"),
    (lambda: pair(nn.Linear(2, 2).requires_grad_(False)),
     "no trainable parameter; set requires_grad on those that may change"),
    (lambda: pair(offload_grads="disk"), "offload_grads 'disk' is unknown; choose one of none, bf16, cpu"),
    (lambda: pair().combine(keep="retain"), "keep 'retain' must be a collection of sides"),
    (lambda: pair(offload_grads="bf16").combine(keep=("retain",)), "leave out the guard, or offload_gr"),
    (lambda: parted(offload_grads="bf16"), f"offload_grads {BOTH}"),
    (lambda: parted(half_life=10), f"half_life {BOTH}"),
    *((lambda of=of: pair(half_life=of), "half_life .* from 1 on") for of in (0.9, -1, math.nan, math.inf)),
    *((lambda of=of: pair(half_life=20, steps_per_pass=of), "steps_per_pass .* two numbers from 1 on")
      for of in ((0.5, 3), (4, math.nan), 5.0, (5.0,))),
    (lambda: StoppingRule("sometimes"), "criterion 'sometimes' is unknown; choose one of aggregate"),
    (lambda: StoppingRule(margin=math.nan), "stopping margin nan is negative; use 0 or more"),
    (lambda: StoppingRule(window=0), "patience 1 and window 0 must be whole numbers from 1 on"),
    (lambda: StoppingRule(window=2560 / 128), "window 20.0 must be whole numbers"),
    (lambda: pair(blocks=["a"]), r"blocks \['a'\] is unknown; choose one of tensor"),
    (lambda: HamuQ(distribution=[1, 1, 1]).weigh(random_gram(0, blocks=4)),
     "the constraint has 3 shares, but there are 4 blocks; give one each"),
    (lambda: build_method("hamu-q", forget_wieght=0.9), "'forget_wieght' is unknown; did you mean forget_weight"),
    *((lambda name=name: build_method(name, forget_weight=1), "^forget_weight 1 must be between 0 and 1")
      for name in ("gdiff", "kl", "scrub", "npo", "simnpo")),
])  # fmt: skip
def test_what_cannot_be_combined_is_refused(refused, message):
    with pytest.raises(HamuError, match=message):
        refused()


def test_complex_parameters_that_are_frozen_are_no_obstacle():
    frozen = nn.Linear(2, 2, dtype=torch.complex64).requires_grad_(False)
    PairedGradients(nn.Sequential(frozen, nn.Linear(2, 2)), HamuQ())


@pytest.mark.parametrize(("blocks", "names"), [
    ("tensor", ["0.weight", "0.bias", "1.weight", "1.bias"]), ("module", ["0", "1"]),
    ("model", ["model"]), (lambda name: name.endswith("bias"), ["False", "True"]),
])  # fmt: skip
def test_blocks_group_the_parameters(blocks, names):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert pair(model, blocks=blocks).block_names == names


def test_settings_survive_a_checkpoint_and_others_are_refused_by_name():
    means = {"half_life": 64.0, "steps_per_pass": (9, 4)}
    one, two = (Holder([torch.zeros(3)] * count) for count in (1, 2))
    state = pair(one, HamuQ(0.5), **means).state_dict()
    pair(one, HamuQ(0.5), **means).load_state_dict(state)
    patient = HamuQ(0.5, stopping=StoppingRule(patience=2))
    for message, model, method, settings in (
        (r"constraint 0.5 \(now 0.7\)", one, HamuQ(0.7), {}),
        (r"method 'hamu-q' \(now 'hamu-u'\)", one, HamuU(0.5), {}),
        (r"max_grad_norm 1.0 \(now None\)", one, HamuQ(0.5), {"max_grad_norm": None}),
        (r"blocks '1 \(\w+\)' \(now '2 \(\w+\)'\)", two, HamuQ(0.5), {}),
        (r"stopping .*patience=1.* \(now .*patience=2", one, patient, {}),
        (r"other settings: half_life 64\.0 \(now 320\.0\)", one, HamuQ(0.5), {"half_life": 320.0}),
        (r"steps_per_pass \[9, 4\] \(now \[9, 2\]\)", one, HamuQ(0.5), {"steps_per_pass": (9, 2)}),
    ):
        with pytest.raises(HamuError, match=message):
            pair(model, method, **means | settings).load_state_dict(state)


HEAVY = {"transformers", "datasets", "accelerate", "matplotlib", "sklearn", "pandas", "PIL", "rich"}


@pytest.mark.parametrize(("code", "unwanted"), [
    ("import hamu", {"torch", *HEAVY}),
    ("from hamu.core.methods import method_rows; assert method_rows()[0].name == 'hamu-q'", {"torch", *HEAVY}),
    ("from hamu import HamuQ, PairedGradients, StepGuard", HEAVY),
    ("import hamu.unlearning.jobs", {"matplotlib", "sklearn"}),
    ("import hamu.cli; [hamu.cli.main([word]) for word in ('--help', 'methods')]", {"torch"}),
    # a room and a job
    ("import hamu.assess; import hamu; assert callable(hamu.assess); hamu.assess.Assessment", set()),
    ("import hamu; hamu.assess; import hamu.assess; assert callable(hamu.assess); hamu.assess.Assessment", set()),
])  # fmt: skip
def test_imports_load_no_more_than_they_need(code, unwanted):
    code = f"{code}\nimport sys\nassert not {unwanted} & sys.modules.keys(), sys.modules.keys() & {unwanted}"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_the_table_of_methods_agrees_with_their_classes():
    for row, cls in zip(method_rows(), method_classes().values(), strict=True):
        assert row == tuple(getattr(cls, field) for field in row._fields)


def test_an_unknown_name_of_the_package_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'HamuX'"):
        _ = hamu.HamuX
