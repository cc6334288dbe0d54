"""Tokens per second offline: all prompts handed over at once, for one or more sizes of the running batch.

    python -m benchmarks.engine.throughput --prompts 256 --max-num-seqs 8 32 64
    python -m benchmarks.engine.throughput --model /path/to/checkpoint --json throughput.json --plot throughput.png

Every prompt has --prompt-tokens random tokens, every answer exactly --max-tokens (EOS ignored), greedy. The figure is
the median of --repeats runs, with the slowest and the fastest beside it; the time includes the front end.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.engine.offline import greedy, make_llm, make_prompts, parser, record, show
from benchmarks.pictures import batch_sizes, picture


def measure(args: argparse.Namespace, max_num_seqs: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """(machine and engine, figures) for one size of the batch."""
    args.seed += 1
    with make_llm(args, max_num_seqs=max_num_seqs) as llm:
        rates = []
        for _ in range(args.repeats + 1):
            args.seed += 1
            prompts = make_prompts(args, args.prompts, llm.info.vocab_size)
            start = time.perf_counter()
            results = llm.generate(prompts, greedy(args.max_tokens), progress=False)
            seconds = time.perf_counter() - start
            rates.append(sum(len(result.token_ids) for result in results) / seconds)
        about = record(llm)
    rates = rates[1:]
    middle = statistics.median(rates)
    figures = {
        "max_num_seqs": max_num_seqs,
        "output_tokens_per_s": round(middle, 1),
        "slowest": round(min(rates), 1),
        "fastest": round(max(rates), 1),
        "total_tokens_per_s": round(middle * (1 + args.prompt_tokens / args.max_tokens), 1),
        "requests_per_s": round(middle / args.max_tokens, 2),
    }
    return about, figures


def plot(path: Path, about: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Output tokens per second over the size of the batch."""
    sizes, rates = [row["max_num_seqs"] for row in rows], [row["output_tokens_per_s"] for row in rows]
    spread = [
        [row["output_tokens_per_s"] - row["slowest"] for row in rows],
        [row["fastest"] - row["output_tokens_per_s"] for row in rows],
    ]
    with picture(path, 1, (6, 4), f"{about['machine']}, {about['dtype']}") as (axis,):
        axis.errorbar(sizes, rates, yerr=spread, marker="o", capsize=3)
        axis.set(xlabel="max_num_seqs", ylabel="output tokens/s", ylim=(0, None))
        batch_sizes(axis, sizes)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--prompts", type=int, default=128)
    options.add_argument("--max-num-seqs", type=int, nargs="+", default=[64])
    args = options.parse_args()
    measured = [measure(args, size) for size in args.max_num_seqs]
    about, rows = measured[0][0], [figures for _, figures in measured]
    show(args, about, rows, plot)


if __name__ == "__main__":
    main()
