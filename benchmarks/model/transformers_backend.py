"""Least times of one model's steps on both paths, in turns: RayLM's own decoder and the transformers backend.

python -m benchmarks.model.transformers_backend --model DIR --threads 2
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial

os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # as Worker.start does, before torch is imported

from benchmarks.model.forward import Steps
from benchmarks.rows import Report, parser
from raylm.checkpoint import resolve
from raylm.config import Config
from raylm.models.registry import ARCHITECTURES
from raylm.models.transformers_backend import TRANSFORMERS_BACKEND
from raylm.worker.startup import start_runner

_ROUNDS = 5


def steps_of(model: str, threads: int | None) -> Steps:
    """Steps of the model on the registered path."""
    engine = {"threads": threads} if threads else {}
    cache = {"memory_gib": 2}
    runner, info = start_runner(
        Config.model_validate({"model": model, "dtype": "bfloat16", "engine": engine, "cache": cache})
    )
    print(f"{type(runner.forward).__name__}: threads {info.threads}, attention {info.attention_backend}, {info.stages}")
    return Steps(runner, info.block_size, info.vocab_size)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", default="embedded")
    options.add_argument("--threads", type=int)
    options.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32])
    options.add_argument("--context", type=int, default=256)
    options.add_argument("--prefill", type=int, nargs="*", default=[512])
    args = options.parse_args()
    paths = [steps_of(args.model, args.threads)]
    ARCHITECTURES[resolve(args.model).config["architectures"][0]] = TRANSFORMERS_BACKEND
    paths.append(steps_of(args.model, args.threads))
    report = Report("transformers_backend", {"own decoder": "ms", "transformers": "ms", "ratio": "x"}, args.out)

    def add(case: str, run: Callable[[Steps], Iterator[float]]) -> None:
        turns = [[1e3 * min(run(path)) for path in paths] for _ in range(_ROUNDS)]
        own, transformers = map(min, zip(*turns, strict=True))
        report.add(case, {"own decoder": own, "transformers": transformers, "ratio": transformers / own})

    for batch in args.batch:
        add(f"decode {batch} x {args.context}", partial(Steps.decode, batch=batch, context=args.context, count=12))
    for tokens in args.prefill:
        add(f"prefill {tokens}", partial(Steps.prefill, tokens=tokens, count=2))


if __name__ == "__main__":
    main()
