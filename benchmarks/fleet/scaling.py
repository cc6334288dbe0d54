"""Autoscaling of engines by the load of a recorded trace, in `raylm simulate`.

    raylm trace azure AzureLLMInferenceTrace_code.csv --to azure_code.jsonl
    python -m benchmarks.fleet.scaling azure_code.jsonl azure_chat.jsonl --seconds 1200

The load is the first ``--seconds`` of each trace, slower or faster by ``--speed``. There are two ingresses and 1 to 8
engines with the costs of an 8B model on a GPU. An engine is ready 10, 60 or 300 s after the decision to start it, and a
surplus engine ends after 300 s. The policies are RayLM's, by the queue and the places, with a target of 2 s; Serve's,
by the requests of an engine, with ``--ongoing`` as the target; and fixed numbers of engines. ``engines`` is the mean
number of engines, including starting ones. A request is good within 2 s to the first token and 100 ms between tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

from benchmarks.rows import Report, parser
from raylm.engine import EngineLoad, ScalingTargets, wanted_engines
from raylm.simulate import Fleet, Replay, Targets, Trace, figures, read_lines, simulate

BLOCK = 64
UNITS = {"mean": "ms", "p99": "ms", "good": "%", "engines": "", "refused": ""}


def by_requests(ongoing: int, loads: Sequence[EngineLoad], there: int, targets: ScalingTargets) -> int:
    """Serve's default policy: each engine has ``ongoing`` requests."""
    if not loads:
        return there
    return max(targets.min, min(ceil(sum(load.sequences for load in loads) / ongoing), targets.max))


def fleet(start_s: float | None, count: int) -> Fleet:
    group: dict[str, Any] = {"count": count, "num_blocks": 8000}
    if start_s is not None:
        group |= {"replicas": {"min": 1, "max": 8, "target_ttft_s": 2.0}, "start_s": start_s}
    costs = {"base_s": 0.006, "token_s": 0.00006, "sequence_s": 0.00006}
    queue = {"max_queued_requests": 1_000_000, "max_queued_tokens": 1_000_000_000_000}
    config = {"cache": {"block_size": BLOCK}, "ingress": queue}
    given = {"engines": [group], "ingresses": 2, "staleness_s": 0.1, "costs": costs, "config": config}
    return Fleet.of(given | {"max_model_len": 200_000}, "scaling")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("traces", type=Path, nargs="+", metavar="TRACE.jsonl")
    options.add_argument("--seconds", type=float, default=1200.0)
    options.add_argument("--speed", type=float, default=1.0)
    options.add_argument("--starts", type=float, nargs="+", default=[10.0, 60.0, 300.0])
    options.add_argument("--fixed", type=int, nargs="+", default=[2, 4])
    options.add_argument("--ongoing", type=int, nargs="*", default=[16, 32])
    args = options.parse_args()
    report = Report("scaling", UNITS, args.out)
    policies = {"RayLM": wanted_engines} | {
        f"{number} requests": partial(by_requests, number) for number in args.ongoing
    }
    for path in args.traces:
        chosen = [line for line in read_lines([path]) if line.arrival < args.seconds * args.speed]
        lines = [line.model_copy(update={"arrival": line.arrival / args.speed}) for line in chosen]
        cases = [(f"{number} engines", None, number, wanted_engines) for number in args.fixed]
        cases += [
            (f"{name}, {start:.0f} s", start, 1, policy) for start in args.starts for name, policy in policies.items()
        ]
        for name, start_s, count, policy in cases:
            outcome = simulate(fleet(start_s, count), Replay(Trace(lines, BLOCK)), scaling=policy)
            found = figures(outcome, Targets(2000.0, 100.0))
            report.add(
                f"{path.stem}, {name}",
                {
                    "mean": found["ttft_ms"]["mean"],
                    "p99": found["ttft_ms"]["p99"],
                    "good": 100 * found["good_share"],
                    "engines": found["engine_s"] / outcome.end_s,
                    "refused": sum(found["errors"].values()),
                },
            )


if __name__ == "__main__":
    main()
