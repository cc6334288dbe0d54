"""The effect of long prompts on running streams, and the cost of protecting the streams; scheduler and worker only.

    python -m benchmarks.engine.interference --model DIR [--streams 8] [--prompts 6] [--targets 0 200 100]

Streams decode all the time. Long prompts arrive, two at a time, and get an answer of a few tokens. For each value of
``scheduler.target_itl_ms`` (0: none) the benchmark prints the streams' inter-token latency while prompts run, the
prompts' time to first token, and the computed tokens per second. The targets alternate, ``--repeats`` times.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import defaultdict, deque

from benchmarks.rows import Report, parser, quantile
from raylm.config import Config
from raylm.engine.kv_cache_manager import KVCacheManager
from raylm.engine.scheduler import Scheduler
from raylm.messages import EngineCoreRequest, ModelRunnerOutput, SchedulerOutput
from raylm.params import SamplingParams
from raylm.worker import Worker

AT_ONCE = 2
UNITS = {"ITL p50": "ms", "ITL p99": "ms", "TTFT p50": "s", "tokens": "1/s"}


class Bench:
    """One engine in this thread with two steps in flight. All prompts are different."""

    def __init__(self, args: argparse.Namespace, target_ms: float) -> None:
        settings = {
            "model": args.model,
            "scheduler": {"target_itl_ms": target_ms or None},
            "engine": {"threads": args.threads},
            "cache": {"num_blocks": 2048},
        }
        self.args = args
        self.config = Config.model_validate(settings)
        self.worker = Worker(self.config)
        self.info = self.worker.start()
        kv = KVCacheManager(self.info.num_blocks, self.info.block_size, prefix_caching=False)
        self.core = Scheduler(self.config.scheduler, kv, self.info.max_model_len)
        self.numbers = random.Random(0)
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.arrived: dict[int, list[float]] = defaultdict(list)
        self.keys = 0
        self.tokens = 0

    def add(self, tokens: int, answer: int) -> int:
        key, self.keys = self.keys, self.keys + 1
        prompt = [self.numbers.randrange(5, self.info.vocab_size) for _ in range(tokens)]
        params = SamplingParams(temperature=1.0, max_tokens=answer, ignore_eos=True, seed=key)
        self.core.add("bench", EngineCoreRequest(key, str(key), prompt, params))
        return key

    def step(self) -> None:
        """Process the result of the older of two steps."""
        while len(self.in_flight) < 2 and (plan := self.core.schedule()):
            self.in_flight.append((plan, self.worker.execute(plan)))
        plan, result = self.in_flight.popleft()
        self.tokens += plan.num_tokens
        now = time.perf_counter()
        for news in self.core.update(plan, result).values():
            for key in news.keys:
                self.arrived[key].append(now)

    def run(self) -> dict[str, float]:
        """Run the streams alone for a while, then add the prompts and start the measurement."""
        streams = [self.add(16, 4000) for _ in range(self.args.streams)]
        while len(self.arrived[streams[-1]]) < 20:
            self.step()
        began, self.tokens = time.perf_counter(), 0
        asked: dict[int, float] = {}
        while any(not self.arrived[key] for key in asked) or len(asked) < self.args.prompts:
            if sum(not self.arrived[key] for key in asked) < AT_ONCE and len(asked) < self.args.prompts:
                asked[self.add(self.args.prompt_tokens, 4)] = time.perf_counter()
            self.step()
        took = time.perf_counter() - began
        for key in streams:
            self.core.abort("bench", key)
        gaps = [
            1000 * (after - before)
            for key in streams
            for before, after in zip(self.arrived[key], self.arrived[key][1:], strict=False)
            if before >= began
        ]
        firsts = [self.arrived[key][0] - at for key, at in asked.items()]
        return {
            "ITL p50": statistics.median(gaps),
            "ITL p99": quantile(gaps, 0.99),
            "TTFT p50": statistics.median(firsts),
            "tokens": self.tokens / took,
        }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", default="embedded")
    options.add_argument("--streams", type=int, default=8)
    options.add_argument("--prompts", type=int, default=6, help="long prompts in a run")
    options.add_argument("--prompt-tokens", type=int, default=1024)
    options.add_argument("--targets", type=float, nargs="+", default=[0, 200, 100], help="ms; 0 is none")
    options.add_argument("--threads", type=int)
    options.add_argument("--repeats", type=int, default=3)
    args = options.parse_args()
    benches = {target: Bench(args, target) for target in args.targets}
    runs: dict[float, list[dict[str, float]]] = defaultdict(list)
    for _ in range(args.repeats):
        for target, bench in benches.items():
            runs[target].append(bench.run())
    report = Report("interference", UNITS, args.out)
    for target, rows in runs.items():
        medians = {name: statistics.median(row[name] for row in rows) for name in UNITS}
        report.add(f"target {target:g} ms" if target else "no target", medians)


if __name__ == "__main__":
    main()
