"""Milliseconds of offline batches: until the first tokens, and per further token.

    python -m benchmarks.engine.latency --batch 1 8 32
    python -m benchmarks.engine.latency --model /path/to/checkpoint --out latency.jsonl

Every prompt has --prompt-tokens random tokens, and every answer exactly --max-tokens (EOS ignored), greedy. "first
token" is the time of a run with one token per answer. "per token" is the additional time of each further token. Figures
are medians of --repeats runs; p99 is that of a whole run. The time includes the front end.
"""

from __future__ import annotations

import argparse
import statistics

from benchmarks.engine.offline import make_llm, parser, seconds
from benchmarks.rows import Report, quantile
from raylm import LLM

UNITS = {"first token": "ms", "per token": "ms", "p50": "ms", "p99": "ms", "output": "tok/s"}


def measure(llm: LLM, args: argparse.Namespace, batch: int) -> dict[str, float]:
    first = statistics.median(seconds(llm, args, batch, 1))
    runs = seconds(llm, args, batch, args.max_tokens)
    whole = statistics.median(runs)
    return {
        "first token": 1e3 * first,
        "per token": 1e3 * (whole - first) / max(1, args.max_tokens - 1),
        "p50": 1e3 * whole,
        "p99": 1e3 * quantile(runs, 0.99),
        "output": batch * args.max_tokens / whole,
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    args = options.parse_args()
    with make_llm(args, max_num_seqs=max(args.batch)) as llm:
        report = Report("latency", UNITS, args.out)
        for batch in args.batch:
            report.add(f"batch {batch}", measure(llm, args, batch))


if __name__ == "__main__":
    main()
