"""Tokens per second offline, with all prompts at once, for one or more limits of running sequences.

    python -m benchmarks.engine.throughput --prompts 256 --max-num-seqs 8 32 64
    python -m benchmarks.engine.throughput --model /path/to/checkpoint --out throughput.jsonl

Every prompt has --prompt-tokens random tokens, and every answer exactly --max-tokens (EOS ignored), greedy. The figure
is the median of --repeats runs, with the slowest and the fastest. The time includes the front end.
"""

from __future__ import annotations

import argparse
import statistics

from benchmarks.engine.offline import make_llm, parser, seconds
from benchmarks.rows import Report

UNITS = {"output": "tok/s", "slowest": "tok/s", "fastest": "tok/s", "prompts and output": "tok/s", "requests": "1/s"}


def measure(args: argparse.Namespace, max_num_seqs: int) -> dict[str, float]:
    with make_llm(args, max_num_seqs=max_num_seqs) as llm:
        rates = [args.prompts * args.max_tokens / taken for taken in seconds(llm, args, args.prompts, args.max_tokens)]
    middle = statistics.median(rates)
    return {
        "output": middle,
        "slowest": min(rates),
        "fastest": max(rates),
        "prompts and output": middle * (1 + args.prompt_tokens / args.max_tokens),
        "requests": middle / args.max_tokens,
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--prompts", type=int, default=128)
    options.add_argument("--max-num-seqs", type=int, nargs="+", default=[64])
    args = options.parse_args()
    report = Report("throughput", UNITS, args.out)
    for size in args.max_num_seqs:
        report.add(f"max_num_seqs {size}", measure(args, size))


if __name__ == "__main__":
    main()
