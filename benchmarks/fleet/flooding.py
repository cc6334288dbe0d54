"""Clients beside a key that floods, on a recorded trace with keys, in `raylm simulate`.

    python -m benchmarks.fleet.flooding servegen.jsonl

Four engines have the costs of an 8B model on a GPU, with four ingresses, as on the board. The first parts of the trace
request ``--load`` percent of the capacity. A further key sends requests like those of the trace, at twice the capacity,
all the time. TTFT is over all keys except that one and the trace's largest. Rows: without the flood, with it, and with
it and without one term of the fair queue, for engines of ``--places`` sequences.
"""

from __future__ import annotations

import random
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean

import numpy as np

from benchmarks.fleet.ablations import ABLATIONS, without
from benchmarks.fleet.board import BLOCK, Cell, capacity, chosen, faster, rate, read
from benchmarks.rows import Report, parser
from raylm.simulate import Fleet, Replay, Trace, TraceLine, simulate, ttft_ms

FLOOD = "flood"
SEED = 7


def flooded(lines: list[TraceLine], per_s: float) -> list[TraceLine]:
    """The lines plus the requests of a further key at the given rate. Their lengths are drawn from the lines."""
    rng, at, more = random.Random(SEED), lines[0].arrival, []
    while at < lines[-1].arrival:
        at += rng.expovariate(per_s)
        more.append(rng.choice(lines).model_copy(update={"arrival": at, "key": FLOOD, "session": "", "blocks": ()}))
    return sorted([*lines, *more], key=lambda line: line.arrival)


def with_places(fleet: Fleet, places: int) -> Fleet:
    scheduler = fleet.config.scheduler.model_copy(update={"max_num_seqs": places})
    return fleet.model_copy(update={"config": fleet.config.model_copy(update={"scheduler": scheduler})})


def times(fleet: Fleet, lines: list[TraceLine], term: str, of: set[str]) -> dict[str, float]:
    with without(term) if term else nullcontext(None) as queue:
        outcome = simulate(fleet, Replay(Trace(lines, BLOCK)), queue=queue)
    found = ttft_ms([one for one in outcome.served if one.key in of])
    return {"mean": float(found.mean()), "p50": float(np.quantile(found, 0.5)), "p99": float(np.quantile(found, 0.99))}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("trace", type=Path, metavar="TRACE.jsonl")
    options.add_argument("--load", type=int, default=50)
    options.add_argument("--places", type=int, nargs="+", default=[64, 8])
    options.add_argument("--parts", type=int, nargs="+", default=[1, 2, 3])
    args = options.parse_args()
    report = Report("flooding", dict.fromkeys(("mean", "p50", "p99"), "ms"), args.out)
    for places in args.places:
        found: dict[str, list[dict[str, float]]] = {}
        for part in args.parts:
            cell = Cell(args.trace.stem, "gpu", 4, 4, args.load, "RayLM", 150, part)
            lines = chosen(read(args.trace), cell)
            most = 4 * capacity(Cell(cell.trace, "gpu", 4, 1, 0, "RayLM", 150, part), lines)
            calm = faster(lines, args.load / 100 * most / rate(lines))
            keys = Counter(line.key for line in calm)
            small, fleet = set(keys) - {keys.most_common(1)[0][0]}, with_places(cell.fleet(), places)
            flood = flooded(calm, 2 * most)
            found.setdefault("no flood", []).append(times(fleet, calm, "", small))
            for term in ("", *ABLATIONS["queue"]):
                found.setdefault(f"flood, {term}" if term else "flood", []).append(times(fleet, flood, term, small))
        for name, runs in found.items():
            report.add(f"{places} places, {name}", {metric: fmean(run[metric] for run in runs) for metric in runs[0]})


if __name__ == "__main__":
    main()
