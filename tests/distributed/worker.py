"""Runs cases in one or several processes and saves the weights that they end with: worker.py FOLDER STEPS CASE...

With HAMU_SAVE each run saves a checkpoint at its last step; with HAMU_RESUME=FOLDER each resumes from the checkpoint
that the same case saved there, whatever number of processes and layout it had.
"""

import os
import sys
from functools import partial
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.trainer_callback import PrinterCallback, TrainerCallback

import hamu.guard
import hamu.training.preparation
import hamu.training.trainer
from hamu import UnlearnConfig, UnlearnTrainer
from hamu.data import TextCollator
from hamu.distributed import SplitPairing, leave, processes, rank
from hamu.evaluation import predict
from hamu.gram import GramMeter
from hamu.models.language import AdapterSettings, with_adapter

transformers.utils.logging.set_verbosity_error()
GLOBAL_BATCH = 12


class ConvNet(nn.Module):
    """A small float64 classifier."""

    def __init__(self, norm=None):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = norm or nn.GroupNorm(2, 4)
        self.head = nn.Linear(4 * 16, 3)
        self.unused = nn.Parameter(torch.ones(3))
        self.rules_out_one_more = False

    def forward(self, x):
        logits = self.head(torch.tanh(self.norm(self.conv(x.double()))).flatten(1))
        return torch.cat([logits, logits.new_full((len(x), 1), -torch.inf)], 1) if self.rules_out_one_more else logits


def images(count, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 1, 4, 4, generator=generator)
    return [{"pixel_values": x[i], "labels": torch.tensor(i % 3)} for i in range(count)]


def texts(count, seed):
    generator = torch.Generator().manual_seed(seed)
    items = []
    for i in range(count):
        ids = torch.randint(1, 64, (4 + i % 5,), generator=generator)
        items.append({"input_ids": ids, "labels": torch.cat([torch.tensor([-100]), ids[1:]])})
    return items


class Spoiling:
    """The second batch of the last process has a value that is not finite, or a label that makes its loss infinite."""

    def __init__(self, collate, sides, of_loss):
        self._collate, self._sides, self._batches, self._of_loss = collate, sides, 0, of_loss

    def __call__(self, items):
        self._batches += 1
        batch = self._collate(items)
        if rank() == processes() - 1 and self._batches == self._sides + 1:
            if self._of_loss:
                batch["labels"][0] = 3
            else:
                batch["pixel_values"][0, 0, 0, 0] = float("nan")
        return batch


def rounded(measure):
    return lambda *given, **how: measure(*given, **how).scaled(1 + 1e-6 * rank(), 1)


class Parting(TrainerCallback):
    """Moves a weight of one process after the first step, and has the weights compared after every one."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        hamu.training.trainer._COMPARED_EVERY = 1
        with torch.no_grad():
            model.get_parameter("conv.bias")[0] += 1e-7 * rank()


def stacked(items):
    return {key: torch.stack([item[key] for item in items]) for key in items[0]}


def problem(kind):
    torch.manual_seed(0)
    if kind == "conv":
        return ConvNet().double(), images(31, 1), images(10, 2), stacked
    if kind == "alike":  # nearly collinear gradients of tensors that are measured in float32 at first
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 300), nn.Tanh(), nn.Linear(300, 3))
        retain = images(12, 1)
        noise = torch.Generator().manual_seed(2)
        moved = [x | {"pixel_values": x["pixel_values"] + 0.02 * torch.randn(1, 4, 4, generator=noise)} for x in retain]
        return model, retain, moved, stacked
    if kind == "batchnorm":
        return ConvNet(nn.BatchNorm2d(4)).double(), images(31, 1), images(10, 2), stacked
    config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                         num_attention_heads=2, max_position_embeddings=32)  # fmt: skip
    model = LlamaForCausalLM(config)
    if kind in ("lora", "rough"):
        model = with_adapter(model.bfloat16() if kind == "rough" else model, AdapterSettings(rank=2))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zero at first: then the others would not move
                torch.nn.init.normal_(parameter, std=0.1)
    return model if kind == "rough" else model.double(), texts(31, 1), texts(10, 2), TextCollator(0)


def run(case, folder, steps):
    kind, method, accumulation, optimizer, *pairing = case.split("/")
    model, retain, forget, collate = problem(kind)
    spoiled = pairing[0].split("-")[0] if pairing and pairing[0].startswith(("spoiled", "infinite")) else ""
    if spoiled:
        pairing = pairing[0].split("-")[1:]
    sharing = processes() if pairing in ([], ["shard"], ["rounded"], ["parted"]) else processes() // 2
    each = GLOBAL_BATCH // sharing // int(accumulation)
    saves, resumed = os.environ.get("HAMU_SAVE"), os.environ.get("HAMU_RESUME")
    start = "-".join((kind, method, accumulation, optimizer))
    args = UnlearnConfig(
        output_dir=str(folder / start), method=method, max_steps=steps, per_device_train_batch_size=each,
        save_strategy="steps" if saves else "no", save_steps=steps,
        gradient_accumulation_steps=int(accumulation), learning_rate=0.05 if optimizer == "sgd" else 0.005,
        optim=optimizer, constraint_mode="relative", stopping="off", eval_strategy="no", eval_on_start=False,
        disable_tqdm=True, min_forget_loss=1e-9,
        target_forget_loss=float(os.environ["HAMU_TARGET"]) if "HAMU_TARGET" in os.environ else None,
        pairing="split" if pairing == ["split"] else "sequential", shard=pairing == ["shard"],
        trust_region=kind == "rough", guarantee="exact" if optimizer == "adamw_torch" and pairing == ["rounded"] else
        "first_order", freeze_batchnorm=kind != "batchnorm",
    )  # fmt: skip
    small = pairing == ["small"]
    if small:  # buckets of a few numbers: every tensor is cut over several
        args.pairing = "split"
        hamu.training.preparation.SplitPairing = partial(SplitPairing, bucket=50)
    if pairing[:1] == ["rounded"]:  # as another processor would
        for name in ("measure", "refined"):
            setattr(GramMeter, name, rounded(getattr(GramMeter, name)))
        sums = hamu.guard._dot
        hamu.guard._dot = lambda *given: sums(*given) * (1 + 1e-6 * rank())
    if pairing == ["unequal"]:
        args.pairing = "split"
        with torch.no_grad():
            model.get_parameter("conv.bias")[0] += 1e-7 * rank()
    if spoiled:
        model.rules_out_one_more = spoiled == "infinite"
        collate = Spoiling(collate, 1 if pairing == ["split"] else 2, of_loss=spoiled == "infinite")
    trainer = UnlearnTrainer(model, args, retain_dataset=retain, forget_dataset=forget, data_collator=collate)
    trainer.remove_callback(PrinterCallback)
    if pairing == ["parted"]:
        trainer.add_callback(Parting())
    trainer.train(resume_from_checkpoint=f"{resumed}/{start}/checkpoint-{steps // 2}" if resumed else None)
    trainer.evaluate()
    found = {name: _whole(p) for name, p in model.named_parameters() if p.requires_grad}
    log = [{k: v for k, v in e.items() if isinstance(v, float)} for e in trainer.state.log_history if "taken" in e]
    torch.save(
        {
            "weights": found,
            "log": log,
            "promise": trainer.promise,
            "ended": trainer.stop_reason,
            "losses": {name: one.losses for name, one in trainer.predictions.items()},
            "own losses": predict(model, retain, 8, collate).losses if kind == "batchnorm" else None,
        },
        folder / f"{case.replace('/', '-')}-{rank()}.pt",
    )


def _whole(parameter):
    return (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach().clone()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import recorded_errors

    recorded_errors.record()
    for name in sys.argv[3:]:
        run(name, Path(sys.argv[1]), int(sys.argv[2]))
    leave()
