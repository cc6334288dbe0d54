"""Pictures and a table of the rows that ``python -m benchmarks.fleet.board`` wrote, one picture for each question.

    python -m benchmarks.fleet.board_pictures benchmarks/results/board.jsonl --to benchmarks/results

- board_policies.svg: mean and p99 of TTFT of each policy, relative to RayLM's, on each trace.
- board_goodput.svg: the share of good requests, the hit rate and the fairness of each policy on each trace.
- board_terms.svg: mean and p99 of TTFT without each term of RayLM's Router and fair queue, relative to those with it.

Each picture has the cells with the most ingresses and, of those, the load of 80 % (terms of the queue: 95 %). The table
has RayLM's ratio to the best of the others in every cell.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.fleet.ablations import ABLATIONS
from benchmarks.fleet.policies import POLICIES
from benchmarks.plot import picture

Row = dict[str, Any]
TERMS = [name for names in ABLATIONS.values() for name in names]


def place(row: Row) -> tuple[str, str, int, int, int]:
    """What two rows must have in common to be compared."""
    return row["trace"], row["costs"], row["engines"], row["ingresses"], row["load"]


def grouped(rows: Sequence[Row]) -> dict[tuple[str, str, int, int, int], dict[str, Row]]:
    """The rows of each place, by policy; only places that RayLM was measured in."""
    found: dict[tuple[str, str, int, int, int], dict[str, Row]] = {}
    for row in rows:
        if row["load"]:
            found.setdefault(place(row), {})[row["policy"]] = row
    return {where: of for where, of in found.items() if "RayLM" in of}


def table(rows: Sequence[Row]) -> list[str]:
    """Lines of a Markdown table: RayLM's figures relative to the best of the other policies in each cell."""
    heads = ["trace", "costs", "engines", "ingresses", "load, %", "mean", "p99", "good, points", "best by mean"]
    lines = [heads, ["---"] * len(heads)]
    for where, of in sorted(grouped(rows).items()):
        others = [row for name, row in of.items() if name in POLICIES and name != "RayLM"]
        if others:
            mine = of["RayLM"]
            ratios = [
                f"{mine[name] / min(row[name] for row in others):.2f}" for name in ("ttft_ms_mean", "ttft_ms_p99")
            ]
            good = 100 * (mine["good_share"] - max(row["good_share"] for row in others))
            best = min(others, key=lambda row: row["ttft_ms_mean"])["policy"]
            lines.append([*map(str, where), *ratios, f"{good:+.1f}", best])
    return [f"| {' | '.join(line)} |" for line in lines]


def draw(
    path: Path, rows: Sequence[Row], names: Sequence[str], metrics: dict[str, Callable[[Row, Row], float]], ratio: bool
) -> None:
    """Draw a panel for each place and a group of bars for each of ``names``, a bar for each metric."""
    panels = {where: of for where, of in grouped(rows).items() if any(name in of for name in names)}
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
            trace, costs, engines, ingresses, load = where
            axis.set_title(f"{trace}, {costs}\n{engines} engines, {ingresses} ingresses, {load} %", fontsize=8)
            if ratio:
                axis.axvline(1, color="black", linewidth=0.8)
                axis.set_xscale("log")
                axis.xaxis.set_major_formatter("{x:g}")
                axis.xaxis.set_minor_formatter("{x:g}")
            axis.tick_params(axis="x", which="both", labelsize=6)
            axis.spines[["top", "right"]].set_visible(False)
            axis.margins(x=0.15)
        axes[0].legend(fontsize=7, frameon=False, loc="lower right")


def relative(name: str) -> Callable[[Row, Row], float]:
    return lambda row, mine: row[name] / mine[name]


def share(name: str) -> Callable[[Row, Row], float]:
    return lambda row, mine: row[name]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("file", type=Path)
    options.add_argument("--to", type=Path, required=True, help="folder of the pictures")
    args = options.parse_args()
    rows = [json.loads(line) for line in args.file.read_text().splitlines()]
    shown = [row for row in rows if row["ingresses"] == 4 and row["engines"] == 4]
    typical = [row for row in shown if row["load"] == 80]
    times = {"TTFT mean / RayLM": relative("ttft_ms_mean"), "TTFT p99 / RayLM": relative("ttft_ms_p99")}
    shares = {"good": share("good_share"), "hit rate": share("hit_rate"), "fairness": share("fairness")}
    policies = [name for name in POLICIES if any(row["policy"] == name for row in typical)]
    draw(args.to / "board_policies.svg", typical, [name for name in policies if name != "RayLM"], times, ratio=True)
    draw(args.to / "board_goodput.svg", typical, policies, shares, ratio=False)
    terms = [name for name in TERMS if any(row["policy"] == name for row in shown)]
    draw(args.to / "board_terms.svg", shown, terms, times, ratio=True)
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
