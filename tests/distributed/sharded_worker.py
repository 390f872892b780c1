"""Steps on a model that fully_shard has sharded, against the same on the whole model; prints the largest difference."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hamu import HamuQ, HamuU, PairedGradients, build_method
from hamu.core.distributed import leave


def steps(method, sharded, accumulation):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3)).double()
    rank, world = (dist.get_rank(), dist.get_world_size()) if sharded else (0, 1)
    if sharded:
        mesh = init_device_mesh("cpu", (world,))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    pair = PairedGradients(model, method)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(24, 7, generator=generator, dtype=torch.float64), torch.arange(24) % 3
    for _ in range(8):
        for side, part in (("retain", slice(0, 16)), ("forget", slice(16, 24))):
            for chunk_x, chunk_y in zip(
                x[part].chunk(accumulation), y[part].chunk(accumulation), strict=True
            ):
                mine = slice(rank, None, world)
                loss = (
                    nn.functional.cross_entropy(model(chunk_x[mine]), chunk_y[mine]) / accumulation
                )
                with getattr(pair, side)():
                    loss.backward()
        pair.combine()
        optimizer.step()
    return [p.full_tensor() if sharded else p.detach() for p in model.parameters()]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    worst = 0.0
    for method in (
        HamuQ(0.5, "relative", stopping="off"),
        HamuU(0.5, "relative", stopping="off"),
        build_method("gru"),
    ):
        for accumulation in (1, 2):
            pairs = zip(
                *(steps(method, sharded, accumulation) for sharded in (True, False)), strict=True
            )
            worst = max(worst, *((a - b).abs().max().item() for a, b in pairs))
    if dist.get_rank() == 0:
        print(worst)
    leave()
