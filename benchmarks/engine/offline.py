"""What the offline benchmarks share: their options, prompts made from a seed, and a record of machine and command."""

from __future__ import annotations

import argparse
import json
import platform
import random
import shlex
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from raylm import LLM, SamplingParams


def parser(description: str | None) -> argparse.ArgumentParser:
    """Options of model, load and output."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--model", default="embedded")
    found.add_argument("--dtype", default="auto")
    found.add_argument("--device", default="auto")
    found.add_argument("--threads", type=int, help="CPU threads of the worker")
    found.add_argument("--prompt-tokens", type=int, default=128)
    found.add_argument("--max-tokens", type=int, default=64)
    found.add_argument("--repeats", type=int, default=5, help="measured runs, after one that is not counted")
    found.add_argument("--seed", type=int, default=0)
    found.add_argument("--json", type=Path, help="write all figures here")
    found.add_argument("--plot", type=Path, help="write a picture here")
    return found


def make_llm(args: argparse.Namespace, **scheduler: Any) -> LLM:
    """The engine to measure; prompts are all different, so the prefix cache is left on as it is by default."""
    engine = {"threads": args.threads} if args.threads else {}
    return LLM(args.model, dtype=args.dtype, device=args.device, engine=engine, scheduler=scheduler)


def make_prompts(args: argparse.Namespace, count: int, vocab_size: int) -> list[list[int]]:
    """Random ids from the seed; what is generated does not matter, as EOS is ignored."""
    numbers = random.Random(args.seed)
    return [[numbers.randrange(vocab_size) for _ in range(args.prompt_tokens)] for _ in range(count)]


def greedy(max_tokens: int) -> SamplingParams:
    """Exactly so many tokens each."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def record(llm: LLM) -> dict[str, Any]:
    """Machine, date, command, and what the engine decided."""
    info = llm.info
    return {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": _cpu_name(),
        "device": info.device,
        "dtype": info.dtype,
        "attention": info.attention_backend,
        "threads": info.threads,
    }


def show(
    args: argparse.Namespace,
    about: dict[str, Any],
    rows: list[dict[str, Any]],
    plot: Callable[[Path, dict[str, Any], list[dict[str, Any]]], None],
) -> None:
    """Print what was measured, and write it and draw it where the options ask for that."""
    _print_rows(about, rows)
    if args.json:
        args.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    if args.plot:
        plot(args.plot, about, rows)


def _print_rows(about: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """A table for the terminal."""
    print(" · ".join(f"{name} {value}" for name, value in about.items() if name != "command"))
    names = list(rows[0])
    widths = [max(len(name), *(len(f"{row[name]:g}") for row in rows)) for name in names]
    print("  ".join(f"{name:>{width}}" for name, width in zip(names, widths, strict=True)))
    for row in rows:
        print("  ".join(f"{row[name]:>{width}g}" for name, width in zip(names, widths, strict=True)))


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} × {names[0]}" if names else platform.processor()
