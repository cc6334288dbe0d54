"""Shared code of the offline benchmarks: options, seeded prompts, and the engine."""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

from benchmarks import rows
from raylm import LLM, SamplingParams


def parser(description: str | None) -> argparse.ArgumentParser:
    found = rows.parser(description)
    found.add_argument("--model", default="embedded")
    found.add_argument("--dtype", default="auto")
    found.add_argument("--device", default="auto")
    found.add_argument("--threads", type=int, help="CPU threads of the worker")
    found.add_argument("--prompt-tokens", type=int, default=128)
    found.add_argument("--max-tokens", type=int, default=64)
    found.add_argument("--repeats", type=int, default=5, help="measured runs, after one that is not counted")
    found.add_argument("--seed", type=int, default=0)
    return found


def make_llm(args: argparse.Namespace, **scheduler: Any) -> LLM:
    """Make the engine to measure. All prompts are different, so the prefix cache stays on, as by default."""
    engine = {"threads": args.threads} if args.threads else {}
    llm = LLM(args.model, dtype=args.dtype, device=args.device, engine=engine, scheduler=scheduler)
    info = llm.info
    print(f"{rows.machine()}: {info.device}, {info.dtype}, attention {info.attention_backend}, {info.threads} threads")
    return llm


def seconds(llm: LLM, args: argparse.Namespace, count: int, max_tokens: int) -> list[float]:
    """The seconds of each run of ``count`` random prompts, greedy, exactly ``max_tokens`` each, after a warm-up run.

    Each prompt takes the next seed, so that no prompt occurs twice.
    """
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    found = []
    for _ in range(args.repeats + 1):
        args.seed += 1
        numbers = random.Random(args.seed)
        ids = range(llm.info.vocab_size)
        prompts = [numbers.choices(ids, k=args.prompt_tokens) for _ in range(count)]
        start = time.perf_counter()
        llm.generate(prompts, params, progress=False)
        found.append(time.perf_counter() - start)
    return found[1:]
