"""HAMU on a device whose tensors may not meet the host's: the CPU's results, few reads, few launches.

Run by tests/integration/test_device.py in a process of its own: a process that knows another device cannot be forked
any more once it has taken a gradient. With HAMU_TEST_DEVICE=cuda the device is a GPU.
"""

import copy
import math
import os
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_models import drawn_images, small_texts
from torch import nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from hamu import (
    HamuQ,
    PairedGradients,
    StepGuard,
    StoppingRule,
    UnlearnConfig,
    UnlearnTrainer,
    build_method,
)
from hamu.assess import assess_model
from hamu.assess.curvature import hessian_product
from hamu.assess.gradients import AssessedModel, PartedGram, gradient_alignment, parted_gradient
from hamu.core.methods import method_classes
from hamu.data import collate
from hamu.evaluation import AttackData, AttackSettings, attack, generate_answers, predict_tokens
from hamu.models.language import AdapterSettings, with_adapter

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from launches import combined

ON_GPU = os.environ.get("HAMU_TEST_DEVICE") == "cuda"
if ON_GPU:
    from _gpu import NAME, counting, present

    torch.backends.cudnn.allow_tf32 = False  # the host has none
else:
    from _counted import NAME, counting, present

OF_OUR_OWN = pytest.mark.skipif(ON_GPU, reason="what is counted is the device of our own")
RELATIVE = {"constraint_mode": "relative", "stopping": "off"}
LATE = StoppingRule(patience=100)
SGD, ADAM = torch.optim.SGD, torch.optim.AdamW


@pytest.fixture(autouse=True)
def device():
    with present() as one:
        yield one


def network(dtype=torch.float32):
    """A tensor of each kind: large, small, tiny, of one element."""
    torch.manual_seed(0)
    layers = nn.Linear(8, 8000), nn.Tanh(), nn.Linear(8000, 3), nn.Tanh(), nn.Linear(3, 3)
    return nn.Sequential(*layers).to(dtype)


def batch(side, part=slice(None)):
    generator = torch.Generator().manual_seed(["retain", "forget"].index(side))
    return torch.randn(12, 8, generator=generator)[part], torch.arange(12)[part] % 3


def collect(pair, model, place="cpu", part=slice(None), scale=lambda loss: loss):
    """Pass the sides that the method has."""
    for side in [s for s in ("retain", "forget") if getattr(pair.method, f"uses_{s}")]:
        x, y = batch(side, part)
        with getattr(pair, side)():
            x = x.to(place, pair.parameters[0].dtype)
            scale(F.cross_entropy(model(x), y.to(place))).backward()


images = partial(drawn_images, size=6)


def classifier():
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    return nn.Sequential(*layers).eval()


@pytest.fixture(scope="module")
def texts():
    model, *others = small_texts()
    return model.eval(), *others


def trained(
    place,
    *,
    method=None,
    optimizer=SGD,
    rate=0.1,
    corrects=None,
    parts=1,
    early=False,
    dtype=torch.float32,
    scaled=False,
    **settings,
):
    """Weights after two steps on a device, on the host; and the work of the last combine."""
    model, method = network(dtype), method or HamuQ(0.3, **RELATIVE)
    pair = PairedGradients(model, method, **settings) if early else None
    model.to(place)
    pair = pair or PairedGradients(model, method, **settings)
    optimizer = optimizer(model.parameters(), lr=rate)
    scaler = torch.amp.GradScaler(torch.device(place).type, init_scale=8.0, enabled=scaled)
    guard = None if corrects is None else StepGuard(pair, optimizer, correct_steps=corrects)
    for _ in range(2):
        for part in range(parts):
            part = slice(part, None, parts)
            collect(pair, model, place, part, lambda loss: scaler.scale(loss / parts))
        losses = torch.ones(2, device=place)
        with counting() as count:
            step = pair.combine(scaler, keep=() if guard is None else guard.keep, losses=losses)
        assert step.decision == "step"
        with nullcontext() if guard is None else guard.around(step):
            scaler.step(optimizer)
        scaler.update()
    return torch.cat([p.detach().cpu().double().flatten() for p in model.parameters()]), count


CASES = {
    **{
        name: {"method": build_method(name, constraint=0.3, **RELATIVE)}
        for name in method_classes()
    },
    "accumulated": {"parts": 3},
    "made before the model moves": {"early": True},
    "offload to the host": {"offload_grads": "cpu"},
    "offload to the host, accumulated": {"offload_grads": "cpu", "parts": 3},
    "offload to bf16": {"offload_grads": "bf16"},
    "bf16": {"dtype": torch.bfloat16},
    "float64": {"dtype": torch.float64},
    "whole model": {"blocks": "model"},
    "measured": {"corrects": False},
    "corrected": {"corrects": True, "optimizer": ADAM, "rate": 1e-3},
    "loss scaler": {"scaled": True},
}


@pytest.mark.parametrize("where", ["none", "cpu"])
@pytest.mark.parametrize("early", [False, True])
def test_running_means_for_the_criterion_are_those_of_the_cpu(early, where):
    def status(place, offload_grads):
        model, method = network(), HamuQ(0.3, constraint_mode="relative", stopping=LATE)
        settings = {"half_life": 20.0, "offload_grads": offload_grads}
        pair = PairedGradients(model, method, **settings) if early else None
        model.to(place)
        pair = pair or PairedGradients(model, method, **settings)
        for step in range(18):
            collect(pair, model, place, slice(step % 6, None))
            found = pair.combine().population
        return vars(found)

    assert status(NAME, where) == pytest.approx(status("cpu", "none"), rel=1e-3, abs=1e-5)


def test_running_means_wait_for_gradients_that_are_on_their_way_to_the_host(device, monkeypatch):
    late = []

    def offloaded(grad, place):
        late.append((torch.zeros_like(grad, device=place), grad))
        return late[-1][0]

    def stream(device):
        return SimpleNamespace(synchronize=lambda: [there.copy_(grad) for there, grad in late])

    found = []
    for place in ("none", "cpu"):
        model = network().to(device)
        pair = PairedGradients(
            model, HamuQ(0.3, **RELATIVE | {"stopping": LATE}), offload_grads=place, half_life=9
        )
        if place == "cpu":
            monkeypatch.setattr("hamu.core.combine._offloaded", offloaded)
            monkeypatch.setattr(torch.accelerator, "current_stream", stream)
        collect(pair, model, device)
        pair.combine()
        found.append(pair.state_dict()["population"]["sums"].cpu())
    assert torch.equal(*found)


def test_a_run_may_move_to_the_device_with_what_it_remembers(device):
    found = []
    for places in (("cpu", "cpu"), ("cpu", device)):
        model = network()
        pair = PairedGradients(model, build_method("gru-ema"))
        for place in places:
            collect(pair, model.to(place), place)
            pair.combine()
        found.append(torch.cat([p.grad.cpu().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


def test_the_default_device_of_torch_may_be_that_of_the_model(device):
    """Running means and guard compute on the host, as without a default."""
    found = []
    for default in (None, device):
        model, (x, y) = network().to(device), [one.to(device) for one in batch("retain")]
        torch.set_default_device(default)
        try:
            method = HamuQ(0.3, "relative", stopping=LATE)
            pair = PairedGradients(model, method, half_life=4)
            optimizer = ADAM(model.parameters(), lr=1e-3)
            guard = StepGuard(pair, optimizer)
            for _ in range(8):
                for part, side in enumerate((pair.retain, pair.forget)):
                    with side():
                        F.cross_entropy(model(x[part::2]), y[part::2]).backward()
                with guard.around(pair.combine(keep=guard.keep)):
                    optimizer.step()
        finally:
            torch.set_default_device(None)
        assert guard.taken.corrected.any()
        found.append((pair._population.status, guard.taken.gain.tolist()))
    assert found[0] == found[1]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_step_is_the_hosts_and_reads_once(device, case):
    host, _ = trained("cpu", **case)
    there, count = trained(device, **case)
    start = torch.cat([p.detach().double().flatten() for p in network().parameters()])
    # sums round otherwise
    digits = 0.05 if ON_GPU and case.get("dtype") == torch.bfloat16 else 1e-4
    assert (there - host).norm() <= digits * (host - start).norm()
    assert len(count.reads) == 1


DECISIONS = {  # method, settings of the pair, factor of both losses, decision
    "own shares": (HamuQ(0.3, **RELATIVE, distribution=[3, 1, 1, 0, 0, 0]), {}, 1.0, "step"),
    "no clipping": (HamuQ(0.3, **RELATIVE), {"max_grad_norm": None}, 1.0, "step"),
    "any block": (HamuQ(1.0, constraint_mode="relative", stopping="any"), {}, 1.0, "stop"),
    "estimates": (HamuQ(0.3, "relative", stopping=LATE), {"half_life": 1.0}, 1.0, "step"),
    "infeasible": (HamuQ(1e9), {}, 1.0, "stop"),
    "clamped": (HamuQ(1e9, on_infeasible="clamp", stopping="off"), {}, 1.0, "step"),
    "not finite": (HamuQ(), {}, math.nan, "skip"),
}


@pytest.mark.parametrize(
    ("method", "settings", "factor", "decision"), DECISIONS.values(), ids=DECISIONS
)
def test_a_step_reads_once_whatever_it_decides_and_collecting_never(
    device, method, settings, factor, decision
):
    model = network().to(device)
    pair = PairedGradients(model, method, **settings)
    # estimates come from the 16th step on; in the first step what stays is sent
    for _ in range(17 if "half_life" in settings else 2):
        for side in ("retain", "forget"):
            x, y = batch(side)
            loss = factor * F.cross_entropy(model(x.to(device)), y.to(device))
            with counting() as collecting, getattr(pair, side)():
                loss.backward()
            assert collecting.reads == []
        losses = torch.ones(2, device=device)
        with counting() as count:
            step = pair.combine(losses=losses)
    assert (step.decision, len(count.reads)) == (decision, 1)
    assert (step.population is not None) == ("half_life" in settings)


def test_an_assessment_is_the_hosts(device):
    found = []
    for place in ("cpu", device):
        one = assess_model(
            classifier().to(place),
            images(200),
            images(40, 1),
            collate=collate,
            batch_size=50,
            curvature_samples=8,
        )
        found.append(one)
    host, there = found
    assert there.gradient_norms == pytest.approx(host.gradient_norms, rel=1e-5)
    assert there.hamu_q.kappa == pytest.approx(host.hamu_q.kappa, rel=1e-4)
    assert there.intervals.kappa[0] == pytest.approx(host.intervals.kappa[0], rel=1e-3)
    assert there.second_order is not None


class Spread(nn.Module):
    """A first layer on the inputs' device, the others on the host; logits where the inputs are."""

    main_input_name = "pixel_values"

    def __init__(self, first, others, place):
        super().__init__()
        self.first, self.others = first.to(place), others

    def forward(self, pixel_values=None, input_ids=None, attention_mask=None):
        given = input_ids if pixel_values is None else pixel_values
        return self.others(self.first(given).to("cpu")).to(given.device)

    def get_output_embeddings(self):
        return self.others


@pytest.mark.parametrize("offload", ["none", "bf16"])
def test_a_model_over_a_device_and_the_host_steps_as_on_one(device, offload):
    found = []
    for place in ("cpu", device):
        layers = network()
        model = Spread(layers[:2], layers[2:], place)
        pair = PairedGradients(model, HamuQ(0.3, **RELATIVE), offload_grads=offload)
        collect(pair, model, place)
        pair.combine()
        found.append([p.grad for p in model.parameters()])
        assert all(p.grad.device == p.device for p in model.parameters())
        assert len({p.device for p in model.parameters()}) == 1 + (place == device)
    for host, there in zip(*found, strict=True):
        rtol, atol = (1e-2, 1e-5) if ON_GPU and offload == "bf16" else (1e-4, 1e-7)
        torch.testing.assert_close(there.cpu(), host, rtol=rtol, atol=atol)


def test_a_hessian_over_a_device_and_the_host_is_that_on_one(device):
    products = []
    for place in ("cpu", device):
        layers, batch = classifier(), images(8).__getitems__(range(8))
        model, x = Spread(layers[:3], layers[3:], place), batch["pixel_values"].to(place)
        parameters = list(model.parameters())

        def loss(y, model=model, x=x):
            return F.cross_entropy(model(x), y)

        product = hessian_product(loss, [batch["labels"].to(place)], parameters)
        vector = torch.linspace(-1, 1, sum(p.numel() for p in parameters)).to(place)
        products.append(product(vector).cpu())
    torch.testing.assert_close(products[1], products[0], rtol=1e-4, atol=1e-6)


def test_a_model_over_a_device_and_the_host_predicts_texts_as_on_one(device, texts):
    _, tokenizer, encoded = texts
    found = []
    for place in ("cpu", device):
        torch.manual_seed(0)
        model = Spread(nn.Embedding(len(tokenizer), 8), nn.Linear(8, len(tokenizer)), place)
        found.append(predict_tokens(model, encoded, 8).losses)
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


def test_an_assessment_waits_as_often_for_many_parameters_as_for_few(device):
    """Both gradients, their products and the records in conflict."""
    counts = []
    for layers in (1, 5):
        model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(layers)]).to(device)
        records = [{"pixel_values": torch.randn(3), "labels": i % 3} for i in range(12)]
        assessed = AssessedModel(model, records, records[:6], default_collate, batch_size=2)
        value = torch.zeros(1, device=device)
        with counting() as count:
            retain, forget = (parted_gradient(assessed, side, 3) for side in ("retain", "forget"))
            PartedGram.of(assessed, retain, forget)
            weights = assessed.parameters
            gradient_alignment(lambda: value, weights, retain[0][0], weights)  # noqa: B023
        counts.append(len(count.reads))
    assert counts[0] == counts[1]


def test_attacks_are_the_hosts(device, texts):
    model, tokenizer, encoded = texts
    retain, forget, others = (
        encoded.select(range(*ends)) for ends in ((0, 10), (10, 18), (18, 24))
    )
    of_texts = AttackData(retain, forget, 8, others, tokenizer)
    of_images = AttackData(images(40), images(20, 1))
    named = ("relearn-retain,relearn-few,relearn-unrelated,prefill",)
    for original, data, names in ((classifier(), of_images, ()), (model, of_texts, named)):
        settings = AttackSettings(*names, attack_steps=4, attack_seeds=1, attack_batch_size=4)
        places = ("cpu", device)
        host, there = (attack(copy.deepcopy(original).to(one), data, settings) for one in places)
        assert there.outcomes.keys() == host.outcomes.keys()
        for name in ("relearn-retain", "relearn-few"):
            expected = host.outcomes[name]["unlearned"].mean("loss", 4)
            found = there.outcomes[name]["unlearned"].mean("loss", 4)
            assert found == pytest.approx(expected, rel=1e-3)


def test_drawn_answers_leave_the_random_state_of_the_device(device, texts):
    model, tokenizer, encoded = texts
    model = copy.deepcopy(model).to(device)
    state = torch.cuda.get_rng_state if ON_GPU else torch.get_rng_state
    before = state()
    generate_answers(model, tokenizer, encoded.select(range(2)), 2, 3, sampling_seed=7)
    assert torch.equal(before, state())


def run(folder, model, data, monkeypatch, place, **settings):
    """A trainer's run on the host or a device; returns the weights on the host and the trainer."""
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", str(place))
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    common = {"max_steps": 3, "per_device_train_batch_size": 8, "disable_tqdm": True} | RELATIVE
    args = UnlearnConfig(str(Path(folder) / place.replace(":", "")), use_cpu=place == "cpu",
                         dataloader_pin_memory=ON_GPU, **common | settings)  # fmt: skip
    args.accelerator_config.non_blocking = place != "cpu"  # as from pinned memory
    trainer = UnlearnTrainer(model, args, **data)
    trainer.train()
    assert {p.device.type for p in model.parameters()} == {torch.device(place).type}
    return torch.cat([p.detach().cpu().flatten() for p in model.parameters()]), trainer


RUNS = {
    "plain": {"optim": "sgd", "learning_rate": 0.05},
    "accumulated": {"gradient_accumulation_steps": 2, "optim": "sgd", "learning_rate": 0.05},
    "corrected": {"correct_steps": True, "learning_rate": 1e-3, "optim": "adamw_torch"},
    "by goal": {"auto": True, "optim": "adamw_torch", "target_share": 1.0},
    "lasting": {"auto": True, "lasting": True, "optim": "adamw_torch"},
}


@pytest.mark.parametrize("settings", RUNS.values(), ids=RUNS)
def test_a_trainers_run_is_the_hosts(tmp_path, monkeypatch, settings):
    data = {
        "retain_dataset": images(40),
        "forget_dataset": images(16, 1),
        "test_dataset": images(24, 2),
    }
    start = torch.cat([p.detach().flatten() for p in classifier().parameters()])
    found = [
        run(tmp_path, classifier(), data, monkeypatch, place, **settings)
        for place in ("cpu", f"{NAME}:0")
    ]
    host, there = (weights for weights, _ in found)
    moved = (host - start).norm()
    assert moved > 0
    assert (there - host).norm() <= 0.05 * moved
    assert found[0][1].state.global_step == found[1][1].state.global_step > 0


def test_a_run_on_texts_with_an_adapter_is_the_hosts(tmp_path, monkeypatch, texts):
    model, _, encoded = texts
    data = {
        "retain_dataset": encoded.select(range(16)),
        "forget_dataset": encoded.select(range(16, 24)),
    }
    found = []
    for place in ("cpu", f"{NAME}:0"):
        torch.manual_seed(1)
        adapted = with_adapter(copy.deepcopy(model), AdapterSettings(rank=2))
        settings = {"per_device_train_batch_size": 4, "learning_rate": 0.05, "optim": "sgd"}
        found.append(run(tmp_path, adapted, data, monkeypatch, place, **settings)[0])
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-5)


def test_batches_from_pinned_memory_are_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", f"{NAME}:0")
    for pinned in (True, False):
        args = UnlearnConfig(str(tmp_path), dataloader_pin_memory=pinned)
        assert args.accelerator_config.non_blocking == pinned


@OF_OUR_OWN
def test_the_device_refuses_tensors_of_the_host_and_counts(device):
    here = torch.ones(3, device=device)
    with pytest.raises(RuntimeError, match="of the host"):
        here + torch.ones(3)
    with counting() as count:
        assert (here * 2).sum().item() == 6.0
    assert (count.total, len(count.reads)) == (3, 1)


@OF_OUR_OWN
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [10**4, 5 * 10**6])
def test_launches_grow_with_tensors_never_with_elements(device, dtype, size):
    one, ten_times = (combined([count], dtype, device) for count in (size, 4 * size))
    assert ten_times.launches == one.launches
    few, many = (combined([1 << 12] * count, dtype, device) for count in (10, 200))
    assert many.total == few.total, "small tensors are packed"


@pytest.mark.parametrize(("settings", "waits"), [
    ({}, 1),
    ({"gradient_accumulation_steps": 2}, 1),
    ({"method": "npo"}, 1),
    ({"stopping": "aggregate"}, 1),
    ({"forget_objective": "bounded", "target_forget_loss": 5.0}, 1),
    ({"max_retain_loss": 100.0}, 2),  # judged before the step
    ({"logging_steps": 1}, 1),  # as by default
    ({"optim": "adamw_torch", "check_steps": 1}, 3),  # of which the guard one, the check one
])  # fmt: skip
def test_a_step_of_the_trainer_keeps_the_host_waiting_as_often_as_its_combine(
    tmp_path, monkeypatch, settings, waits
):
    """A read that is not the combine's keeps a GPU waiting at every step."""
    for share in ("_SHARE", "_LEAST"):  # no second check within these steps, however slow they are
        monkeypatch.setattr(f"hamu.unlearning.trainer.promise.{share}", 1e-9)
    data = {"retain_dataset": images(120), "forget_dataset": images(60, 1)}
    quiet = {"optim": "sgd", "logging_steps": 1000, "eval_strategy": "no", "eval_on_start": False}
    reads = []
    for steps in (4, 8):
        with counting() as count:
            run(tmp_path / str(steps), classifier(), data, monkeypatch, f"{NAME}:0",
                **quiet | settings | {"max_steps": steps})  # fmt: skip
        reads.append(len(count.reads))
    assert reads[1] - reads[0] == 4 * waits
