"""The report of the comparison: paired ratios and their spread, marks, tables, the JSON line and a plot."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.plot import picture

OURS = "raylm"
OWN_OFFLINE = "RayLM offline"  # the baseline for serving, beside the peers
QUIET_CORES = 0.4
MARK = "*"
WORKER_PARTS = ("linear", "attention", "elementwise", "forward", "sampling", "rest of the step", "idle")
CORE_PARTS = ("scheduler", "messages", "waiting")


_SHOWN = {OURS: "RayLM", "vllm": "vLLM"}
_FIGURES = {  # metric and unit of a row
    "out_tok_s": ("output", "tok/s"), "ttft_p50_ms": ("TTFT p50", "ms"), "itl_p50_ms": ("ITL p50", "ms"),
    "ttft_ms": ("TTFT", "ms"), "ms_per_token": ("ms a token", "ms"), "others_cores": ("other processes", "cores"),
}  # fmt: skip


def shown(engine: str) -> str:
    """The name of an engine in rows and pictures."""
    return _SHOWN.get(engine, engine)


def named(figures: Mapping[str, float]) -> tuple[dict[str, float], dict[str, str]]:
    """The figures of a sample under the names used in rows, and their units."""
    values = {_FIGURES[name][0]: value for name, value in figures.items()}
    return values, {_FIGURES[name][0]: _FIGURES[name][1] for name in figures}


@dataclass(frozen=True)
class Sample:
    """One measurement of ``engine`` in round ``repeat`` of its pairing with ``peer`` (its own name if alone).

    ``others`` are the cores used by other processes during the measurement. ``bounds`` are the machine's limits,
    measured just before.
    """

    workload: str
    engine: str
    peer: str
    repeat: int
    figures: Mapping[str, float]
    others: float
    bounds: Mapping[str, float] = field(default_factory=dict)

    @property
    def disturbed(self) -> bool:
        """Whether other processes used the machine."""
        return self.others > QUIET_CORES

    def line(self) -> str:
        """A line of progress."""
        figures = ", ".join(f"{name} {value:.4g}" for name, value in self.figures.items())
        mark = f"  {MARK} others used {self.others:.1f} cores" if self.disturbed else ""
        return f"{self.workload:4} {self.engine:20} {figures}{mark}"


@dataclass(frozen=True)
class Row:
    """One figure of one workload, for RayLM and one peer. ``theirs`` and ``ratios`` are empty without a peer.

    ``ratios`` are RayLM's values divided by the peer's, by round. ``shares`` are RayLM's shares of the machine's limit.
    """

    workload: str
    figure: str
    peer: str
    ours: Sequence[float]
    theirs: Sequence[float]
    ratios: Sequence[float]
    disturbed: bool
    shares: Sequence[float] = ()

    @property
    def more_is_better(self) -> bool:
        return is_rate(self.figure)

    @property
    def medians(self) -> dict[str, float]:
        """The medians of both sides and of the ratios, as far as they were measured."""
        sides = {"RayLM": self.ours, "peer": self.theirs, "ratio": self.ratios, "of the limit": self.shares}
        return {name: statistics.median(values) for name, values in sides.items() if values}

    @property
    def key(self) -> str:
        return f"{self.workload} {self.figure}"


def rows(samples: Iterable[Sample]) -> list[Row]:
    """Every figure of every pairing, in the order of the first measurements."""
    grouped: dict[tuple[str, str, str], list[tuple[Sample, float]]] = {}
    for sample in samples:
        for figure, value in sample.figures.items():
            grouped.setdefault((sample.workload, figure, sample.peer), []).append((sample, value))
    return [_row(*name, entries) for name, entries in grouped.items()]


def _row(workload: str, figure: str, peer: str, entries: list[tuple[Sample, float]]) -> Row:
    ours = {sample.repeat: value for sample, value in entries if sample.engine == OURS}
    theirs = {sample.repeat: value for sample, value in entries if sample.engine != OURS}
    mine = ((sample.bounds.get(figure), value) for sample, value in entries if sample.engine == OURS)
    return Row(
        workload=workload,
        figure=figure,
        peer=peer,
        ours=list(ours.values()),
        theirs=list(theirs.values()),
        ratios=[ours[repeat] / theirs[repeat] for repeat in ours if theirs.get(repeat)],
        disturbed=any(sample.disturbed for sample, _ in entries),
        shares=[share_of_limit(value, bound, is_rate(figure)) for bound, value in mine if bound],
    )


def is_rate(figure: str) -> bool:
    """Whether the figure is a rate (higher is better). Otherwise it is a time (lower is better)."""
    return "tok_s" in figure


def best_ratio(found: Iterable[Row]) -> dict[str, tuple[str, float]]:
    """By figure: the peer with the best result, and RayLM's ratio to it."""
    best: dict[str, tuple[str, float]] = {}
    for row in found:
        if not row.ratios or row.peer == OWN_OFFLINE:
            continue
        ratio = statistics.median(row.ratios)
        known = best.get(row.key)
        if known is None or (ratio < known[1] if row.more_is_better else ratio > known[1]):
            best[row.key] = (row.peer, ratio)
    return best


def share_of_limit(value: float, bound: float, more_is_better: bool) -> float:
    """The share of the bound that ``value`` reaches; 1 means the bound itself."""
    return value / bound if more_is_better else bound / value


def table(found: Sequence[Row]) -> list[str]:
    """Lines of a Markdown table. The spread of a ratio is its lowest and highest round."""
    lines = [
        "| load | figure | peer | RayLM | peer's | RayLM / peer (low to high) | RayLM's share of the limit |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found:
        ours, theirs = row.medians.get("RayLM"), row.medians.get("peer")
        share = f"{row.medians['of the limit']:.0%}" if row.shares else ""
        peer = "(alone)" if row.peer == OURS else row.peer
        cells = [row.workload, row.figure, peer, number(ours), number(theirs), spread(row), share]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def number(value: float | None) -> str:
    """Four significant digits, or a dash."""
    return "-" if value is None else f"{value:.4g}"


def spread(row: Row) -> str:
    """The median ratio with the lowest and highest, and a mark if the machine was busy."""
    mark = f" {MARK}" if row.disturbed else ""
    if not row.ratios:
        return f"-{mark}"
    return f"{statistics.median(row.ratios):.2f} ({min(row.ratios):.2f} to {max(row.ratios):.2f}){mark}"


def summary(found: Sequence[Row], missing: Mapping[str, str], steps: Sequence[StepTimes]) -> dict[str, Any]:
    """The JSON line: ratios of the rounds' medians by figure and peer, with context."""
    ratios: dict[str, dict[str, float]] = {}
    for row in found:
        if row.ratios:
            ratios.setdefault(row.key, {})[row.peer] = round(statistics.median(row.ratios), 3)
    return {
        "ratios": ratios,
        "best_peer": {key: [peer, round(ratio, 3)] for key, (peer, ratio) in best_ratio(found).items()},
        "raylm": {row.key: round(statistics.median(row.ours), 2) for row in found if row.ours},
        "disturbed": sorted(
            {f"{row.key} {row.peer}" for row in found if row.disturbed}
            | {f"step at {step.batch}" for step in steps if step.others > QUIET_CORES}
        ),
        "missing": dict(missing),
        "idle_share": {str(step.batch): round(step.idle_share, 4) for step in steps},
    }


def with_own_rate(samples: Sequence[Sample]) -> list[Sample]:
    """Add our server's samples of the first pairing again, for comparison with RayLM's offline rate."""
    served = [sample for sample in samples if sample.workload == "HTTP" and sample.engine == OURS]
    first = [sample for sample in served if sample.peer == served[0].peer]
    rates = [{name: value for name, value in sample.figures.items() if "tok_s" in name} for sample in first]
    again = [replace(sample, peer=OWN_OFFLINE, figures=rate) for sample, rate in zip(first, rates, strict=True)]
    return [*samples, *again]


# ---------------------------------------------------------------- where a step's time goes


@dataclass(frozen=True)
class StepTimes:
    """Seconds of an average step at one batch size: wall time, and parts by name (``WORKER_PARTS``, ``CORE_PARTS``).

    The worker's parts add up to the wall time, and so do the EngineCore's, because they run in parallel.
    """

    batch: int
    wall: float
    worker: Mapping[str, float] = field(default_factory=dict)
    core: Mapping[str, float] = field(default_factory=dict)
    others: float = 0.0

    @property
    def idle_share(self) -> float:
        """Share of the wall time in which the worker was idle."""
        return self.worker.get("idle", 0.0) / self.wall


def step_times(batch: int, measured: Mapping[str, float], profile: Mapping[str, float] | None = None) -> StepTimes:
    """Divide the wall time of a step into parts, from the measured average seconds per step.

    Args:
        measured: ``wall``, the worker's ``step`` and the ``forward`` part of it; the core's ``scheduler`` and
            ``messages``; ``others``, the cores used by other processes.
        profile: The model's measurement of its forward pass (``linear``, ``attention``, ``elementwise``) and
            ``sampling``. Without it the forward pass is one part, and the rest of the step is sampling.
    """
    wall, step, forward = measured["wall"], measured["step"], measured["forward"]
    parts = {name: seconds for name, seconds in (profile or {}).items() if name in WORKER_PARTS}
    inside = sum(seconds for name, seconds in parts.items() if name != "sampling")
    sampling = parts.pop("sampling", step - forward)
    worker = parts | {
        "forward": max(0.0, forward - inside),
        "sampling": sampling,
        "rest of the step": max(0.0, step - forward - sampling),
        "idle": max(0.0, wall - step),
    }
    busy = {"scheduler": measured["scheduler"], "messages": measured["messages"]}
    core = busy | {"waiting": max(0.0, wall - sum(busy.values()))}
    return StepTimes(batch, wall, worker, core, measured.get("others", 0.0))


def _parts(steps: Sequence[StepTimes]) -> Iterator[tuple[str, str, list[float]]]:
    """(actor, part, seconds at each batch size) of every part."""
    for actor, names in (("worker", WORKER_PARTS), ("core", CORE_PARTS)):
        for name in names:
            seconds = [getattr(step, actor).get(name, 0.0) for step in steps]
            if any(seconds):
                yield actor, name, seconds


def step_table(steps: Sequence[StepTimes]) -> list[str]:
    """Milliseconds and shares of an average decode step, as a Markdown table with a column for each batch size."""
    lines = [
        f"| actor | part | {' | '.join(f'batch {step.batch}, ms (%)' for step in steps)} |",
        "|---|---|" + "---|" * len(steps),
    ]
    for actor, name, seconds in _parts(steps):
        cells = [f"{1e3 * value:.2f} ({value / step.wall:.1%})" for value, step in zip(seconds, steps, strict=True)]
        lines.append(f"| {actor} | {name} | {' | '.join(cells)} |")
    return [*lines, f"| both | step | {' | '.join(map(_wall, steps))} |"]


def _wall(step: StepTimes) -> str:
    return f"{1e3 * step.wall:.2f}" + (f" {MARK}" if step.others > QUIET_CORES else "")


def plot(path: Path, title: str, steps: Sequence[StepTimes], found: Sequence[Row]) -> None:
    """Two panels: the parts of a step, two bars for each batch size; and the ratio to each peer (1 is equal)."""
    compared = [row for row in found if row.ratios]
    with picture(path, 2, (14, max(5.5, 0.22 * len(compared))), title) as (left, right):
        _plot_steps(left, steps)
        _plot_ratios(right, compared)


def _plot_steps(axis: Any, steps: Sequence[StepTimes]) -> None:
    if not steps:
        axis.set_axis_off()
        return
    places = {"worker": -0.2, "core": 0.2}
    bottoms = {actor: [0.0] * len(steps) for actor in places}
    for number_, (actor, name, seconds) in enumerate(_parts(steps)):
        shares = [100 * value / step.wall for value, step in zip(seconds, steps, strict=True)]
        at = [place + places[actor] for place in range(len(steps))]
        grey = name in ("idle", "waiting")
        color = "#dddddd" if grey else f"C{number_}"
        axis.bar(at, shares, 0.36, bottom=bottoms[actor], label=f"{actor}: {name}", color=color, edgecolor="white")
        bottoms[actor] = [low + share for low, share in zip(bottoms[actor], shares, strict=True)]
    labels = [f"batch {step.batch}\n{1e3 * step.wall:.1f} ms" for step in steps]
    axis.set_xticks(range(len(steps)), labels)
    axis.set(ylabel="% of a decode step", title="left: worker, right: EngineCore", ylim=(0, 100))
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)


def _plot_ratios(axis: Any, found: Sequence[Row]) -> None:
    if not found:
        axis.set_axis_off()
        return
    keys, peers = list(dict.fromkeys(row.key for row in found)), list(dict.fromkeys(row.peer for row in found))
    height = 0.8 / len(peers)
    for place, peer in enumerate(peers):
        mine = [row for row in found if row.peer == peer]
        middles = [_gain(row, statistics.median(row.ratios)) for row in mine]
        ends = [sorted((_gain(row, min(row.ratios)), _gain(row, max(row.ratios)))) for row in mine]
        errors = [
            [middle - low for middle, (low, _) in zip(middles, ends, strict=True)],
            [high - middle for middle, (_, high) in zip(middles, ends, strict=True)],
        ]
        at = [keys.index(row.key) + (place - (len(peers) - 1) / 2) * height for row in mine]
        axis.barh(at, middles, height, xerr=errors, label=peer, error_kw={"elinewidth": 0.8})
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.set_yticks(range(len(keys)), keys, fontsize=8)
    axis.invert_yaxis()
    axis.set(xlabel="times as good as the peer", title="RayLM beside its peers")
    axis.legend(fontsize=8)


def _gain(row: Row, ratio: float) -> float:
    """The ratio in the form in which higher is better."""
    return ratio if row.more_is_better else 1 / ratio
