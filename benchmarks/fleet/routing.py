"""RayLM's Router and other policies, in `raylm simulate`: TTFT of five loads.

    python -m benchmarks.fleet.routing --ingresses 1 2 4 --stale 0.02 2 --seeds 3 --first-seed 1001

A step takes 6 ms, and 0.06 ms more for each token and each sequence. A prefix cache holds 4,000 blocks of 64 tokens. An
ingress knows its own requests at once, and blocks and other ingresses' requests as they were ``--stale`` seconds ago.
The order of policies counts, not the milliseconds. ``--slow 3`` makes the first engine three times as slow. At the end
comes a table of RayLM's figures relative to the best policy, and to RayLM with one ingress and the freshest reports.
"""

from __future__ import annotations

import argparse
from itertools import product

import numpy as np

from benchmarks.fleet.policies import POLICIES
from benchmarks.rows import Report, parser
from raylm.simulate import LOADS, Fleet, LoadSettings, simulate, ttft_ms

BLOCK, BLOCKS = 64, 4000
Case = tuple[str, int, float]
"""Load, number of ingresses, age of the known state."""


def fleet(args: argparse.Namespace, ingresses: int, stale: float) -> Fleet:
    """The number of equal engines in the options. With ``--slow`` the first engine is slower."""
    groups = [
        {"count": 1, "slowness": args.slow, "num_blocks": BLOCKS},
        {"count": args.engines - 1, "num_blocks": BLOCKS},
    ]
    config = {"cache": {"block_size": BLOCK}}
    return Fleet.of({"engines": groups, "ingresses": ingresses, "staleness_s": stale, "config": config}, "options")


def measure(policy: str, case: Case, args: argparse.Namespace, seed: int) -> list[float]:
    """Mean, p50 and p99 of TTFT, in ms, and the hit rate in percent."""
    kind, ingresses, stale = case
    load = LOADS[kind](LoadSettings(requests=args.requests, rate=args.rate, seed=seed + 7))
    done = simulate(fleet(args, ingresses, stale), load, seed, POLICIES[policy]).served
    times = ttft_ms(done)
    cached = sum(one.cached_tokens for one in done) / sum(one.prompt_tokens for one in done)
    return [times.mean(), np.quantile(times, 0.5), np.quantile(times, 0.99), 100 * cached]


def summary(found: dict[tuple[str, Case], list[float]]) -> None:
    """RayLM's mean and p99 divided by the best policy's, and by RayLM's own with one ingress."""
    cases = dict.fromkeys(case for policy, case in found if policy == "RayLM")
    policies = dict.fromkeys(policy for policy, _ in found)
    print(f"{'load, ingresses, stale s':32}{'/best mean':>12}{'/best p99':>12}{'/one mean':>12}{'/one p99':>12}")
    for case in cases:
        kind, ingresses, stale = case
        one = min((other for other in cases if other[0] == kind), key=lambda other: (other[1], other[2]))
        shown = [
            found["RayLM", case][column] / figure
            for figures in (
                [
                    min(found[policy, case][column] for policy in policies if (policy, case) in found)
                    for column in (0, 2)
                ],
                [found["RayLM", one][column] for column in (0, 2)],
            )
            for column, figure in zip((0, 2), figures, strict=True)
        ]
        print(f"{f'{kind}, {ingresses}, {stale:g}':32}" + "".join(f"{ratio:12.2f}" for ratio in shown))


def main() -> None:
    options = parser(__doc__)
    kinds = ["hot", "poisson", "sessions", "agents", "bursts"]
    options.add_argument("--loads", nargs="+", choices=list(LOADS), default=kinds)
    options.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    options.add_argument("--engines", type=int, default=8)
    options.add_argument("--ingresses", type=int, nargs="+", default=[2])
    options.add_argument(
        "--stale", type=float, nargs="+", default=[0.1], help="age of what an ingress knows of others, in s"
    )
    options.add_argument("--slow", type=float, default=1.0, help="how much slower the first engine is")
    options.add_argument("--requests", type=int, default=4000)
    options.add_argument("--rate", type=float, default=24.0, help="requests a second")
    options.add_argument("--seeds", type=int, default=1)
    options.add_argument("--first-seed", type=int, default=1)
    args = options.parse_args()
    report = Report("routing", {"mean": "ms", "p50": "ms", "p99": "ms", "hit rate": "%"}, args.out)
    found: dict[tuple[str, Case], list[float]] = {}
    for case in product(args.loads, args.ingresses, args.stale):
        for policy in args.policies:
            runs = [measure(policy, case, args, args.first_seed + number) for number in range(args.seeds)]
            mean, p50, p99, hit = found[policy, case] = np.mean(runs, axis=0).tolist()
            kind, ingresses, stale = case
            name = f"{kind}, {policy}, {ingresses} ingresses, {stale:g} s"
            report.add(name, {"mean": mean, "p50": p50, "p99": p99, "hit rate": hit}, "")
    if "RayLM" in args.policies:
        summary(found)


if __name__ == "__main__":
    main()
