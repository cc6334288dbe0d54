"""Draw raw rows: a panel for each metric (only the ratios, if a file has some), and a bar for each case.

    python -m benchmarks.plot                                              # the pictures in benchmarks/results
    python -m benchmarks.plot benchmarks/results/*.jsonl --to pictures     # all questions

If a case has several values of one metric, the bar ends at their median, and a line spans the least and the largest.
Bars of ratios begin at 1, on a logarithmic axis. Questions of ``BY_CLIENTS`` are drawn as groups of bars, a group for
each number of clients and a bar for each engine, and printed as a Markdown table of medians. For ``BY_KERNEL``, a bar
is a decoding step, divided into the times of its kernels.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.rows import Row, read

RESULTS = Path(__file__).parent / "results"
DRAWN = ("compare_chat", "gpu")
BY_CLIENTS = {  # question -> metrics that are drawn, with the titles of their panels
    "compare_chat": {
        "output": "Tokens per second (more is better)",
        "TTFT p50": "Time to first token, ms (less is better)",
    }
}
BY_KERNEL = ("gpu",)  # questions of which only the kernels of decoding steps are drawn, as stacked bars for each case
_PARTS = {  # the first letters of kernels -> the part of a step that contains them
    ("nvjet", "cublasLt", "multiply_row"): "products",
    ("_fwd_kernel_splitK", "_splitK_reduce", "attend", "merge"): "attention",
    ("add_rms_norm", "silu_and_mul", "rotate_and_write"): "norms, activation, rotation",
}
_COLORS = ("#4477aa", "#bbbbbb", "#999999", "#ddaa77", "#77aa88")


@contextmanager
def picture(path: Path, panels: int, size: tuple[float, float], title: str = "") -> Iterator[Sequence[Any]]:
    """Axes of ``panels`` panels in a row, ``size`` in inches in total. Written to ``path`` at the end of the block."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    # Keep text as text, and make the file reproducible.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "raylm"}):
        figure, axes = plt.subplots(1, panels, figsize=size, layout="constrained", squeeze=False)
        yield axes[0]
        if title:
            figure.suptitle(title)
        figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(figure)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the plot of one question."""
    if rows[0].question in BY_CLIENTS:
        draw_by_clients(rows, path)
        return
    if rows[0].question in BY_KERNEL:
        draw_by_kernel(rows, path)
        return
    every = list(dict.fromkeys(row.metric for row in rows))
    metrics = [metric for metric in every if "ratio" in metric] or every
    cases = list(dict.fromkeys(row.case for row in rows if row.metric in metrics))
    size = (4 + 3 * len(metrics), 1.4 + 0.24 * len(cases))
    with picture(path, len(metrics), size, f"{rows[0].question}: {rows[0].machine}, {rows[0].date}") as axes:
        for axis, metric in zip(axes, metrics, strict=True):
            _panel(axis, [row for row in rows if row.metric == metric], cases)
        for axis in axes[1:]:
            axis.tick_params(labelleft=False)


def by_clients(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, float]]]:
    """Medians by metric, engine and clients, from cases such as "RayLM, 8 clients"; fewer clients first."""
    values: dict[str, dict[str, dict[str, list[float]]]] = {}
    for row in sorted(rows, key=lambda row: int(row.case.rpartition(", ")[2].split()[0])):
        engine, _, clients = row.case.rpartition(", ")
        values.setdefault(row.metric, {}).setdefault(engine, {}).setdefault(clients, []).append(row.value)
    return {
        metric: {
            engine: {clients: statistics.median(found) for clients, found in groups.items()}
            for engine, groups in engines.items()
        }
        for metric, engines in values.items()
    }


def table_by_clients(rows: Sequence[Row]) -> list[str]:
    """The medians as lines of a Markdown table."""
    medians, titles = by_clients(rows), BY_CLIENTS[rows[0].question]
    groups = list(dict.fromkeys(clients for one in medians[next(iter(titles))].values() for clients in one))
    counts = ", ".join(group.split()[0] for group in groups)
    units = {row.metric: row.unit for row in rows}
    heads = [f"{metric}, {units[metric]}, at {counts} clients" for metric in titles]
    cells = {
        engine: [", ".join(f"{medians[metric][engine].get(group, 0):,.0f}" for group in groups) for metric in titles]
        for engine in medians[next(iter(titles))]
    }
    lines = [["", *heads], ["---"] * (1 + len(heads)), *([engine, *found] for engine, found in cells.items())]
    return [f"| {' | '.join(line)} |" for line in lines]


def draw_by_clients(rows: Sequence[Row], path: Path) -> None:
    """Draw a group of bars for each number of clients."""
    titles, medians = BY_CLIENTS[rows[0].question], by_clients(rows)
    with picture(path, len(titles), (11, 3.6), f"{rows[0].machine}, {rows[0].date}") as axes:
        for axis, (metric, title) in zip(axes, titles.items(), strict=True):
            engines = medians[metric]
            groups = list(dict.fromkeys(clients for one in engines.values() for clients in one))
            width = 0.84 / len(engines)
            for place, (engine, found) in enumerate(engines.items()):
                at = [group + (place - (len(engines) - 1) / 2) * width for group in range(len(groups))]
                heights = [found.get(group, 0.0) for group in groups]
                bars = axis.bar(at, heights, width * 0.94, color=_COLORS[place % len(_COLORS)], label=engine)
                axis.bar_label(bars, fmt="{:,.0f}", fontsize=8, padding=1)
            axis.set_xticks(range(len(groups)), groups)
            axis.spines[["top", "right"]].set_visible(False)
            axis.set_title(title, fontsize=10)
        axes[0].legend(fontsize=8, frameon=False, loc="upper left")


def by_kernel(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Milliseconds of each part of a greedy decoding step by CUDA graphs, by case."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        if not (row.metric.startswith("kernel ") and "graphs, decode" in row.case):
            continue
        name = row.metric.removeprefix("kernel ")
        part = next((part for starts, part in _PARTS.items() if name.startswith(starts)), "sampling, copies")
        parts = found.setdefault(row.case, dict.fromkeys((*_PARTS.values(), "sampling, copies"), 0.0))
        parts[part] += row.value / 1000
    return found


def draw_by_kernel(rows: Sequence[Row], path: Path) -> None:
    """Draw a bar for each case, divided into the parts of the step."""
    cases = by_kernel(rows)
    with picture(
        path,
        1,
        (11, 1.4 + 0.4 * len(cases)),
        f"Kernels of a decoding step, ms; {rows[0].machine.partition(' (')[0]}, {rows[0].date}",
    ) as axes:
        done = [0.0] * len(cases)
        for color, part in zip((_COLORS[0], *_COLORS[3:], _COLORS[1]), next(iter(cases.values())), strict=False):
            taken = [parts[part] for parts in cases.values()]
            axes[0].barh(range(len(cases)), taken, left=done, color=color, label=part)
            done = [left + more for left, more in zip(done, taken, strict=True)]
        axes[0].set_yticks(range(len(cases)), [case.replace("graphs, ", "") for case in cases], fontsize=8)
        axes[0].invert_yaxis()
        axes[0].spines[["top", "right"]].set_visible(False)
        axes[0].legend(fontsize=8, frameon=False, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1))


def _panel(axis: Any, rows: Sequence[Row], cases: Sequence[str]) -> None:
    by_case = {case: [row.value for row in rows if row.case == case] for case in cases}
    is_ratio = "ratio" in rows[0].metric
    start = 1 if is_ratio else 0
    for place, values in enumerate(by_case.values()):
        if values:
            middle = statistics.median(values)
            errors = [[middle - min(values)], [max(values) - middle]]
            axis.barh(place, middle - start, left=start, xerr=errors, color="#4477aa")
    if is_ratio:
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter("{x:g}")
    axis.tick_params(axis="x", which="both", labelsize=7)
    axis.set_yticks(range(len(cases)), cases, fontsize=8)
    axis.set_ylim(len(cases) - 0.5, -0.5)
    axis.set_title(f"{rows[0].metric}, {rows[0].unit}" if rows[0].unit else rows[0].metric, fontsize=9)


def main() -> None:
    """Draw all files."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("files", type=Path, nargs="*", default=[RESULTS / f"{name}.jsonl" for name in DRAWN])
    options.add_argument("--to", type=Path, default=RESULTS, help="folder of the pictures")
    args = options.parse_args()
    args.to.mkdir(parents=True, exist_ok=True)
    for file in args.files:
        rows = read(file)
        draw(rows, args.to / f"{file.stem}.svg")
        if rows[0].question in BY_CLIENTS:
            print("\n".join(table_by_clients(rows)))


if __name__ == "__main__":
    main()
