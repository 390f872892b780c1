"""Shared by the tests of the core: gradients at an angle, models that hold given gradients, the paper's updates."""

import math

import torch
from torch import nn

from hamu import PairedGradients
from hamu.core.gram import PairGram
from hamu.core.gram_meter import GramMeter

EPS64 = torch.finfo(torch.float64).eps


def pair_at_angle(size, angle, generator, retain_norm=1.0, forget_norm=1.0):
    """Two random float64 vectors of the given norms and angle; one dimension has no angle but 0 and π."""
    u = torch.randn(size, dtype=torch.float64, generator=generator)
    u /= u.norm()
    if size == 1:
        return u * retain_norm, u * math.copysign(forget_norm, math.cos(angle))
    v = torch.randn(size, dtype=torch.float64, generator=generator)
    v -= u.dot(v) * u
    v -= u.dot(v) * u
    v /= v.norm()
    return u * retain_norm, (math.cos(angle) * u + math.sin(angle) * v) * forget_norm


def gram_at(retain_norm, forget_norm, cos):
    """The float64 Gram of blocks with the given norms and cosines."""
    r, f, c = (
        torch.as_tensor(x, dtype=torch.float64).reshape(-1) for x in (retain_norm, forget_norm, cos)
    )
    return PairGram(r * r, f * f, r * f * c, EPS64)


def random_gram(seed, blocks=4):
    """The Gram of random vectors, one pair per block, over some orders of magnitude."""
    g = torch.Generator().manual_seed(seed)
    norms = 10 ** (4 * torch.rand(2, blocks, dtype=torch.float64, generator=g) - 2)
    return gram_at(norms[0], norms[1], 2 * torch.rand(blocks, dtype=torch.float64, generator=g) - 1)


def measure(retain, forget):
    """The Gram with one block per tensor."""
    return GramMeter(
        [r if r is not None else f for r, f in zip(retain, forget, strict=True)], range(len(retain))
    ).measure(retain, forget)


class Holder(nn.Module):
    """A model of zeros, one parameter for each given tensor."""

    def __init__(self, like):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros_like(t)) for t in like])


def collect(pair, side, grads):
    """Give one side its gradients, as a backward pass would."""
    with getattr(pair, side)():
        for parameter, grad in zip(pair.parameters, grads, strict=True):
            parameter.grad = None if grad is None else grad.clone()


def step_of(pair, retain, forget, **settings):
    """Give both sides their gradients and combine them."""
    collect(pair, "retain", retain)
    collect(pair, "forget", forget)
    return pair.combine(**settings)


def passes(pair, model, retain, forget, scale=lambda x: x):
    """A backward pass for each side, on the batches of these seeds."""
    for side, seed in (("retain", retain), ("forget", forget)):
        with getattr(pair, side)():
            scale(loss(model, seed)).backward()


def network(dtype=torch.float64):
    """A small classifier, always the same."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)


def loss(model, seed):
    """Of the network, on the batch of a seed."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 6, dtype=torch.float64, generator=g).to(model[0].weight.dtype)
    return nn.functional.cross_entropy(model(x), torch.randint(4, (8,), generator=g))


def combine(method, retain, forget, losses=None, **settings):
    """One combine of given gradients: the step, and each parameter's `.grad`."""
    pair = PairedGradients(
        Holder([r if r is not None else f for r, f in zip(retain, forget, strict=True)]),
        method,
        **settings,
    )
    if method.uses_retain:
        collect(pair, "retain", retain)
    if method.uses_forget:
        collect(pair, "forget", forget)
    step = pair.combine(losses=losses)
    return step, [p.grad for p in pair.parameters]


def flat(tensors):
    """All tensors as one float64 vector on the host."""
    return torch.cat([t.detach().cpu().double().reshape(-1) for t in tensors])


def hamu_q_update(g_r, g_f, Q, R):
    """Δw* of Proposition 4.3 (paper, Eq. 6), and whether it is the direct one."""
    kappa, kappa_1 = g_r.dot(g_f), -Q * g_r.norm() / R
    if kappa <= kappa_1:
        return -R / g_r.norm() * g_r, True
    perpendicular = g_r - kappa / g_f.norm() ** 2 * g_f
    root = (R**2 - Q**2 / g_f.norm() ** 2).sqrt()
    return Q / g_f.norm() ** 2 * g_f - root * perpendicular / perpendicular.norm(), False


def hamu_u_update(g_r, g_f, U, R):
    """Δw* of the retain-constrained problem (paper, App. B.6), and whether it is the direct one."""
    kappa, kappa_3 = g_r.dot(g_f), -U * g_f.norm() / R
    if kappa <= kappa_3:
        return R / g_f.norm() * g_f, True
    perpendicular = g_f - kappa / g_r.norm() ** 2 * g_r
    root = (R**2 - U**2 / g_r.norm() ** 2).sqrt()
    return -U / g_r.norm() ** 2 * g_r + root * perpendicular / perpendicular.norm(), False


def state_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def is_as(model, state):
    """True if parameters and buffers are those of this state, to the last bit."""
    now = model.state_dict()
    return now.keys() == state.keys() and all(map(torch.equal, now.values(), state.values()))


def weights(model):
    """All parameters of a model as one float64 vector."""
    return flat(model.parameters())
