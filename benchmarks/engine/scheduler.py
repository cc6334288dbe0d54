"""Steps per second of the pure engine core: schedule() and update() with every sequence decoding, no model behind it.

    python -m benchmarks.engine.scheduler --sequences 256 --blocks 100000 --profile

Prompts are computed first; then each measured step gives every sequence one token. Sequences that end are replaced,
so that a small share of the steps also admits. The figure is the best of ``--repeats`` runs of ``--steps`` steps, as
other load on the machine can only lower it.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import time
from collections import deque

from benchmarks.rows import Report, parser
from raylm.config import SchedulerConfig
from raylm.engine.kv_cache_manager import KVCacheManager
from raylm.engine.scheduler import Scheduler
from raylm.messages import EngineCoreRequest, ModelRunnerOutput, SchedulerOutput
from raylm.params import SamplingParams

BLOCK_SIZE = 16


class Bench:
    """A scheduler at full load, and a worker that takes no time."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        config = SchedulerConfig(
            max_num_seqs=args.sequences, max_num_batched_tokens=max(8192, args.sequences), policy=args.policy
        )
        kv = KVCacheManager(args.blocks, BLOCK_SIZE, prefix_caching=not args.no_prefix_caching)
        self.scheduler = Scheduler(config, kv, max_model_len=args.blocks * BLOCK_SIZE)
        self.in_flight: deque[SchedulerOutput] = deque()
        self.keys = 0
        self.busy_s = 0.0
        self.tokens = 0

    def add(self) -> None:
        """One more request, its prompt unlike all others."""
        key, self.keys = self.keys, self.keys + 1
        params = SamplingParams(max_tokens=self.args.output + key % 97, seed=key, ignore_eos=True)
        prompt = [key, *range(self.args.prompt - 1)]
        request = EngineCoreRequest(key, str(key), prompt, params, eos_token_ids=(2,))
        self.scheduler.add(f"client-{key % self.args.clients}", request)

    def step(self) -> None:
        """Schedule until two steps are in flight, then take in the oldest; only this is timed."""
        while self.scheduler.stats().running + len(self.scheduler.waiting) < self.args.sequences:
            self.add()
        start = time.perf_counter()
        while len(self.in_flight) < 2 and (plan := self.scheduler.schedule()):
            self.in_flight.append(plan)
        self.busy_s += time.perf_counter() - start
        plan = self.in_flight.popleft()
        result = drawn(plan)
        self.tokens += len(result.seq_ids)
        start = time.perf_counter()
        self.scheduler.update(plan, result)
        self.busy_s += time.perf_counter() - start

    def measure(self) -> float:
        self.busy_s, self.tokens = 0.0, 0
        for _ in range(self.args.steps):
            self.step()
        steps: int = self.args.steps
        return steps / self.busy_s


def drawn(plan: SchedulerOutput) -> ModelRunnerOutput:
    """What a worker would return."""
    seq_ids = [seq_id for seq_id, samples in zip(plan.seq_ids, plan.samples, strict=True) if samples]
    return ModelRunnerOutput(plan.step, seq_ids, [1] * len(seq_ids), [100 + seq_id % 1000 for seq_id in seq_ids])


def profile(bench: Bench) -> None:
    """Share of each function in the time of the scheduler, by cProfile."""
    profiler = cProfile.Profile()
    profiler.runcall(bench.measure)
    stats = pstats.Stats(profiler)
    rows = [
        (own, calls, f"{file.rpartition('/')[2]}:{name}")
        for (file, _, name), (_, calls, own, _, _) in stats.stats.items()  # type: ignore[attr-defined]
        if "benchmarks" not in file
    ]
    total = sum(own for own, _, _ in rows)
    print(f"{'share':>7} {'calls/step':>11}  function (under the profiler, which taxes calls)")
    for own, calls, name in sorted(rows, reverse=True)[:16]:
        print(f"{own / total:7.1%} {calls / bench.args.steps:11.2f}  {name}")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--sequences", type=int, default=256, help="sequences decoding at once")
    options.add_argument("--blocks", type=int, default=100_000, help="KV blocks of 16 tokens in the pool")
    options.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    options.add_argument("--output", type=int, default=1000, help="least tokens that each request generates")
    options.add_argument("--clients", type=int, default=2, help="ingress replicas that share the engine")
    options.add_argument("--policy", choices=["fair", "fcfs", "priority"], default="fair")
    options.add_argument("--no-prefix-caching", action="store_true")
    options.add_argument("--steps", type=int, default=1000, help="steps of one run")
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--profile", action="store_true", help="also print which functions the time goes to")
    args = options.parse_args()
    bench = Bench(args)
    for _ in range(50):  # prompts
        bench.step()
    gc.collect()
    rates = [bench.measure() for _ in range(args.repeats)]
    report = Report("scheduler", {"best": "steps/s", "worst": "steps/s", "a step": "µs", "a sequence": "ns"}, args.out)
    report.add(
        f"{args.sequences} sequences, {args.blocks:,} blocks, {args.clients} clients",
        {
            "best": max(rates),
            "worst": min(rates),
            "a step": 1e6 / max(rates),
            "a sequence": 1e9 / max(rates) / args.sequences,
        },
        f"KV in use {bench.scheduler.kv.usage:.0%}, {bench.scheduler.counters.preemptions} preemptions",
    )
    if args.profile:
        profile(bench)


if __name__ == "__main__":
    main()
