"""RayLM's Router beside other policies, in `raylm simulate`: TTFT of five loads.

    python -m benchmarks.fleet.routing --loads hot poisson sessions agents bursts --ingresses 2 --stale 0.1

A step takes 6 ms, 0.06 ms for each token and for each sequence in it; a prefix cache holds 4,000 blocks of 64 tokens.
An ingress knows its own requests at once, and blocks and the requests of others as they were ``--stale`` seconds ago.
Orderings count, not milliseconds. ``--slow 3`` makes the first engine three times as slow.
"""

from __future__ import annotations

import argparse

import numpy as np

from benchmarks.fleet.policies import POLICIES
from benchmarks.rows import Report, parser
from raylm.simulate import LOADS, Fleet, LoadSettings, simulate, ttft_ms

BLOCK, BLOCKS = 64, 4000


def fleet(args: argparse.Namespace) -> Fleet:
    """As many equal engines as asked for, the first one slower if that is asked for."""
    groups = [
        {"count": 1, "slowness": args.slow, "num_blocks": BLOCKS},
        {"count": args.engines - 1, "num_blocks": BLOCKS},
    ]
    config = {"cache": {"block_size": BLOCK}}
    return Fleet.of(
        {"engines": groups, "ingresses": args.ingresses, "staleness_s": args.stale, "config": config}, "options"
    )


def measure(policy: str, kind: str, args: argparse.Namespace, seed: int) -> list[float]:
    """Mean, p50 and p99 of TTFT, in ms, and the hit rate in percent."""
    load = LOADS[kind](LoadSettings(requests=args.requests, rate=args.rate, seed=seed + 7))
    done = simulate(fleet(args), load, seed, POLICIES[policy]).served
    times = ttft_ms(done)
    cached = sum(one.cached_tokens for one in done) / sum(len(one.request.prompt) for one in done)
    return [times.mean(), np.quantile(times, 0.5), np.quantile(times, 0.99), 100 * cached]


def main() -> None:
    options = parser(__doc__)
    kinds = ["hot", "poisson", "sessions", "agents", "bursts"]
    options.add_argument("--loads", nargs="+", choices=list(LOADS), default=kinds)
    options.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    options.add_argument("--engines", type=int, default=8)
    options.add_argument("--ingresses", type=int, default=2)
    options.add_argument("--stale", type=float, default=0.1, help="age of what an ingress knows of others, in s")
    options.add_argument("--slow", type=float, default=1.0, help="how much slower the first engine is")
    options.add_argument("--requests", type=int, default=4000)
    options.add_argument("--rate", type=float, default=24.0, help="requests a second")
    options.add_argument("--seeds", type=int, default=1)
    args = options.parse_args()
    report = Report("routing", {"mean": "ms", "p50": "ms", "p99": "ms", "hit rate": "%"}, args.out)
    for kind in args.loads:
        for policy in args.policies:
            runs = [measure(policy, kind, args, seed) for seed in range(1, args.seeds + 1)]
            mean, p50, p99, hit = np.mean(runs, axis=0).tolist()
            case = f"{kind}, {policy}, {args.ingresses} ingresses, {args.stale:g} s"
            report.add(case, {"mean": mean, "p50": p50, "p99": p99, "hit rate": hit}, "")


if __name__ == "__main__":
    main()
