"""Report: the figures of a simulation as a table, JSON and plots."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raylm.errors import ConfigError
from raylm.simulate.ingress import ITL_STEPS, Served
from raylm.simulate.simulation import Outcome

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(frozen=True)
class Targets:
    """Limits of a request that counts for goodput: its TTFT, and the mean time between its tokens, in ms."""

    ttft_ms: float = 1000.0
    itl_ms: float = 100.0


def figures(outcome: Outcome, targets: Targets) -> dict[str, Any]:
    """All figures, in ms and tokens. ``duration_s`` is from the first arrival to the last end."""
    done = [one for one in outcome.served if not one.error]
    begun = min((one.at for one in outcome.served), default=0.0)
    duration_s = outcome.end_s - begun
    errors = Counter(one.error for one in outcome.served if one.error)
    busy = list(outcome.busy_s.values())
    prompt_tokens = sum(one.prompt_tokens for one in done)
    output_tokens = sum(one.output_tokens for one in done)
    good = sum(is_good(one, targets) for one in done)
    return {
        "requests": len(done),
        "errors": dict(errors),
        "duration_s": duration_s,
        "ttft_ms": spread(ttft_ms(done)),
        "itl_ms": _intervals(outcome.intervals),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "output_tokens_per_s": output_tokens / duration_s if duration_s else 0.0,
        "goodput_per_s": good / duration_s if duration_s else 0.0,
        "good_share": good / len(outcome.served) if outcome.served else 0.0,
        "hit_rate": sum(one.cached_tokens for one in done) / prompt_tokens if prompt_tokens else 0.0,
        "preemptions": outcome.preemptions,
        "engine_s": sum(outcome.held_s.values()),
        "busy_engine_s": sum(busy),
        "keys": _by_key(done, output_tokens),
    }


def ttft_ms(done: list[Served]) -> NDArray[np.float64]:
    return np.array([1000 * (one.first_s - one.at) for one in done])


def is_good(one: Served, targets: Targets) -> bool:
    itl_s = (one.last_s - one.first_s) / max(1, one.output_tokens - 1)
    return 1000 * (one.first_s - one.at) <= targets.ttft_ms and 1000 * itl_s <= targets.itl_ms


def spread(values: NDArray[np.float64]) -> dict[str, float]:
    """Mean and quantiles; empty without values."""
    if not len(values):
        return {}
    found = {name: float(np.quantile(values, share)) for name, share in QUANTILES.items()}
    return {"mean": float(values.mean())} | found


def _intervals(counted: Counter[int]) -> dict[str, float]:
    """Mean and quantiles of intervals that are counted by logarithm."""
    if not counted:
        return {}
    order = sorted(counted)
    values, numbers = np.array([1000 * 10 ** (step / ITL_STEPS) for step in order]), [counted[step] for step in order]
    ends = np.cumsum(numbers)
    found = {name: float(values[np.searchsorted(ends, share * ends[-1])]) for name, share in QUANTILES.items()}
    return {"mean": float(values @ np.array(numbers) / ends[-1])} | found


def _by_key(done: list[Served], output_tokens: int) -> dict[str, dict[str, float]]:
    keys: dict[str, list[Served]] = {}
    for one in done:
        keys.setdefault(one.key, []).append(one)
    return {
        key: {
            "requests": len(mine),
            "token_share": sum(one.output_tokens for one in mine) / output_tokens,
            "ttft_ms_mean": float(ttft_ms(mine).mean()),
            "ttft_ms_p99": float(np.quantile(ttft_ms(mine), 0.99)),
        }
        for key, mine in sorted(keys.items())
    }


def table(found: dict[str, Any]) -> str:
    """A table for a terminal."""
    lines = [f"{'':24}{'mean':>10}" + "".join(f"{name:>10}" for name in QUANTILES)]
    for name, label in (("ttft_ms", "TTFT, ms"), ("itl_ms", "ITL, ms")):
        spread = found[name]
        lines.append(f"{label:24}" + "".join(f"{spread[part]:10.1f}" for part in spread))
    errors = ", ".join(f"{number:,} {error}" for error, number in found["errors"].items()) or "none"
    rows = {
        "requests": f"{found['requests']:,} in {found['duration_s']:,.1f} s",
        "errors": errors,
        "output": f"{found['output_tokens']:,} tokens, {found['output_tokens_per_s']:,.1f} a second",
        "goodput": f"{found['goodput_per_s']:,.2f} requests a second, {found['good_share']:.1%}",
        "hit rate": f"{found['hit_rate']:.1%} of {found['prompt_tokens']:,} prompt tokens",
        "preemptions": f"{found['preemptions']:,}",
        "engine-seconds": f"{found['engine_s']:,.1f}, {found['busy_engine_s']:,.1f} of them busy",
    }
    lines += [f"{name:24}{value}" for name, value in rows.items()]
    if len(found["keys"]) > 1:
        lines.append(f"{'key':24}{'requests':>10}{'tokens':>10}{'TTFT':>10}{'p99':>10}")
        for key, of in found["keys"].items():
            share = f"{of['token_share']:.1%}"
            times = f"{of['ttft_ms_mean']:10.1f}{of['ttft_ms_p99']:10.1f}"
            lines.append(f"{key:24}{of['requests']:10,}{share:>10}{times}")
    return "\n".join(lines)


def recorded_table(found: dict[str, Any]) -> str:
    """The figures of a live fleet, in the columns of ``table``."""
    lines = [f"{'recorded':24}{found['requests']:,} requests, hit rate {found['hit_rate']:.1%}"]
    for name, label in (("ttft_ms", "recorded TTFT, ms"), ("itl_ms", "recorded ITL, ms")):
        lines.append(f"{label:24}" + "".join(f"{value:10.1f}" for value in found[name].values()))
    return "\n".join(lines)


def draw(outcome: Outcome, path: Path) -> None:
    """Plot TTFT by arrival, and its distribution.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from None
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    done = [one for one in outcome.served if not one.error]
    times, values = [one.at for one in done], ttft_ms(done)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    left.plot(times, values, ".", markersize=2)
    left.set(xlabel="arrival, s", ylabel="TTFT, ms")
    right.plot(np.sort(values), np.linspace(0, 1, len(values)))
    right.set(xlabel="TTFT, ms", ylabel="share of the requests", xscale="log")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path}: {error}") from None
    finally:
        plt.close(figure)
