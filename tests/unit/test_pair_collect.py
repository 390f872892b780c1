"""Collecting the two gradients: accumulation, unused parameters, and every misuse."""

import copy
import pickle
from functools import partial

import pytest
import torch
from helpers import Holder, combine, loss, measure, network, step_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from hamu import HamuError, HamuQ, HamuU, PairedGradients, build_method

RELATIVE = {"constraint_mode": "relative", "stopping": "off"}
NOT_KNOWN = r"{}\.weight was frozen or not in the model when PairedGradients was made"


@pytest.fixture
def model():
    return network()


def pair_of(model):
    return PairedGradients(model, HamuQ(0.3, **RELATIVE))


@pytest.fixture
def pair(model):
    return pair_of(model)


def passed(pair, model, *passes):
    for side, seed in passes:
        with getattr(pair, side)():
            loss(model, seed).backward()
    return pair.combine(), [p.grad.clone() for p in pair.parameters]


def assert_clean(pair, model):
    """Nothing is left over: the pair gives what a fresh pair gives."""
    assert all(p.grad is None for p in pair.parameters)
    both = (("retain", 8), ("forget", 9))
    found, expected = (passed(one, model, *both)[1] for one in (pair, pair_of(model)))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    pair.discard()


def test_several_passes_of_a_side_equal_one_pass_on_the_sum(model, pair):
    with pair.retain():
        (loss(model, 1) + loss(model, 2) + loss(model, 3)).backward()
    assert all(p.grad is None for p in pair.parameters), "no optimizer can step on one side alone"
    with pair.forget():
        (loss(model, 4) + loss(model, 5)).backward()
    pair.combine()
    expected = [p.grad.clone() for p in pair.parameters]
    turns = [("retain", 1), ("retain", 2), ("forget", 4), ("retain", 3), ("forget", 5)]
    _, found = passed(pair, model, *turns)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("method", [HamuQ(), HamuU(), build_method("gdiff")])
def test_a_missing_side_is_named(model, method):
    pair = PairedGradients(model, method)
    with pytest.raises(HamuError, match=f"{method.name} needs a retain and a forget gradient"):
        pair.combine()
    for side, other in (("retain", "forget"), ("forget", "retain")):
        message = rf"needs a {other} gradient for this step; run backward inside pair.{other}\(\)"
        with pytest.raises(HamuError, match=message):
            passed(pair, model, (side, 1))
        pair.discard()
    loss(model, 1).backward()  # outside of both contexts
    with pytest.raises(HamuError, match="needs a retain and a forget gradient"):
        pair.combine()


@pytest.mark.parametrize("sides", [("retain",), ("retain", "forget")])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_weights_changed_after_a_pass_make_its_gradient_stale(model, pair, make, sides):
    optimizer = make(model.parameters(), lr=0.1)
    for seed, side in enumerate(sides):
        with getattr(pair, side)():
            loss(model, seed).backward()
            if side == sides[-1]:
                optimizer.step()
    message = f"weights changed after the {' and '.join(sides)} gradient was collected, .* stale"
    with pytest.raises(HamuError, match=message):
        pair.combine() if len(sides) == 2 else passed(pair, model, ("forget", 1))
    assert_clean(pair, model)


@pytest.mark.parametrize("side", ["retain", "forget"])
def test_an_exception_inside_a_context_leaves_a_clean_state(model, pair, side):
    with pair.retain():
        loss(model, 1).backward()
    with pytest.raises(ZeroDivisionError), getattr(pair, side)():
        (loss(model, 2) / (1 // 0)).backward()
    assert_clean(pair, model)


def test_contexts_need_a_backward_pass_and_do_not_nest(model, pair):
    message = r"no gradient reached any trainable parameter inside forget\(\); call backward"
    with pytest.raises(HamuError, match=message), pair.forget():
        pass
    assert_clean(pair, model)
    message = r"forget\(\) was entered inside retain\(\); close that one"
    with pytest.raises(HamuError, match=message), pair.retain(), pair.forget():
        pytest.fail("the inner context must not open")
    assert_clean(pair, model)
    with pytest.raises(HamuError, match=r"inside forget\(\)"), pair.forget():
        pair.combine()


def test_sparse_gradients_are_refused():
    embedding = nn.Embedding(5, 3, sparse=True)
    pair = PairedGradients(embedding, HamuQ())
    for side in ("retain", "forget"):
        with getattr(pair, side)():
            embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(HamuError, match="build the embedding with sparse=False"):
        pair.combine()


def test_a_side_that_overwrote_the_other_is_refused(model, pair):
    """As DistributedDataParallel does with gradient_as_bucket_view: same buckets in each pass."""
    buckets = [torch.zeros_like(p) for p in model.parameters()]
    for context in (pair.retain, pair.forget):
        with context():
            for parameter, bucket in zip(model.parameters(), buckets, strict=True):
                parameter.grad = bucket
    with pytest.raises(HamuError, match="leave gradient_as_bucket_view at False"):
        pair.combine()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", ["hamu-q", "ga"])
def test_gradients_of_a_side_that_share_memory_are_each_combined_once(name):
    """As torch.compile makes them for a sum of parameters of different shapes."""
    found, like = [], [torch.zeros(2, 3), torch.zeros(6)]
    for is_shared in (False, True):
        pair = PairedGradients(Holder(like), build_method(name, constraint=0.3, **RELATIVE))
        for side in pair.method.uses_retain * ["retain"] + ["forget"]:
            grad = torch.linspace(-1, 1, 6) if side == "retain" else torch.linspace(0, 3, 6).sin()
            with getattr(pair, side)():
                for parameter in pair.parameters:
                    own = grad if is_shared else grad.clone()
                    parameter.grad = own.view(parameter.shape)
        pair.combine()
        found.append([p.grad for p in pair.parameters])
    assert all(torch.equal(*both) for both in zip(*found, strict=True))


def test_a_frozen_parameter_takes_no_part_and_is_refused_once_it_is_unfrozen(model):
    frozen, both = model[0].weight, (("retain", 1), ("forget", 2))
    frozen.requires_grad_(False)
    frozen.grad = torch.ones_like(frozen)  # of training before; it would move
    pair = pair_of(model)
    assert frozen.grad is None
    assert pair.block_names == ["0.bias", "2.weight", "2.bias"]
    frozen.grad = torch.ones_like(frozen)  # of before, while it is frozen
    assert passed(pair, model, *both)[0].decision == "step"
    assert all(p.grad.norm() > 0 for p in pair.parameters)
    frozen.grad = None
    frozen.requires_grad_(True)
    with pytest.raises(HamuError, match=NOT_KNOWN.format(0)):
        passed(pair, model, *both)
    frozen.grad = None
    assert pair.combine().decision == "step"


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize(("place", "sizes"), [(0, (6, 16)), (3, (4, 4))])
def test_a_layer_replaced_or_added_later_is_refused(model, pair, steps, place, sizes):
    """Its gradient would be the sum of both sides, and the optimizer would step on it."""
    both = (("retain", 1), ("forget", 2))
    for _ in range(steps):
        passed(pair, model, *both)
    setattr(model, str(place), nn.Linear(*sizes, dtype=torch.float64))
    for act in (lambda: passed(pair, model, *both), pair.combine):
        with pytest.raises(HamuError, match=NOT_KNOWN.format(place)):
            act()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_of_a_pair_measures_its_own_gradients(model, copied):
    """Pickle parts a view from the memory that it looks into."""
    method, both = HamuQ(0.3, "relative"), (("retain", 3), ("forget", 4))
    pair = PairedGradients(model, method, half_life=2)
    for seed in range(8):
        passed(pair, model, ("retain", 10 + seed), ("forget", 20 + seed))
    again = copied((pair, model))
    found = [passed(one, of, *both)[0] for one, of in ((pair, model), again)]
    assert torch.equal(found[0].gram.dot, found[1].gram.dot)
    assert repr(found[0].population) == repr(found[1].population)  # NaN equals no NaN


@pytest.fixture
def one_process(tmp_path):
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_wrapped_models_whose_gradients_cannot_be_paired_are_refused_at_once():
    """Of parameters that one side alone uses no overwritten gradient could be noticed."""
    wrapped = partial(FullyShardedDataParallel, device_id=torch.device("cpu"))
    fsdp1 = [wrapped(nn.Linear(3, 2), use_orig_params=own) for own in (True, False)]
    mesh = init_device_mesh("cpu", (1,))
    values = [distribute_tensor(torch.ones(4), mesh, [kind]) for kind in (Shard(0), Replicate())]
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(3, 2), gradient_as_bucket_view=True)
    in_buckets = [ddp, nn.ModuleDict({"inner": ddp}), torch.compile(ddp)]
    for models, message in (
        ([*fsdp1, *(one.module for one in fsdp1)], r"FullyShardedDataParallel; .* fully_shard"),
        ([Holder(values)], "with fully_shard on one mesh"),
        (in_buckets, "leave gradient_as_bucket_view at False"),
    ):
        for model in models:
            with pytest.raises(HamuError, match=message):
                PairedGradients(model, HamuQ())
    PairedGradients(ddp, build_method("ga"))


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("wrap", [nn.DataParallel, nn.parallel.DistributedDataParallel])
def test_blocks_of_a_wrapped_model_are_named_as_those_of_the_model(wrap):
    model = nn.Linear(3, 2)
    parallel = wrap(model)
    pairs = [PairedGradients(m, HamuQ()) for m in (parallel, torch.compile(parallel), model)]
    assert [pair.names for pair in pairs] == [["weight", "bias"]] * 3


def vector(*values):
    return torch.tensor(values, dtype=torch.float64)


VECTOR, ZERO = vector(3, 4), vector(0, 0)


@pytest.mark.parametrize("method", [HamuQ, HamuU])
@pytest.mark.parametrize("blocks", ["tensor", "model"])
def test_a_parameter_that_no_side_uses_keeps_no_gradient(method, blocks):
    pair = PairedGradients(Holder([vector(0, 0), ZERO]), method(0.3, **RELATIVE), blocks=blocks)
    step = step_of(pair, [vector(1, 0), None], [vector(0, 1), None])
    assert pair.parameters[1].grad is None
    assert torch.isfinite(step.weights.retain).all()
    expected = vector(0.91**0.5, -0.3) if method is HamuQ else vector(0.3, -(0.91**0.5))
    torch.testing.assert_close(pair.parameters[0].grad, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("method", [HamuQ, HamuU])
def test_a_block_that_only_one_side_uses_follows_the_objective_alone(method):
    """With R = η‖g_o‖ = 0 the constrained side alone cannot move a block; with a fixed R it does."""
    retain, forget = [vector(3, 4), None, vector(1, 0)], [None, vector(5, 12), vector(0, 1)]
    _, grads = combine(method(0.3, **RELATIVE), retain, forget, max_grad_norm=None)
    expected = [retain[0], 0 * forget[1]] if method is HamuQ else [0 * retain[0], -forget[1]]
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=False))
    assert grads[2].norm() == pytest.approx(1.0)
    fixed = method(0.3, radius=2.0, **RELATIVE)
    _, grads = combine(fixed, retain[:2], forget[:2], max_grad_norm=None)
    shares = (1, 0.3) if method is HamuQ else (0.3, 1)
    torch.testing.assert_close(grads[0], shares[0] * 2 * vector(3, 4) / 5)
    torch.testing.assert_close(grads[1], -shares[1] * 2 * vector(5, 12) / 13)


@pytest.mark.parametrize("on_infeasible", ["stop", "skip"])
@pytest.mark.parametrize(
    ("method", "retain", "forget"),
    [
        (HamuQ, [VECTOR], [ZERO]),
        (HamuU, [ZERO], [VECTOR]),
        (HamuQ, [ZERO], [VECTOR]),  # its radius is 0
        (HamuQ, [VECTOR, None], [None, VECTOR]),
        (HamuQ, [ZERO], [ZERO]),
    ],
)
def test_a_share_of_nothing_is_infeasible(method, retain, forget, on_infeasible):
    build = method(0.5, on_infeasible=on_infeasible, **RELATIVE)
    step, grads = combine(build, retain, forget, max_grad_norm=None)
    assert (step.decision, grads) == (on_infeasible, [None] * len(grads))
    assert "a gradient it needs is zero in each block, or" in step.reason


@pytest.mark.parametrize(("radius", "factor"), [("gradient", 0), (2.0, -0.5 * 2.0 / 5)])
def test_a_zero_gradient_on_the_objectives_side_is_defined(radius, factor):
    method = HamuQ(0.5, radius=radius, on_infeasible="clamp", **RELATIVE)
    step, grads = combine(method, [ZERO], [VECTOR], max_grad_norm=None)
    assert step.decision == "step"
    torch.testing.assert_close(grads[0], factor * VECTOR)


def test_an_empty_and_a_scalar_parameter_take_part():
    retain, forget = [torch.zeros(0), torch.tensor(1.0)], [torch.zeros(0), torch.tensor(-2.0)]
    _, grads = combine(HamuQ(0.5, **RELATIVE), retain, forget, max_grad_norm=None)
    assert (grads[0].numel(), grads[1].item()) == (0, 1.0)
    nothing = measure([torch.zeros(0)], [torch.zeros(0)])  # a process whose shards are empty
    assert nothing.dot.tolist() == [0.0]
