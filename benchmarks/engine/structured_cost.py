"""The cost of grammars: µs per row for the mask and its application, and a sampler's step with and without grammars.

    python -m benchmarks.engine.structured_cost                             # the embedded model's vocabulary
    python -m benchmarks.engine.structured_cost --checkpoint my-model       # any checkpoint's

A row walks through a JSON answer of nested objects, strings, numbers and lists. Figures are medians over its tokens.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.rows import Report, parser
from raylm.checkpoint import EMBEDDED
from raylm.grammar import grammar_of, load_tokenizer
from raylm.grammar import matcher as new_matcher
from raylm.messages import NewSequence
from raylm.params import SamplingParams, StructuredOutputs
from raylm.worker.input_batch import InputBatch
from raylm.worker.sampling.grammars import Grammars
from raylm.worker.sampling.sampler import Sampler
from raylm.worker.sampling.structured_outputs import forbid

UNITS = {"median": "µs", "most": "µs", "without grammars": "ms", "with grammars": "ms"}
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


def walk(path: Path, eos: int, report: Report) -> None:
    """Print the cost of one row by part, and the cost of the sampler's steps."""
    began = time.perf_counter()
    tokenizer = load_tokenizer(path, (eos,))
    print(f"{tokenizer.vocab_size:,} tokens, read in {time.perf_counter() - began:.2f} s")
    size, grammar = tokenizer.vocab_size, grammar_of(StructuredOutputs(json=SCHEMA))
    grammars = Grammars(path, (eos,), size)
    began = time.perf_counter()
    grammars.start(grammar, []).mask()
    print(f"  a new grammar {1e3 * (time.perf_counter() - began):.2f} ms with the tokens", end="")
    began = time.perf_counter()
    grammars.start(grammar, []).mask()
    matcher = new_matcher(tokenizer, grammar)
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
    for name, part in parts.items():
        report.add(f"{name}, a row", {"median": 1e6 * statistics.median(part), "most": 1e6 * max(part)})
    for count in (1, 8, 32):
        without, bound = step_costs(grammars, grammar, size, count)
        report.add(f"a sampler's step of {count} greedy rows", {"without grammars": without, "with grammars": bound})


def step_costs(grammars: Grammars, grammar: str, size: int, count: int) -> list[float]:
    """The least milliseconds without grammars, and with a grammar for each row."""
    found = []
    for used in (None, grammar):
        batch, sampler = InputBatch(count, 64, 16, size, grammars), Sampler()
        for i in range(count):
            batch.add(NewSequence(i, [5, 6], 2, [0], SamplingParams(temperature=0.0), i, grammar=used))
        rows, logits, times = batch.rows(range(count)), torch.randn(count, size), []
        for _ in range(30):
            copy = logits.clone()
            began = time.perf_counter()
            sampler.sample(copy, rows, batch)
            times.append(time.perf_counter() - began)
        found.append(1e3 * min(times))
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--checkpoint", type=Path, default=EMBEDDED)
    options.add_argument("--eos", type=int, default=2)
    args = options.parse_args()
    torch.set_num_threads(1)
    walk(args.checkpoint, args.eos, Report("structured_cost", UNITS, args.out))


if __name__ == "__main__":
    main()
