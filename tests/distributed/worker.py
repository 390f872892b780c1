"""Cases in one or several processes, with the weights they end with: worker.py FOLDER LAUNCHES

LAUNCHES are JSON, a list of [name, number of processes, settings by case]; see `run`. Each forks its processes once the
libraries are loaded, which takes far longer than the steps of a case; otherwise they are as torchrun starts them.
"""

import faulthandler
import gc
import json
import os
import signal
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import torch
import transformers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.trainer_callback import PrinterCallback

import hamu.core.distributed
import hamu.core.guard
from hamu import HamuError, PairedGradients, UnlearnConfig, UnlearnTrainer, build_method
from hamu.core.distributed import leave, rank, world_size
from hamu.core.distributed.sharded import shard
from hamu.core.gram_meter import GramMeter
from hamu.data import collate
from hamu.evaluation import predict
from hamu.models.language import AdapterSettings, with_adapter

transformers.utils.logging.set_verbosity_error()
GLOBAL_BATCH = 12
HANGS = 300  # seconds after which a process whose case does not end is ended


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
        if self.rules_out_one_more:
            logits = torch.cat([logits, logits.new_full((len(x), 1), -torch.inf)], 1)
        return logits


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
    """The last process's second batch has a value, or by its label a loss, that is not finite."""

    def __init__(self, collate, sides, of_loss):
        self._collate, self._sides, self._batches, self._of_loss = collate, sides, 0, of_loss

    def __call__(self, items):
        self._batches += 1
        batch = self._collate(items)
        if rank() == world_size() - 1 and self._batches == self._sides + 1:
            if self._of_loss:
                batch["labels"][0] = 3
            else:
                batch["pixel_values"][0, 0, 0, 0] = float("nan")
        return batch


def rounded(measure):
    return lambda *given, **how: measure(*given, **how).scaled(1 + 1e-6 * rank(), 1)


def stacked(items):
    return {key: torch.stack([item[key] for item in items]) for key in items[0]}


def problem(kind):
    torch.manual_seed(0)
    if kind in ("conv", "batchnorm"):
        norm = nn.BatchNorm2d(4) if kind == "batchnorm" else None
        return ConvNet(norm).double(), images(31, 1), images(10, 2), stacked
    if kind == "alike":  # near-collinear gradients of tensors that float32 sums measure at first
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 300), nn.Tanh(), nn.Linear(300, 3))
        retain, noise = images(12, 1), 0.02 * torch.randn(12, 1, 4, 4)
        pairs = zip(retain, noise, strict=True)
        moved = [x | {"pixel_values": x["pixel_values"] + more} for x, more in pairs]
        return model, retain, moved, stacked
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "max_position_embeddings": 32}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes, **heads))
    if kind in ("lora", "rough"):
        model = with_adapter(
            model.bfloat16() if kind == "rough" else model, AdapterSettings(rank=2)
        )
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zero at first: then the others would not move
                torch.nn.init.normal_(parameter, std=0.1)
    return model if kind == "rough" else model.double(), texts(31, 1), texts(10, 2), collate


@contextmanager
def altered(how):
    """The library as some cases need it."""
    with ExitStack() as changes:

        def change(where, name, to):
            changes.enter_context(mock.patch.object(where, name, to))

        if "small" in how:  # buckets of a few numbers: every tensor is cut over several
            change(hamu.core.distributed, "BUCKET", 50)
        if "rounded" in how:  # as another processor would
            for name in ("measure", "refined"):
                change(GramMeter, name, rounded(getattr(GramMeter, name)))
            sums = hamu.core.guard._moved
            change(hamu.core.guard, "_moved", lambda *given: sums(*given) * (1 + 1e-6 * rank()))
        yield


def loop(method, accumulation):
    """Steps of a loop of one's own, on a model that fully_shard shards where there are several."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3)).double()
    if world_size() > 1:
        shard(model, "cpu")
    pair = PairedGradients(model, method)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(24, 7, generator=generator, dtype=torch.float64), torch.arange(24) % 3
    for _ in range(6):
        for side, part in (("retain", slice(0, 16)), ("forget", slice(16, 24))):
            chunks = (each[part].chunk(accumulation) for each in (x, y))
            for chunk_x, chunk_y in zip(*chunks, strict=True):
                mine = slice(rank(), None, world_size())
                loss = nn.functional.cross_entropy(model(chunk_x[mine]), chunk_y[mine])
                with getattr(pair, side)():
                    (loss / accumulation).backward()
        pair.combine()
        optimizer.step()
    return {"weights": {name: _whole(p) for name, p in model.named_parameters()}}


def run(case, folder, steps, saves=None, resumes=None, target=None):
    """One case: "kind/method/accumulation/optimizer", and after another slash what is special, with hyphens.

    It leaves a checkpoint whenever it has taken as many steps as it `saves`. It `resumes` from the folder
    where the same case, in any number of processes and any layout, left one half way. Its `target` is a case
    that ran before in one process, the largest forget loss of whose steps ends this one.
    """
    kind, method, accumulation, optimizer, *how = case.split("/")
    if kind == "loop":
        settings = {"constraint": 0.5, "constraint_mode": "relative", "stopping": "off"}
        return loop(build_method(method, **settings), int(accumulation))
    how = set("".join(how).split("-"))
    if target:
        log = torch.load(folder.parent / f"alone/{target.replace('/', '-')}-0.pt")["log"]
        target = max(entry["forget_loss"] for entry in log) - 1e-6
    model, retain, forget, collate = problem(kind)
    by_goal = {}
    if "bounded" in how:
        by_goal = {"forget_objective": "bounded", "target_forget_loss": 2.0}
    if "goal" in how:
        retain, forget = images(120, 1), images(48, 2)
        by_goal = {"auto": True, "target_forget_loss": 1.2 if "near" in how else 2.0}
    is_split = bool(how & {"split", "small", "unequal"})
    each = GLOBAL_BATCH // (world_size() // 2 if is_split else world_size()) // int(accumulation)
    start = "-".join((kind, method, accumulation, optimizer))
    quiet = {"eval_strategy": "no", "eval_on_start": "goal" in how, "disable_tqdm": True}
    args = UnlearnConfig(
        output_dir=str(folder / start),
        method=method,
        max_steps=steps,
        per_device_train_batch_size=each,
        save_strategy="steps" if saves else "no",
        save_steps=saves or steps,
        gradient_accumulation_steps=int(accumulation),
        learning_rate=0.05 if optimizer == "sgd" else 0.005,
        optim=optimizer,
        constraint_mode="relative",
        stopping="off",
        min_forget_loss=1e-9,
        max_forget_loss=target,
        pairing="split" if is_split else "sequential",
        shard="shard" in how,
        bf16="bf16" in how,  # casts nothing that is float64, but measures each step from both ends
        check_steps=None if kind == "batchnorm" else 1,
        trust_region=kind == "rough",
        correct_steps=optimizer == "adamw_torch" and "rounded" in how,
        freeze_batchnorm=kind != "batchnorm",
        **quiet | by_goal,
    )
    if "unequal" in how:
        with torch.no_grad():
            model.get_parameter("conv.bias")[0] += 1e-7 * rank()
    if how & {"spoiled", "infinite"}:
        model.rules_out_one_more = "infinite" in how
        collate = Spoiling(collate, 1 if is_split else 2, of_loss="infinite" in how)
    with altered(how):
        data = {"retain_dataset": retain, "forget_dataset": forget, "data_collator": collate}
        trainer = UnlearnTrainer(model, args, **data)
        trainer.remove_callback(PrinterCallback)
        checkpoint = f"{resumes}/{start}/checkpoint-{steps // 2}" if resumes else None
        trainer.train(resume_from_checkpoint=checkpoint)
        trainer.evaluate()
    log = [entry for entry in trainer.state.log_history if "taken" in entry]
    return {
        "weights": {name: _whole(p) for name, p in model.named_parameters() if p.requires_grad},
        "log": [{k: v for k, v in entry.items() if isinstance(v, float)} for entry in log],
        "promise": trainer.promise,
        "ended": trainer.stop_reason,
        "ended_kind": trainer.stop.kind,
        "controller": trainer.controller.history if trainer.controller else None,
        "losses": {name: one.losses for name, one in trainer.predictions.items()},
        "own losses": predict(model, retain, 8).losses if kind == "batchnorm" else None,
    }


def _whole(parameter):
    whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return whole.detach().clone()


def fork(folder, number, cases):
    """Run cases in so many processes, as torchrun starts them; one that fails ends the others."""
    if number > 1:  # ports are of those that the system gives to nobody by itself
        port = 10_000 + (os.getpid() + number) % 20_000
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(number))
    children = set()
    for each in range(number):
        child = os.fork()
        if not child:
            if number > 1:
                os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(each))
            run_all(folder, cases)
            faulthandler.cancel_dump_traceback_later()
            leave()
            sys.exit()
        children.add(child)
    while children:
        child, status = os.wait()
        children.remove(child)
        if status:
            for other in children:
                os.kill(other, signal.SIGKILL)
            sys.exit(1)


def run_all(folder, cases):
    """Those that are to fail leave what they say, the others what `run` returns."""
    for case, settings in cases.items():
        print(f"process {rank()}: {case}", file=sys.stderr)
        faulthandler.dump_traceback_later(HANGS, exit=True)
        fails = settings.pop("fails", False)
        try:
            found = run(case, folder, **settings)
            assert not fails, "it does not fail"
        except HamuError as error:
            if not fails:
                raise
            found = str(error)
        torch.save(found, folder / f"{case.replace('/', '-')}-{rank()}.pt")


if __name__ == "__main__":
    gc.collect()
    gc.freeze()  # every trainer begins with a collection, which takes longer than the steps of a case
    for name, processes, cases in json.loads(sys.argv[2]):
        fork(Path(sys.argv[1], name), processes, cases)
