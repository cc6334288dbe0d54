"""Compare RayLM's Router with the policies of other projects, on recorded production traces, in `raylm simulate`.

    raylm trace mooncake conversation_trace.jsonl --to traces/mooncake.jsonl
    raylm trace agents trace_*.json --longest 200000 --to traces/agents.jsonl
    raylm trace azure AzureLLMInferenceTrace_code.csv --to traces/azure_code.jsonl
    raylm trace azure AzureLLMInferenceTrace_conv.csv --to traces/azure_chat.jsonl
    raylm trace servegen m-large/*-trace.csv --begin 72000 --seconds 600 --share 0.08 --to traces/servegen.jsonl
    python -m benchmarks.fleet.board traces/*.jsonl --out board.jsonl

A cell is a trace, costs, engines, ingresses, a load, a part of the trace and a policy. Its rows are appended to
``--out`` when it ends, and a later run skips the cells in the file. The speed of a trace is chosen so that it requests
``--loads`` percent of the capacity. The capacity is measured with four engines and RayLM's Router: all requests arrive
at once, those of a session one after the other, and the requests per second are counted between the first 10 % and 80 %
of the ends. Sessions begin faster than recorded, but think as long as recorded. A part has ``--requests`` requests for
each engine. Part 1 is the beginning of the trace, and each next part begins where the last one ends. Only the first 20
turns of an agent's session are used. An ingress knows its own requests at once, and blocks and other ingresses'
requests as they were 0.1 s ago. ``--ablate router`` and ``--ablate queue`` run RayLM alone, and without each term of
the Router or of the fair queue. ``--policies "no risk"`` removes one term.

Costs: ``gpu`` approximates an 8B model on a GPU. ``cpu`` is fitted to the steps of a 0.6B model on two cores in
benchmarks/results/forward.jsonl. A request is good within 2 s to the first token and 100 ms between tokens (gpu), or
30 s and 500 ms (cpu). Fairness is Jain's index of the shares of good requests of all keys with 10 requests or more.
"""

from __future__ import annotations

import gc
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path

from benchmarks.fleet.ablations import ABLATIONS, without
from benchmarks.fleet.policies import POLICIES
from benchmarks.rows import Row, append, parser
from benchmarks.rows import read as read_rows
from raylm.simulate import Fleet, Outcome, Replay, Targets, Trace, TraceLine, figures, read_lines, simulate
from raylm.simulate.report import is_good

BLOCK, BLOCKS, LONGEST = 64, 8000, 200_000
TURNS = 20
OTHERS = [
    "random", "least open", "power of two", "session affinity", "SGLang approximate", "Serve prefix", "SMG", "llm-d",
    "Dynamo linear",
]  # fmt: skip
COSTS = {
    "gpu": {"base_s": 0.006, "token_s": 0.00006, "sequence_s": 0.00006},
    "cpu": {"base_s": 0.0387, "token_s": 0.0029, "sequence_s": 0.0},
}
TERMS = [name for names in ABLATIONS.values() for name in names]
UNITS = {
    "capacity": "requests/s", "speed": "", "mean": "ms", "p99": "ms", "ITL mean": "ms", "ITL p99": "ms", "good": "%",
    "goodput": "requests/s", "hit rate": "%", "fairness": "", "CPU": "s",
}  # fmt: skip
TARGETS = {"gpu": Targets(2000.0, 100.0), "cpu": Targets(30_000.0, 500.0)}


@dataclass(frozen=True)
class Cell:
    """One simulation. ``load`` is in percent of the capacity; 0 measures the capacity. ``size``: requests per engine.

    ``part`` counts from 1.
    """

    trace: str
    costs: str
    engines: int
    ingresses: int
    load: int
    policy: str
    size: int
    part: int = 1

    @property
    def case(self) -> str:
        return (
            f"{self.trace}, {self.costs}, {self.engines} engines, {self.ingresses} ingresses, {self.load} %, "
            f"{self.size} each, part {self.part}, {self.policy}"
        )

    @classmethod
    def of(cls, case: str) -> Cell:
        trace, costs, *numbers, part, policy = case.split(", ", 7)
        engines, ingresses, load, size = (int(number.split()[0]) for number in numbers)
        return cls(trace, costs, engines, ingresses, load, policy, size, int(part.split()[1]))

    def fleet(self) -> Fleet:
        queue = {"max_queued_requests": 1_000_000, "max_queued_tokens": 1_000_000_000_000}
        config = {"cache": {"block_size": BLOCK}, "ingress": queue}
        return Fleet.of(
            {
                "engines": [{"count": self.engines, "num_blocks": BLOCKS}], "ingresses": self.ingresses,
                "staleness_s": 0.1, "costs": COSTS[self.costs], "config": config, "max_model_len": LONGEST,
            },
            "board",
        )  # fmt: skip


@lru_cache(1)
def read(path: Path) -> list[TraceLine]:
    return read_lines([path])


def chosen(lines: list[TraceLine], cell: Cell) -> list[TraceLine]:
    """The requests of the cell's part, with the first turns of sessions only."""
    turns: Counter[str] = Counter()
    found, number = [], cell.size * cell.engines
    for line in sorted(lines, key=lambda line: line.session):  # whole sessions, one after another
        turns[line.session] += 1
        if not line.session or turns[line.session] <= TURNS:
            found.append(line)
        if len(found) == cell.part * number:
            return sorted(found[-number:], key=lambda line: line.arrival)
    raise SystemExit(f"{cell.trace} has {len(found)} requests, and {cell.case} needs {cell.part * number}")


def faster(lines: list[TraceLine], speed: float) -> list[TraceLine]:
    """Requests and sessions arrive faster. The think times within sessions are unchanged."""
    return [line.model_copy(update={"arrival": line.arrival / speed}) for line in lines]


def rate(lines: list[TraceLine]) -> float:
    """Requests per second of the time in which sessions, and requests without a session, begin."""
    begins: dict[str, float] = {}
    for line in lines:
        begins.setdefault(line.session or str(line.arrival), line.arrival)
    return len(lines) / (max(begins.values()) - min(begins.values()))


def run(cell: Cell, lines: list[TraceLine], speed: float) -> Outcome:
    load = Replay(Trace(faster(lines, speed), BLOCK))
    with nullcontext(None) if cell.policy in POLICIES else without(cell.policy) as queue:
        return simulate(cell.fleet(), load, 1, POLICIES.get(cell.policy, POLICIES["RayLM"]), queue)


def capacity(cell: Cell, lines: list[TraceLine]) -> float:
    """Requests per second of one engine, without think times."""
    eager = [line.model_copy(update={"think_s": 0.0}) for line in lines]
    ends = sorted(one.last_s for one in run(cell, eager, 1e9).served)
    first, last = ends[len(ends) // 10], ends[len(ends) * 8 // 10]
    return (len(ends) * 8 // 10 - len(ends) // 10) / (last - first) / cell.engines


def measured(outcome: Outcome, costs: str) -> dict[str, float]:
    found, targets = figures(outcome, TARGETS[costs]), TARGETS[costs]
    keys = defaultdict(list)
    for one in outcome.served:
        keys[one.key].append(is_good(one, targets))
    shares = [sum(good) / len(good) for good in keys.values() if len(good) >= 10]
    squares = sum(share**2 for share in shares)
    return {
        "mean": found["ttft_ms"]["mean"],
        "p99": found["ttft_ms"]["p99"],
        "ITL mean": found["itl_ms"]["mean"],
        "ITL p99": found["itl_ms"]["p99"],
        "good": 100 * found["good_share"],
        "goodput": found["goodput_per_s"],
        "hit rate": 100 * found["hit_rate"],
        "fairness": sum(shares) ** 2 / len(shares) / squares if squares else 1.0,
    }


class Board:
    """The rows of a file, and the cells that it lacks."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._figures = kept(read_rows(out)) if out.exists() else {}

    def fill(self, cells: list[Cell], paths: dict[str, Path]) -> Iterator[tuple[Cell, dict[str, float]]]:
        """The figures of all cells. Cells that are missing are simulated."""
        for cell in cells:
            whole = read(paths[cell.trace])
            full = Cell(cell.trace, cell.costs, 4, 1, 0, "RayLM", cell.size, cell.part)
            if full not in self._figures:
                self._add(full, {"capacity": capacity(full, chosen(whole, full))})
            if cell not in self._figures:
                lines, begun = chosen(whole, cell), time.process_time()
                speed = cell.load / 100 * cell.engines * self._figures[full]["capacity"] / rate(lines)
                found = measured(run(cell, lines, speed), cell.costs)
                self._add(cell, {"speed": speed} | found | {"CPU": time.process_time() - begun})
            yield cell, self._figures[cell]

    def _add(self, cell: Cell, figures: dict[str, float]) -> None:
        append(self._out, "board", cell.case, figures, UNITS)
        self._figures[cell] = figures


def kept(rows: Sequence[Row]) -> dict[Cell, dict[str, float]]:
    """The figures of each cell in rows. A cell whose last row is missing was interrupted, and is left out."""
    found: dict[Cell, dict[str, float]] = {}
    for row in rows:
        found.setdefault(Cell.of(row.case), {})[row.metric] = row.value
    return {cell: figures for cell, figures in found.items() if figures.keys() & {"CPU", "capacity"}}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("traces", type=Path, nargs="+", metavar="TRACE.jsonl")
    options.add_argument("--costs", nargs="+", choices=list(COSTS), default=list(COSTS))
    options.add_argument("--engines", type=int, nargs="+", default=[4, 16, 64])
    options.add_argument("--ingresses", type=int, nargs="+", default=[1, 4])
    options.add_argument("--loads", type=int, nargs="+", default=[50, 80, 95])
    options.add_argument("--policies", nargs="+", choices=[*POLICIES, *TERMS], default=["RayLM", *OTHERS])
    options.add_argument("--requests", type=int, default=150, help="for each engine")
    options.add_argument("--parts", type=int, nargs="+", default=[1], help="of each trace; 1 is its beginning")
    options.add_argument("--ablate", choices=list(ABLATIONS))
    args = options.parse_args()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 5, 1_000_000)  # requests leave no reference cycles
    board = Board(args.out or Path("board.jsonl"))
    policies = ["RayLM", *ABLATIONS[args.ablate]] if args.ablate else args.policies
    paths = {path.stem: path for path in args.traces}
    cells = [
        Cell(trace, costs, engines, ingresses, load, policy, args.requests, part)
        for engines, costs, trace, part, ingresses, load, policy in product(
            args.engines, args.costs, paths, args.parts, args.ingresses, args.loads, policies
        )
    ]
    for cell, row in board.fill(cells, paths):
        print(
            f"{cell.case:80} mean {row['mean']:9,.0f}  p99 {row['p99']:9,.0f} ms  ITL {row['ITL mean']:6.1f}  "
            f"p99 {row['ITL p99']:6.0f} ms  good {row['good']:5.1f} %  hit {row['hit rate']:5.1f} %  "
            f"fair {row['fairness']:.3f}  {row['CPU']:.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
