"""Time single steps of the ModelRunner and their parts: decoding at several batch sizes, and prompts.

    python -m benchmarks.model.forward --model DIR --threads 4 --limits
    python -m benchmarks.model.forward --model DIR --threads 4 --batch 1 --prefill --busy 0 1 2 --fixed-team \\
        --warm-up 200

With --limits, each part is compared with its least possible time on this machine: the longer one of the times for its
GEMM operations and for its memory reads, as in "linear 70% (at 92% of its limit)". The last share is that of the whole
step, whose bound is the sum of the parts' bounds. The machine's limits are measured first, as in `benchmarks.compare`.

With --busy N, every case runs beside N processes that compute all the time. --fixed-team also times each case with all
threads in every step. A team of threads that chooses its size needs some 100 steps to find it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # as Worker.start does, before torch is imported

import torch

from benchmarks.compare.limits import Limits, Shape, phase_seconds, read_shape
from benchmarks.compare.limits import measure as measure_limits
from benchmarks.rows import Report, parser
from raylm.config import Config
from raylm.messages import NewSequence, SchedulerOutput
from raylm.params import SamplingParams
from raylm.worker.forward import NativeForward
from raylm.worker.model_runner import ModelRunner
from raylm.worker.startup import start_runner

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
_COMPUTE = """
import os
parent = os.getppid()
while os.getppid() == parent:
    sum(range(100_000))
"""  # the process ends with its parent


class Steps:
    """Makes plans as a scheduler does, over a pool that is large enough for all sequences."""

    def __init__(self, runner: ModelRunner, block_size: int, vocab_size: int) -> None:
        self.runner, self.block_size = runner, block_size
        self.vocab_size = vocab_size
        self.step = 0

    def run(self, finished: list[int], new: list[NewSequence], rows: list[tuple[int, int, int]]) -> float:
        """Run one step of (sequence, computed, scheduled) rows. Returns its seconds."""
        plan = self.plan(finished, new, rows)
        started = time.perf_counter()
        self.runner.execute(plan)
        return time.perf_counter() - started

    def plan(self, finished: list[int], new: list[NewSequence], rows: list[tuple[int, int, int]]) -> SchedulerOutput:
        """The next step, of (sequence, computed, scheduled) rows."""
        self.step += 1
        ids, computed, scheduled = (list(column) for column in zip(*rows, strict=True)) if rows else ([], [], [])
        return SchedulerOutput(
            step=self.step, finished=finished, new=new, seq_ids=ids, num_computed=computed, num_scheduled=scheduled,
            samples=[True] * len(ids), new_block_counts=[0] * len(ids), new_block_ids=[],
        )  # fmt: skip

    def sequences(self, count: int, tokens: int, more: int) -> list[NewSequence]:
        """Sequences of random tokens, with blocks for ``more`` further tokens."""
        blocks = -(-(tokens + more) // self.block_size)
        draw = torch.Generator().manual_seed(count)
        return [
            NewSequence(
                at, torch.randint(self.vocab_size, (tokens,), generator=draw).tolist(), tokens,
                list(range(at * blocks, (at + 1) * blocks)), GREEDY, seed=0,
            )
            for at in range(count)
        ]  # fmt: skip

    def decode(self, batch: int, context: int, count: int) -> Iterator[float]:
        """Seconds of ``count`` steps of one token for each of ``batch`` sequences."""
        new = self.sequences(batch, context, count + 2)
        for seq in new:
            self.run([], [seq], [(seq.seq_id, 0, context)])
        for at in range(count):
            yield self.run([], [], [(seq.seq_id, context + at, 1) for seq in new])
        self.run([seq.seq_id for seq in new], [], [])

    def prefill(self, tokens: int, count: int) -> Iterator[float]:
        """Seconds of ``count`` prompts of ``tokens``, one after the other."""
        for _ in range(count):
            (seq,) = self.sequences(1, tokens, 1)
            yield self.run([], [seq], [(0, 0, tokens)])
            self.run([0], [], [])


class EveryThread:
    """Replaces TeamSize: every step uses all threads."""

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def choose(self, tokens: int) -> int:
        return self._threads

    def observe(self, tokens: int, seconds: float) -> None:
        """Does nothing, because the size is fixed."""


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Run ``count`` processes that compute all the time during the block."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        processes.extend(subprocess.Popen([sys.executable, "-c", _COMPUTE]) for _ in range(count))
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def teams(runner: ModelRunner, threads: int, *, fixed: bool) -> Iterator[str]:
    """Set each kind of team for the steps. Yields its name."""
    yield ""
    if not fixed:
        return
    if not isinstance(runner.forward, NativeForward):
        raise SystemExit("--fixed-team: this model's steps are not run by the native decoder, which has the team.")
    decoder = runner.forward._decoder
    choosing = decoder._size
    decoder._size = EveryThread(threads)
    yield ", all threads"
    decoder._size = choosing


def time_case(
    runner: ModelRunner, seconds: Iterator[float], warm_up: int, least: dict[str, float]
) -> tuple[dict[str, float], str]:
    """The median and the minimum of all steps of one case, and each part's share.

    ``least``: bounds of the parts in seconds.
    """
    for _ in range(warm_up):
        next(seconds)
    before, started = runner.forward.seconds(), time.perf_counter()
    taken = list(seconds)
    whole = time.perf_counter() - started
    parts = {part: now - before[part] for part, now in runner.forward.seconds().items()}
    parts["other"] = whole - sum(parts.values())
    of_limit = {part: f" (at {least[part] * len(taken) / parts[part]:.0%} of its limit)" for part in least}
    shares = ", ".join(f"{part} {value / whole:.0%}{of_limit.get(part, '')}" for part, value in parts.items())
    if least:
        shares += f"; all at {sum(least.values()) * len(taken) / whole:.0%}"
    return {"median": 1e3 * statistics.median(taken), "least": 1e3 * min(taken)}, shares


class Least:
    """The bounds of the parts of a step on this machine. Empty without ``--limits``."""

    def __init__(self, args: argparse.Namespace, threads: int) -> None:
        self._known: tuple[Limits, Shape] | None = None
        if args.limits:
            self._known = measure_limits(threads), read_shape(Path(args.model))
            print(self._known[0])

    def of(self, tokens: int, rows: int, seen: float, held: float) -> dict[str, float]:
        """Seconds of each part. The arguments are those of phase_seconds."""
        if self._known is None:
            return {}
        return {part: max(both) for part, both in phase_seconds(*self._known, tokens, rows, seen, held).items()}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", default="embedded")
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--threads", type=int)
    options.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32])
    options.add_argument("--context", type=int, default=256)
    options.add_argument("--prefill", type=int, nargs="*", default=[512, 2048])
    options.add_argument("--steps", type=int, default=24)
    options.add_argument("--warm-up", type=int, default=4, help="decode steps of each case that do not count")
    options.add_argument("--busy", type=int, nargs="+", default=[0], help="processes that compute beside the steps")
    options.add_argument("--fixed-team", action="store_true", help="time each case also with all threads in every step")
    options.add_argument("--quantization")
    options.add_argument("--limits", action="store_true", help="show what each part would take at least; bfloat16 only")
    args = options.parse_args()
    if args.limits and (args.quantization or args.dtype != "bfloat16" or args.model == "embedded"):
        raise SystemExit(
            "--limits: they are measured for bfloat16 checkpoints; give --model DIR and no --quantization."
        )
    engine = {"threads": args.threads} if args.threads else {}
    config = {"model": args.model, "dtype": args.dtype, "engine": engine, "cache": {"memory_gib": 4}}
    if args.quantization:
        config["quantization"] = args.quantization
    runner, info = start_runner(Config.model_validate(config))
    print(f"{args.model}: {info.dtype}, threads {info.threads}, attention {info.attention_backend}, {info.stages}")
    steps = Steps(runner, info.block_size, info.vocab_size)
    least = Least(args, info.threads)
    report = Report("forward", {"median": "ms", "least": "ms"}, args.out)
    for count in args.busy:
        with busy(count):
            for team in teams(runner, info.threads, fixed=args.fixed_team):
                measure(args, steps, f"{f', {count} busy' if count else ''}{team}", report, least)


def measure(args: argparse.Namespace, steps: Steps, circumstances: str, report: Report, least: Least) -> None:
    for batch in args.batch:
        seconds = steps.decode(batch, args.context, args.warm_up + args.steps)
        seen = args.context + args.warm_up + args.steps / 2
        bound = least.of(batch, batch, seen, batch * seen)
        figures, shares = time_case(steps.runner, seconds, args.warm_up, bound)
        report.add(f"decode {batch} x {args.context}{circumstances}", figures, shares)
    for tokens in args.prefill:
        figures, shares = time_case(steps.runner, steps.prefill(tokens, 4), 1, least.of(tokens, 1, tokens / 2, 0))
        report.add(f"prefill {tokens}{circumstances}", figures, shares)


if __name__ == "__main__":
    main()
