"""What forms of answers cost a step: µs a row for the mask and its application, and a sampler's step without them.

    python benchmarks/structured_cost.py                             # the embedded model's vocabulary
    python benchmarks/structured_cost.py --checkpoint my-model       # any checkpoint's

A row walks through a JSON answer of nested objects, strings, numbers and lists; medians over its tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from raylm.checkpoint import EMBEDDED
from raylm.grammar import grammar_of, load_tokenizer
from raylm.messages import NewSequence
from raylm.params import SamplingParams, StructuredOutputs
from raylm.worker.input_batch import InputBatch
from raylm.worker.sampling.sampler import Sampler
from raylm.worker.sampling.structured_outputs import Grammars, forbid

ANSWER = {"name": "the quick brown fox", "age": 127, "tags": ["one", "two", "three four"], "at": {"x": 1.25, "y": "al"}}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "at": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "y": {"type": "string"}},
            "required": ["x", "y"],
        },
    },
    "required": ["name", "age", "tags", "at"],
}


def median_us(times: list[float]) -> float:
    return 1e6 * statistics.median(times)


def walk(path: Path, eos: int) -> None:
    """One row's costs, by part."""
    began = time.perf_counter()
    tokenizer = load_tokenizer(path, (eos,))
    print(f"{tokenizer.vocab_size:,} tokens, read in {time.perf_counter() - began:.2f} s")
    size, grammar = tokenizer.vocab_size, grammar_of(StructuredOutputs(json=SCHEMA))
    grammars = Grammars(path, (eos,), size)
    began = time.perf_counter()
    matcher = grammars.start(grammar, []).result()
    print(f"  a new grammar {1e3 * (time.perf_counter() - began):.2f} ms with the tokens", end="")
    began = time.perf_counter()
    grammars.start(grammar, []).result()
    print(f", a known one {1e3 * (time.perf_counter() - began):.2f} ms")
    mask, logits = np.zeros((1, -(-size // 32)), np.int32), torch.randn(1, size)
    filled, applied, moved = [], [], []
    for token in tokenizer.tokenize_str(json.dumps(ANSWER, separators=(",", ":"))):
        t0 = time.perf_counter()
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        t1 = time.perf_counter()
        forbidden = np.unpackbits(~mask.view(np.uint8), axis=1, bitorder="little").view(np.bool_)[:, :size]
        forbid(logits, np.zeros(1, np.int64), forbidden)
        t2 = time.perf_counter()
        assert matcher.consume_token(token)
        filled.append(t1 - t0)
        applied.append(t2 - t1)
        moved.append(time.perf_counter() - t2)
    parts = {"mask": filled, "apply": applied, "advance": moved}
    print(
        "  µs a row: "
        + ", ".join(f"{name} {median_us(part):.0f} (most {1e6 * max(part):.0f})" for name, part in parts.items())
    )
    for count in (1, 8, 32):
        print(f"  a sampler's step of {count} greedy rows: " + step_costs(grammars, grammar, size, count))


def step_costs(grammars: Grammars, grammar: str, size: int, count: int) -> str:
    """Without forms, and with a form for each row, in ms."""
    found = []
    for form in (None, grammar):
        batch, sampler = InputBatch(count, 64, 16, size, grammars), Sampler()
        for i in range(count):
            batch.add(NewSequence(i, [5, 6], 2, [0], SamplingParams(temperature=0.0), i, grammar=form))
        rows, logits, times = batch.rows(range(count)), torch.randn(count, size), []
        for _ in range(30):
            copy = logits.clone()
            began = time.perf_counter()
            sampler.sample(copy, rows, batch)
            times.append(time.perf_counter() - began)
        found.append(1e3 * min(times))
    return f"{found[0]:.3f} ms without forms, {found[1]:.3f} ms with"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=EMBEDDED)
    parser.add_argument("--eos", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    walk(options.checkpoint, options.eos)


if __name__ == "__main__":
    main()
