"""Pictures and a table of the rows of ``python -m benchmarks.fleet.board``, one picture for each question.

    python -m benchmarks.fleet.board_pictures benchmarks/results/board.jsonl --to docs/pictures

- board_policies.svg: mean and p99 of TTFT of each policy, relative to RayLM's, on each trace.
- board_goodput.svg: the share of good requests and the hit rate of each policy on each trace.
- board_terms.svg: mean and p99 of TTFT without each term of RayLM's Router and fair queue, relative to those with it.

The pictures show the cells with 4 engines and 4 ingresses at 80 % of the capacity; board_terms.svg also shows other
loads. The table has RayLM's ratio to the best of the others in every cell. Figures are means over the parts of a trace.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.fleet.board import TERMS, Cell, kept
from benchmarks.fleet.policies import POLICIES
from benchmarks.plot import picture
from benchmarks.rows import read

Figures = dict[str, float]
Place = tuple[str, str, int, int, int, int]
"""Trace, costs, engines, ingresses, load and requests of cells that can be compared."""
Metric = Callable[[Figures, Figures], float]
"""A figure of a policy, from its figures and RayLM's."""


def grouped(cells: dict[Cell, Figures]) -> dict[Place, dict[str, Figures]]:
    """The figures of each place, by policy: means over the parts of the trace for which RayLM has figures."""
    parts: dict[Place, dict[str, dict[int, Figures]]] = {}
    for cell, figures in cells.items():
        if cell.load:
            where = cell.trace, cell.costs, cell.engines, cell.ingresses, cell.load, cell.size * cell.engines
            parts.setdefault(where, {}).setdefault(cell.policy, {})[cell.part] = figures
    return {
        where: {
            name: averaged(list(found.values())) for name, found in of.items() if found.keys() == of["RayLM"].keys()
        }
        for where, of in parts.items()
        if "RayLM" in of
    }


def averaged(parts: Sequence[Figures]) -> Figures:
    return {name: fmean(part[name] for part in parts) for name in parts[0]}


def table(cells: dict[Cell, Figures]) -> list[str]:
    """Lines of a Markdown table: RayLM's figures relative to the best of the other policies in each cell."""
    heads = [
        "trace",
        "costs",
        "engines",
        "ingresses",
        "load, %",
        "requests",
        "mean",
        "p99",
        "ITL p99",
        "good, points",
        "best by mean",
    ]
    lines = [heads, ["---"] * len(heads)]
    for where, of in sorted(grouped(cells).items()):
        named = {name: row for name, row in of.items() if name in POLICIES and name != "RayLM"}
        if others := list(named.values()):
            mine = of["RayLM"]
            ratios = [f"{mine[name] / min(row[name] for row in others):.2f}" for name in ("mean", "p99", "ITL p99")]
            good = mine["good"] - max(row["good"] for row in others)
            best = min(named, key=lambda name: named[name]["mean"])
            lines.append([*map(str, where), *ratios, f"{good:+.1f}", best])
    return [f"| {' | '.join(line)} |" for line in lines]


def draw(path: Path, cells: dict[Cell, Figures], names: Sequence[str], metrics: dict[str, Metric], ratio: bool) -> None:
    """Draw a panel for each place and a group of bars for each of ``names``, a bar for each metric."""
    panels = {where: of for where, of in grouped(cells).items() if any(name in of for name in names)}
    if not panels:
        return
    with picture(path, len(panels), (3.2 + 2.4 * len(panels), 1.6 + 0.28 * len(names))) as axes:
        for axis, (where, of) in zip(axes, panels.items(), strict=True):
            width = 0.84 / len(metrics)
            for number, (label, metric) in enumerate(metrics.items()):
                at = [line for line, name in enumerate(names) if name in of]
                values = [metric(of[name], of["RayLM"]) for name in names if name in of]
                start = 1.0 if ratio else 0.0
                bars = axis.barh(
                    [line + (number - (len(metrics) - 1) / 2) * width for line in at],
                    [value - start for value in values], width, left=start, label=label,
                )  # fmt: skip
                axis.bar_label(bars, [f"{value:.2f}" for value in values], fontsize=6, padding=1)
            axis.set_yticks(range(len(names)), names if axis is axes[0] else [""] * len(names), fontsize=8)
            axis.set_ylim(len(names) - 0.5, -0.5)
            trace, costs, engines, ingresses, load, _ = where
            axis.set_title(f"{trace}, {costs}\n{engines} engines, {ingresses} ingresses, {load} %", fontsize=8)
            if ratio:
                axis.axvline(1, color="black", linewidth=0.8)
                axis.set_xscale("log")
                axis.xaxis.set_major_formatter("{x:g}")
                axis.xaxis.set_minor_formatter("{x:g}")
            axis.tick_params(axis="x", which="both", labelsize=6)
            axis.spines[["top", "right"]].set_visible(False)
            axis.margins(x=0.15)
        handles, labels = axes[0].get_legend_handles_labels()
        axes[0].figure.legend(handles, labels, fontsize=7, frameon=False, ncols=2, loc="outside lower center")


def relative(name: str) -> Metric:
    return lambda figures, mine: figures[name] / mine[name]


def itself(name: str) -> Metric:
    return lambda figures, mine: figures[name]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("file", type=Path)
    options.add_argument("--to", type=Path, required=True, help="folder of the pictures")
    args = options.parse_args()
    cells = kept(read(args.file))
    shown = {cell: figures for cell, figures in cells.items() if (cell.ingresses, cell.engines) == (4, 4)}
    typical = {cell: figures for cell, figures in shown.items() if cell.load == 80}
    times = {"TTFT mean / RayLM": relative("mean"), "TTFT p99 / RayLM": relative("p99")}
    shares = {"good, %": itself("good"), "hit rate, %": itself("hit rate")}
    policies = [name for name in POLICIES if any(cell.policy == name for cell in typical)]
    draw(args.to / "board_policies.svg", typical, [name for name in policies if name != "RayLM"], times, ratio=True)
    draw(args.to / "board_goodput.svg", typical, policies, shares, ratio=False)
    terms = [name for name in TERMS if any(cell.policy == name for cell in shown)]
    draw(args.to / "board_terms.svg", shown, terms, times, ratio=True)
    print("\n".join(table(cells)))


if __name__ == "__main__":
    main()
