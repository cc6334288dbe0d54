"""Times the two paths of one compact model against each other, in turns: its own decoder, and transformers' code."""

from __future__ import annotations

import argparse
import os

os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # as Worker.start does, before torch is imported

from benchmarks.model.forward import Steps
from raylm.checkpoint import resolve
from raylm.config import Config
from raylm.models.registry import ARCHITECTURES, UNIVERSAL
from raylm.worker.startup import start_runner

_ROUNDS = 5


def steps_of(model: str, threads: int | None) -> Steps:
    """The model on the path that is registered now."""
    engine = {"threads": threads} if threads else {}
    cache = {"memory_gib": 2}
    runner, info = start_runner(
        Config.model_validate({"model": model, "dtype": "bfloat16", "engine": engine, "cache": cache})
    )
    print(f"{type(runner.forward).__name__}: threads {info.threads}, attention {info.attention_backend}, {info.stages}")
    return Steps(runner, info.block_size, info.vocab_size)


def main() -> None:
    """Print the least time of each path, and the ratio of these."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--prefill", type=int, nargs="*", default=[512])
    a = parser.parse_args()
    paths = [steps_of(a.model, a.threads)]
    ARCHITECTURES[resolve(a.model).config["architectures"][0]] = UNIVERSAL
    paths.append(steps_of(a.model, a.threads))
    for batch in a.batch:
        turns = [[min(path.decode(batch, a.context, 12)) for path in paths] for _ in range(_ROUNDS)]
        report(f"decode {batch} x {a.context}", turns)
    for tokens in a.prefill:
        report(f"prefill {tokens}", [[min(path.prefill(tokens, 2)) for path in paths] for _ in range(_ROUNDS)])


def report(case: str, turns: list[list[float]]) -> None:
    """``turns`` are the seconds of (compact, universal)."""
    compact, universal = (min(column) * 1e3 for column in zip(*turns, strict=True))
    print(f"{case:20} compact {compact:8.2f} ms   universal {universal:8.2f} ms   ratio {universal / compact:.2f}")


if __name__ == "__main__":
    main()
