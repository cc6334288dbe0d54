"""Seconds offline for one batch at a time: until the first tokens, and per token after them.

    python -m benchmarks.engine.latency --batch 1 8 32
    python -m benchmarks.engine.latency --model /path/to/checkpoint --json latency.json --plot latency.png

Every prompt has --prompt-tokens random tokens, every answer exactly --max-tokens (EOS ignored), greedy. ``first_ms``
is a run that asks for one token; ``per_token_ms`` is what each further token adds to it. Medians of --repeats runs;
``p99_ms`` is of the whole run of a batch. The time includes the front end.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.engine.offline import greedy, make_llm, make_prompts, parser, record, show
from benchmarks.pictures import batch_sizes, picture
from raylm import LLM


def seconds(llm: LLM, args: argparse.Namespace, batch: int, max_tokens: int) -> list[float]:
    """The time of each run; its prompts are new, and one run before goes uncounted."""
    found = []
    for _ in range(args.repeats + 1):
        args.seed += 1
        prompts = make_prompts(args, batch, llm.info.vocab_size)
        start = time.perf_counter()
        llm.generate(prompts, greedy(max_tokens), progress=False)
        found.append(time.perf_counter() - start)
    return found[1:]


def measure(llm: LLM, args: argparse.Namespace, batch: int) -> dict[str, Any]:
    """Figures of one size of the batch, in milliseconds."""
    first, whole = seconds(llm, args, batch, 1), seconds(llm, args, batch, args.max_tokens)
    after = (statistics.median(whole) - statistics.median(first)) / max(1, args.max_tokens - 1)
    return {
        "batch": batch,
        "first_ms": round(1e3 * statistics.median(first), 2),
        "per_token_ms": round(1e3 * after, 3),
        "p50_ms": round(1e3 * statistics.median(whole), 1),
        "p99_ms": round(1e3 * sorted(whole)[min(len(whole) - 1, int(0.99 * len(whole)))], 1),
        "output_tokens_per_s": round(batch * args.max_tokens / statistics.median(whole), 1),
    }


def plot(path: Path, about: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Time to the first token, and per further token, over the size of the batch."""
    sizes = [row["batch"] for row in rows]
    labels = {"first_ms": "first token, ms", "per_token_ms": "per further token, ms"}
    title = f"{about['machine']}, {about['dtype']}, prompts of {about['prompt_tokens']} tokens"
    with picture(path, 2, (9, 4), title) as axes:
        for axis, (name, label) in zip(axes, labels.items(), strict=True):
            axis.plot(sizes, [row[name] for row in rows], marker="o")
            axis.set(xlabel="batch", ylabel=label, ylim=(0, None))
            batch_sizes(axis, sizes)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    args = options.parse_args()
    with make_llm(args, max_num_seqs=max(args.batch)) as llm:
        about = {**record(llm), "prompt_tokens": args.prompt_tokens, "max_tokens": args.max_tokens}
        rows = [measure(llm, args, batch) for batch in args.batch]
    show(args, about, rows, plot)


if __name__ == "__main__":
    main()
