"""Figures of loads: percentiles of clients' measurements, throughput, goodput, errors by kind; table and plot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from raylm.bench.prompts import Question, Scale
from raylm.client import Answer
from raylm.errors import ConfigError
from raylm.simulate import Targets

_SPREADS: dict[str, tuple[str, Callable[[Answer], float]]] = {
    "ttft_ms": ("TTFT, ms", lambda answer: 1000 * answer.ttft),
    "itl_ms": ("ITL, ms", lambda answer: 1000 * answer.itl),
    "pause_ms": ("longest pause, ms", lambda answer: 1000 * answer.pause),
    "e2e_ms": ("whole answer, ms", lambda answer: 1000 * answer.total),
}
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_LATE_S = 0.1


@dataclass(frozen=True)
class LoadResult:
    """The requests of one load, and its duration in seconds. ``late_s`` is the largest delay of sending."""

    name: str
    seconds: float
    asked: list[tuple[Question, Answer]]
    late_s: float = 0.0
    scale: Scale = field(default_factory=Scale)

    @property
    def good(self) -> list[Answer]:
        return [answer for _, answer in self.asked if answer.error is None]

    @property
    def errors(self) -> list[str]:
        """The errors of all failed requests."""
        return [answer.error for _, answer in self.asked if answer.error is not None]

    def figures(self, targets: Targets) -> dict[str, Any]:
        """All figures for JSON. Distributions are empty if every request failed."""
        good = self.good
        prompts, output = sum(one.prompt_tokens for one in good), sum(one.tokens for one in good)
        kept = sum(1000 * one.ttft <= targets.ttft_ms and 1000 * one.itl <= targets.itl_ms for one in good)
        found: dict[str, Any] = {
            "load": self.name,
            "requests": len(self.asked),
            "errors": dict(Counter(answer.kind for _, answer in self.asked if answer.error is not None)),
            "duration_s": self.seconds,
            "late_s": self.late_s,
            "prompt_tokens": prompts,
            "cached_tokens": sum(one.cached_tokens for one in good),
            "output_tokens": output,
            "requests_per_s": len(good) / self.seconds,
            "output_tokens_per_s": output / self.seconds,
            "total_tokens_per_s": (prompts + output) / self.seconds,
            "goodput_per_s": kept / self.seconds,
            "good_share": kept / len(self.asked) if self.asked else 0.0,
            "tool_calls": sum(len(one.calls) for one in good),
            "broken_tool_calls": sum(one.broken_calls for one in good),
        }
        return found | {name: _spread(values(name, good)) for name in _SPREADS}


def values(name: str, answers: Sequence[Answer]) -> list[float]:
    """The values of one distribution. Times between tokens only include answers with several tokens."""
    several = name in ("itl_ms", "pause_ms")
    return [_SPREADS[name][1](answer) for answer in answers if answer.tokens > 1 or not several]


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    found = {name: float(np.quantile(values, share)) for name, share in _QUANTILES.items()}
    return {"mean": float(np.mean(values))} | found


def table(found: dict[str, Any]) -> Table:
    """The distributions of one load, for a terminal."""
    drawn = Table(title=found["load"], title_justify="left", title_style="bold", pad_edge=False, box=None)
    drawn.add_column("", style="cyan", no_wrap=True, min_width=17)
    for name in ("mean", *_QUANTILES):
        drawn.add_column(name, justify="right", min_width=9)
    for name, (label, _) in _SPREADS.items():
        if found[name]:
            drawn.add_row(label, *(f"{value:,.1f}" for value in found[name].values()))
    return drawn


def lines(found: dict[str, Any], targets: Targets) -> list[tuple[str, str]]:
    """The lines below the table."""
    errors = ", ".join(f"{number:,} {kind}" for kind, number in found["errors"].items()) or "none"
    prompts, cached = found["prompt_tokens"], found["cached_tokens"]
    rows = {
        "requests": f"{found['requests']:,} in {found['duration_s']:,.1f} s, {found['requests_per_s']:,.2f} a second",
        "errors": errors,
        "output": f"{found['output_tokens']:,} tokens, {found['output_tokens_per_s']:,.1f} a second; with prompts "
        f"{found['total_tokens_per_s']:,.1f}",
        "prompts": f"{prompts:,} tokens" + (f", {cached / prompts:.1%} from the prefix cache" if cached else ""),
        "goodput": f"{found['goodput_per_s']:,.2f} requests a second, {found['good_share']:.1%} with TTFT "
        f"up to {targets.ttft_ms:g} ms and ITL up to {targets.itl_ms:g} ms",
    }
    if found["tool_calls"]:
        rows["tool calls"] = f"{found['tool_calls']:,}, {found['broken_tool_calls']:,} without a JSON object"
    if found["late_s"] > _LATE_S:
        rows["sent late"] = f"by up to {1000 * found['late_s']:,.0f} ms: this client is too slow for the rate"
    return list(rows.items())


def draw(loads: Sequence[LoadResult], path: Path) -> None:
    """Plot the distributions of TTFT and ITL of each load.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from None
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for panel, name in zip(panels, ("ttft_ms", "itl_ms"), strict=True):
        for load in loads:
            if times := sorted(values(name, load.good)):
                panel.step(times, np.arange(1, len(times) + 1) / len(times), where="post", label=load.name)
                panel.legend()
        panel.set(xlabel=_SPREADS[name][0], ylabel="share of the requests", xscale="log")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path}: {error}") from None
    finally:
        plt.close(figure)
