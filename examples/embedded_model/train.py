"""Trains the embedded model on the CPU: `python train.py`; every figure of the recipe stands in STAGES."""

import argparse
import ctypes
import queue
import random
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import build_tokenizer
import conversation
import torch
import torch.nn.functional as F
from model import Llama, export
from tokenizers import Tokenizer
from torch import Tensor
from words import Split

BASE = {
    "arithmetic": 3.0, "word problem": 0.8, "three terms": 0.5, "counting": 0.7, "copying": 2.5, "extraction": 2.0,
    "definition": 1.6, "small talk": 0.5, "unknown": 0.5, "remark": 0.3, "tell": 1.0, "ask": 1.5, "tell and ask": 1.0,
}  # fmt: skip
LONG = BASE | {"remark": 1.5, "ask": 4.0, "tell": 1.0, "tell and ask": 0.5}
WIDE = BASE | {"arithmetic": 7.0, "ask": 3.0, "tell and ask": 1.5, "remark": 0.8, "copying": 3.0, "small talk": 0.8}


DENSE = WIDE | {"arithmetic": 5.0, "ask": 8.0, "tell": 1.5, "counting": 1.2, "extraction": 1.5, "definition": 1.0}


@dataclass(frozen=True)
class Stage:
    """A stretch of training; `rows` are the row lengths in turn, each with its share of conversations with tools."""

    steps: int
    rows: tuple[tuple[int, float], ...]
    weights: dict[str, float]
    split: Split = "train"


TOKENS = 9216  # a step
STAGES = [
    Stage(1600, ((384, 0.3),), BASE),
    Stage(1000, ((384, 0.3), (1536, 0.3)), LONG),
    Stage(650, ((384, 0.4), (384, 0.4), (1536, 0.4)), WIDE, "wide"),
    Stage(750, ((384, 0.6), (1536, 0.15)), DENSE, "wide"),
    Stage(600, ((640, 0.9), (1536, 0.2)), DENSE | {"arithmetic": 8.0}, "whole"),
    Stage(1200, ((640, 0.95), (640, 0.95), (1536, 0.3)), DENSE | {"arithmetic": 14.0}, "whole"),
    Stage(900, ((640, 1.0), (640, 0.6)), DENSE | {"arithmetic": 14.0}, "drill"),
    Stage(400, ((640, 1.0), (1536, 0.5), (640, 1.0)), DENSE | {"arithmetic": 10.0, "ask": 12.0}, "drill"),
]
RATES = [(0, 0.0), (60, 4e-3), (1690, 4e-3), (2600, 0.0), (2640, 3e-3), (2900, 3e-3), (3250, 2.045e-3)]
RATES += [(4000, 0.511e-3), (4030, 1.8e-3), (4600, 0.0), (4630, 2e-3), (5000, 2e-3), (5800, 0.0)]
RATES += [(5820, 2e-3), (6200, 2e-3), (6700, 0.0), (6720, 1.6e-3), (6850, 1.6e-3), (7100, 0.0)]
MILESTONE = 5800  # what ships is the average of the states here and at the end: better than both on nearly every skill
Batch = tuple[Tensor, Tensor, Tensor]


def keep_memory() -> None:
    """Let malloc keep freed pages: returning them after every step costs a quarter of the speed."""
    libc = ctypes.CDLL("libc.so.6")
    for option, value in ((-3, 1 << 30), (-1, 2_000_000_000), (-2, 1 << 28)):  # mmap threshold, trim threshold, top pad
        libc.mallopt(option, value)


def batches(tokenizer: Tokenizer, seed: int, first: int) -> Iterator[tuple[int, Batch]]:
    """The batches from step `first` on: input ids (rows, length), chosen flat positions, their targets."""
    step = 0
    for stage in STAGES:
        for i in range(stage.steps):
            if step >= first:
                yield (
                    step,
                    batch(tokenizer, random.Random(f"{seed}:{step}"), stage, *stage.rows[i % len(stage.rows)]),
                )
            step += 1


def batch(tokenizer: Tokenizer, rng: random.Random, stage: Stage, length: int, tool_share: float) -> Batch:
    """One batch of conversations, each padded at its end."""
    rows = max(1, TOKENS // length)
    ids = torch.zeros((rows, length + 1), dtype=torch.int64)
    written = torch.zeros((rows, length + 1), dtype=torch.bool)
    for i in range(rows):
        tokens, mask = conversation.row(rng, tokenizer, length + 1, stage.weights, tool_share, stage.split)
        ids[i, : len(tokens)] = torch.tensor(tokens)
        written[i, : len(mask)] = torch.tensor(mask)
    chosen = written[:, 1:].flatten().nonzero().flatten()
    return ids[:, :-1].contiguous(), chosen, ids[:, 1:].flatten()[chosen]


def ahead(source: Iterator[tuple[int, Batch]], depth: int = 4) -> Iterator[tuple[int, Batch]]:
    """The same batches, made on a thread while the model computes."""
    ready: queue.Queue[tuple[int, Batch] | None] = queue.Queue(depth)

    def fill() -> None:
        for item in source:
            ready.put(item)
        ready.put(None)

    threading.Thread(target=fill, daemon=True).start()
    while (item := ready.get()) is not None:
        yield item


def rate(step: int) -> float:
    """Learning rate, linear between the points (step, rate) of RATES: two times rise, plateau and fall."""
    after = next(i for i, (point, _) in enumerate(RATES) if point > step)
    (left, low), (right, high) = RATES[after - 1 : after + 1]
    return low + (high - low) * (step + 1 - left) / (right - left)


def optimizers(model: Llama) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for embeddings and norms."""
    muon = torch.optim.Muon(model.hidden_matrices(), lr=RATES[1][1], weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(model.other_parameters(), lr=RATES[1][1], betas=(0.9, 0.98), weight_decay=0.0)
    return [muon, adam]


def learn(model: Llama, optimizers: list[torch.optim.Optimizer], batch: Batch, lr: float) -> float:
    """One step; returns the loss."""
    ids, chosen, targets = batch
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids, chosen)
    loss = F.cross_entropy(logits.float(), targets)
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss.item()


def checkpoint(path: Path, model: Llama, optimizers: list[torch.optim.Optimizer], step: int) -> None:
    """Write the whole training state so that a crash costs little."""
    state = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers], "step": step}
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def publish(model: Llama, work: Path, out: Path) -> None:
    """Write the servable checkpoint beside its place, then move its files there one by one."""
    fresh = work / "fresh"
    shutil.copytree(work / "tokenizer", fresh, dirs_exist_ok=True)
    export(model, fresh)
    out.mkdir(parents=True, exist_ok=True)
    for file in fresh.iterdir():
        shutil.copyfile(file, out / f".{file.name}")
        (out / f".{file.name}").replace(out / file.name)


def main() -> None:
    """Train from the start, or from the last state in `--work`, to the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("embedded-model"), help="where the finished checkpoint goes")
    parser.add_argument("--work", type=Path, default=Path("embedded-model-work"), help="tokenizer, states and log")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    keep_memory()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    if not (arguments.work / "tokenizer").exists():
        build_tokenizer.build(arguments.work / "tokenizer")
    run(arguments.work, arguments.out, arguments.seed)


def run(work: Path, out: Path, seed: int) -> None:
    """The training loop with its progress lines; a servable checkpoint every 250 steps in work/latest."""
    tokenizer = Tokenizer.from_file(str(work / "tokenizer" / "tokenizer.json"))
    model = Llama(build_tokenizer.twins(tokenizer))
    steppers, state, first = optimizers(model), work / "state.pt", 0
    if state.exists():
        saved = torch.load(state, weights_only=True)
        model.load_state_dict(saved["model"])
        for optimizer, values in zip(steppers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(values)
        first = saved["step"]
    total = sum(stage.steps for stage in STAGES)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, steps {first} to {total}", flush=True)
    began = last = time.time()
    tokens = 0
    losses: list[float] = []
    for step, item in ahead(batches(tokenizer, seed, first)):
        losses.append(learn(model, steppers, item, rate(step)))
        tokens += item[0].numel()
        done = step + 1
        if done % 20 == 0:
            now = time.time()
            minutes = (now - began) / (done - first) * (total - done) / 60
            speed, loss = tokens / (now - last), sum(losses) / len(losses)
            print(f"step {done}/{total} loss {loss:.4f} {speed:.0f} tok/s eta {minutes:.0f} min", flush=True)
            last, tokens, losses = now, 0, []
        if done == MILESTONE:
            torch.save(model.state_dict(), work / "milestone.pt")
        if done % 250 == 0 or done == total:
            checkpoint(state, model, steppers, done)
            publish(model, work, work / "latest")
    average(model, torch.load(work / "milestone.pt", weights_only=True))
    publish(model, work, out)


def average(model: Llama, other: dict[str, Tensor]) -> None:
    """Replace the weights by their mean with `other`."""
    model.load_state_dict({name: (value + other[name]) / 2 for name, value in model.state_dict().items()})


if __name__ == "__main__":
    main()
