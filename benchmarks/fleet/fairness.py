"""The cost and the effect of fair sharing between keys, in `raylm simulate`.

    python -m benchmarks.fleet.fairness --seeds 3

- work: one overloaded engine and 8 keys with a few prefixes each. Prints tokens per second and hit rate of the fair
  queue, of first come, first served, and of the longest cached prefix first.
- beside a flooder: TTFT of a key that asks for a seventh of an engine's capacity, beside a key that asks for more than
  the whole capacity; and TTFT on a separate engine of half the speed, which is the key's share. Tokens/s are of both
  keys.
- shares: the share of each of two keys on each of four engines, and on all engines, while both keys have requests
  waiting. One key sends short prompts with long answers, the other long prompts with short answers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np

from benchmarks.rows import Report, parser
from raylm.engine import Forecast, Sequence, WaitingQueue
from raylm.simulate import Fleet, Replay, simulate, ttft_ms
from raylm.simulate.ingress import Served
from raylm.simulate.trace import SimulatedRequest

BLOCK = 16
PROMPT_WEIGHT, DRAWN_WEIGHT = 1, 2  # the fair queue's charges


class LongestPrefixFirst(WaitingQueue):
    """Starts the waiting request with the longest cached prefix, and among equal requests the oldest."""

    def __init__(self, forecast: Forecast) -> None:
        super().__init__()
        self._forecast = forecast

    def candidates(self) -> Iterator[Sequence]:
        yield max(iter(self), key=self._forecast.cached_blocks)


def fleet(policy: str = "fair", engines: int = 1, slowness: float = 1.0, steps: int = 2) -> Fleet:
    group = {"count": engines, "slowness": slowness, "num_blocks": 8000}
    queue = {"max_queued_requests": 1_000_000, "max_queued_tokens": 1_000_000_000}
    config = {"scheduler": {"policy": policy, "steps_in_flight": steps}, "ingress": queue}
    return Fleet.of({"engines": [group], "config": config}, "benchmark")


def asked(
    rng: random.Random, at: float, key: str, prompt: tuple[int, int], output: tuple[int, int], prefix: int = 0
) -> SimulatedRequest:
    """A request with ``prompt`` own tokens, after 1,024 tokens of ``prefix`` number, if it is not 0."""
    shared = [prefix] * 1024 if prefix else []
    tokens = shared + [1 + rng.getrandbits(30)] * rng.randint(*prompt)
    return SimulatedRequest(at, tokens, [tokens[-1]], rng.randint(*output), key)


def work(seed: int, requests: int) -> dict[str, dict[str, float]]:
    found = {}
    runs: dict[str, tuple[str, Callable[[Forecast], WaitingQueue] | None]] = {
        "fair": ("fair", None),
        "fcfs": ("fcfs", None),
        "longest prefix first": ("fcfs", LongestPrefixFirst),
    }
    for name, (policy, queue) in runs.items():
        rng = random.Random(seed)
        load = [
            asked(rng, 0.02 * n, f"key-{n % 8}", (64, 512), (32, 256), prefix=1 + n % 8 + 8 * rng.randrange(16))
            for n in range(requests)
        ]
        outcome = simulate(fleet(policy), Replay(load), seed, queue=queue)
        tokens = sum(one.prompt_tokens + one.output_tokens for one in outcome.served)
        hits = sum(one.cached_tokens for one in outcome.served) / sum(one.prompt_tokens for one in outcome.served)
        found[name] = {"tokens": tokens / outcome.end_s, "hit rate": 100 * hits}
    return found


def beside(seed: int, requests: int) -> dict[str, dict[str, float]]:
    def quiet(rng: random.Random) -> list[SimulatedRequest]:
        at, load = 5.0, []
        for _ in range(requests):
            at += rng.expovariate(4.0)
            load.append(asked(rng, at, "quiet", (64, 512), (32, 128)))
        return load

    found = {}
    cases = {
        "its share alone": (False, 2.0, "fair", 2),
        "beside a flooder": (True, 1.0, "fair", 2),
        "its share alone, one step in flight": (False, 2.0, "fair", 1),
        "beside a flooder, one step in flight": (True, 1.0, "fair", 1),
        "beside a flooder, fcfs": (True, 1.0, "fcfs", 2),
    }
    for name, (floods, slowness, policy, steps) in cases.items():
        rng = random.Random(seed)
        load = quiet(rng)
        if floods:
            span = load[-1].at + 10
            load += [asked(rng, 0.01 * n, "flood", (64, 512), (32, 128)) for n in range(int(30 * span))]
        load.sort(key=lambda one: one.at)
        outcome = simulate(fleet(policy, slowness=slowness, steps=steps), Replay(load), seed)
        times = ttft_ms([one for one in outcome.served if one.key == "quiet"])
        found[name] = {"mean": float(times.mean()), "p99": float(np.quantile(times, 0.99))}
        if floods:
            found[name]["tokens"] = sum(one.prompt_tokens + one.output_tokens for one in outcome.served) / outcome.end_s
    return found


def shares(seed: int, requests: int) -> dict[str, dict[str, float]]:
    """Percent of the charged service while both keys have requests waiting at an engine."""
    rng, requests = random.Random(seed), 3 * requests  # so that all four engines have waiting requests for a while
    load = [asked(rng, 0.002 * n, "drawing", (32, 128), (128, 384)) for n in range(requests)]
    load += [asked(rng, 0.002 * n, "reading", (1024, 3072), (8, 32)) for n in range(requests)]
    load.sort(key=lambda one: one.at)
    outcome = simulate(fleet(engines=4), Replay(load), seed)
    engines: dict[str, list[Served]] = {}
    for one in outcome.served:
        engines.setdefault(one.engine, []).append(one)
    ends = {name: _both_wait_until(of) for name, of in engines.items()}
    found = {name: _share(of, 0.002 * requests, ends[name]) for name, of in sorted(engines.items())}
    found["four engines"] = _share(outcome.served, 0.002 * requests, min(ends.values()))
    return {name: {"share": share} for name, share in found.items()}


def _both_wait_until(served: list[Served]) -> float:
    return min(max((one.first_s for one in served if one.key == key), default=0.0) for key in ("drawing", "reading"))


def _share(served: list[Served], begin: float, end: float) -> float:
    """The percentage of one key in the charged service."""
    drawing, reading = (
        sum(charged(one, begin, end) for one in served if one.key == key) for key in ("drawing", "reading")
    )
    return 100 * drawing / (drawing + reading)


def charged(one: Served, begin: float, end: float) -> float:
    """The charge for the part of a request between ``begin`` and ``end``, as if its tokens came at equal intervals."""
    prompt = one.prompt_tokens - one.cached_tokens if begin <= one.first_s <= end else 0
    within = max(0.0, min(end, one.last_s) - max(begin, one.first_s)) / max(1e-9, one.last_s - one.first_s)
    return PROMPT_WEIGHT * prompt + DRAWN_WEIGHT * one.output_tokens * within


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--first-seed", type=int, default=1)
    options.add_argument("--requests", type=int, default=1500)
    args = options.parse_args()
    units = {"tokens": "tokens/s", "hit rate": "%", "mean": "ms", "p99": "ms", "share": "%"}
    report = Report("fairness", units, args.out)
    for measure in (work, beside, shares):
        runs = [measure(args.first_seed + number, args.requests) for number in range(args.seeds)]
        for name, first in runs[0].items():
            report.add(name, {metric: float(np.mean([one[name][metric] for one in runs])) for metric in first})


if __name__ == "__main__":
    main()
