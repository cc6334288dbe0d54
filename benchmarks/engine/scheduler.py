"""Steps per second of the engine core alone: schedule() and update() with decoding sequences, without a model.

    python -m benchmarks.engine.scheduler --sequences 256 --blocks 100000 --profile

Prompts are computed first. Then each measured step gives every sequence one token. Sequences that end are replaced, so
a small share of the steps also admits sequences. The figure is the best of ``--repeats`` runs of ``--steps`` steps,
because other load on the machine can only lower it.

    python -m benchmarks.engine.scheduler --waiting 100 10000 1000000 --prompt 64

With ``--waiting``, that many requests wait behind the running ones. Figures are the CPU time of a step, and of adding a
request (the mean of each 500 of the last 10,000, including garbage collection), with all numbers in turn. A million
waiting requests need some 3 GB.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable

from benchmarks.rows import Report, parser, quantile
from raylm.config import SchedulerConfig
from raylm.engine.kv_cache_manager import KVCacheManager
from raylm.engine.scheduler import Scheduler
from raylm.messages import EngineCoreRequest, ModelRunnerOutput, SchedulerOutput, ServiceLevel
from raylm.params import SamplingParams

BLOCK_SIZE = 16
_BATCH = 500  # requests added between two time measurements


class Bench:
    """A scheduler at full load with a worker that takes no time."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        config = SchedulerConfig(
            max_num_seqs=args.sequences, max_num_batched_tokens=max(8192, args.sequences), policy=args.policy
        )
        kv = KVCacheManager(args.blocks, BLOCK_SIZE, prefix_caching=not args.no_prefix_caching)
        self.scheduler = Scheduler(config, kv, max_model_len=args.blocks * BLOCK_SIZE)
        self._params = [SamplingParams(max_tokens=args.output + more, seed=more, ignore_eos=True) for more in range(97)]
        self.in_flight: deque[SchedulerOutput] = deque()
        self.keys = 0
        self.busy_s = 0.0
        self.tokens = 0

    def request(self, prompt: Iterable[int]) -> EngineCoreRequest:
        """A new request whose prompt differs from all others from the first token on."""
        key, self.keys = self.keys, self.keys + 1
        service = ServiceLevel(tenant=f"key-{key % self.args.keys}")
        prompt_ids = array("I", [key, *prompt])
        return EngineCoreRequest(key, str(key), prompt_ids, self._params[key % 97], eos_token_ids=(2,), service=service)

    def add(self) -> None:
        request = self.request(range(self.args.prompt - 1))
        self.scheduler.add(f"client-{request.key % self.args.clients}", request)

    def step(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Schedule until two steps are in flight, then process the result of the older step. Only this is measured."""
        while self.scheduler.stats().running + len(self.scheduler.waiting) < self.args.sequences:
            self.add()
        start = clock()
        while len(self.in_flight) < 2 and (plan := self.scheduler.schedule()):
            self.in_flight.append(plan)
        self.busy_s += clock() - start
        plan = self.in_flight.popleft()
        result = drawn(plan)
        self.tokens += len(result.seq_ids)
        start = clock()
        self.scheduler.update(plan, result)
        self.busy_s += clock() - start

    def fill(self, waiting: int) -> list[float]:
        """Add ``waiting`` requests. Returns the CPU time per request in µs, for each of the last batches."""
        times, prompt = [], list(range(self.args.prompt - 1))
        while (left := waiting - len(self.scheduler.waiting)) > 0:
            requests = [self.request(prompt) for _ in range(min(left, _BATCH))]
            start = time.thread_time()
            for request in requests:
                self.scheduler.add(f"client-{request.key % self.args.clients}", request)
            times.append(1e6 * (time.thread_time() - start) / len(requests))
        return times[-20:]

    def step_times(self, waiting: int) -> list[float]:
        """CPU time in µs of each of ``--steps`` steps while ``waiting`` requests wait."""
        times = []
        for _ in range(self.args.steps):
            self.fill(waiting)
            self.busy_s = 0.0
            self.step(time.thread_time)
            times.append(1e6 * self.busy_s)
        return times

    def measure(self) -> float:
        self.busy_s, self.tokens = 0.0, 0
        for _ in range(self.args.steps):
            self.step()
        steps: int = self.args.steps
        return steps / self.busy_s


def queues(args: argparse.Namespace) -> None:
    """The cost of steps and of adding requests, by the number of waiting requests."""
    units = {"step p50": "µs", "step p99": "µs", "longest": "µs", "an add p50": "µs", "an add, mean": "µs"}
    report = Report("scheduler_queue", units, args.out)
    benches = {waiting: Bench(args) for waiting in args.waiting}
    gc.collect()  # as the engine's actor does after its start
    gc.freeze()
    gc.set_threshold(2_000, 5, 1_000_000)
    adds = {waiting: bench.fill(waiting + args.sequences) for waiting, bench in benches.items()}
    steps: dict[int, list[float]] = {waiting: [] for waiting in benches}
    for bench in benches.values():
        for _ in range(50):  # compute the prompts
            bench.step()
    for _ in range(args.repeats):
        for waiting, bench in benches.items():
            steps[waiting] += bench.step_times(waiting)
    for waiting, times in steps.items():
        longest, added = max(times), adds[waiting]
        p50, p99 = quantile(times, 0.5), quantile(times, 0.99)
        figures = [p50, p99, longest, quantile(added, 0.5), sum(added) / len(added)]
        report.add(f"{waiting:,} waiting, {args.policy}", dict(zip(units, figures, strict=True)))


def drawn(plan: SchedulerOutput) -> ModelRunnerOutput:
    """The result that a worker would return."""
    seq_ids = [seq_id for seq_id, samples in zip(plan.seq_ids, plan.samples, strict=True) if samples]
    return ModelRunnerOutput(plan.step, seq_ids, [1] * len(seq_ids), [100 + seq_id % 1000 for seq_id in seq_ids])


def profile(bench: Bench) -> None:
    """Print each function's share of the scheduler's time, measured by cProfile."""
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
    options.add_argument("--keys", type=int, default=1, help="API keys whose requests come in turns")
    options.add_argument("--policy", choices=["fair", "fcfs", "priority"], default="fair")
    options.add_argument("--no-prefix-caching", action="store_true")
    options.add_argument("--steps", type=int, default=1000, help="steps of one run")
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--profile", action="store_true", help="also print which functions the time goes to")
    options.add_argument("--waiting", type=int, nargs="+", help="requests that wait: what steps and adds cost then")
    args = options.parse_args()
    if args.waiting:
        queues(args)
        return
    bench = Bench(args)
    for _ in range(50):  # compute the prompts
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
