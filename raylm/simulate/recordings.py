"""Recordings of live engines: reads the fleet, its requests, and its results."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raylm.errors import ConfigError
from raylm.simulate.fleet import Fleet
from raylm.simulate.report import spread
from raylm.simulate.step_costs import fit, read_steps
from raylm.simulate.trace import Trace, read_trace

_DRAFTS = ("speculative_tokens", "share_drafts")  # ignored without drafts
_SAME = ("block_size", "max_model_len", "prefix_caching", "scheduler")


@dataclass(frozen=True)
class Recorded:
    """A recording. ``figures`` are those of the live fleet, with the names of a report. TTFT begins at the ingress.

    ``errors`` are the errors of the fitted costs, by engine, relative to the steps' seconds.
    """

    fleet: Fleet
    trace: Trace
    figures: dict[str, Any]
    errors: list[float]


def read_recordings(paths: list[Path], **over: Any) -> Recorded:
    """Read the files of engines that served together. ``over`` replaces fields of the fleet.

    Raises:
        ConfigError: a file is not a recording, or the engines differ in more than their number of blocks.
    """
    try:
        return _recorded(paths, over)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        names = ", ".join(map(str, paths))
        raise ConfigError(f"{names}: a line is damaged or missing ({type(error).__name__}: {error}).") from error


def _recorded(paths: list[Path], over: dict[str, Any]) -> Recorded:
    heads = [_head(path) for path in paths]
    for path, head in zip(paths, heads, strict=True):
        if different := [name for name in _SAME if head[name] != heads[0][name]]:
            raise ConfigError(f"{path}: differs from {paths[0]} in {', '.join(different)}.")
    first, groups, errors = heads[0], [], []
    for path, head in zip(paths, heads, strict=True):
        costs, error = fit(read_steps(path))
        groups.append({"num_blocks": head["num_blocks"], "costs": costs.model_dump()})
        errors.append(error)
    scheduler = {name: value for name, value in first["scheduler"].items() if name not in _DRAFTS or value}
    cache = {"block_size": first["block_size"], "prefix_caching": first["prefix_caching"]}
    given = {"engines": groups, "max_model_len": first["max_model_len"]}
    fleet = Fleet.of(given | {"config": {"scheduler": scheduler, "cache": cache}} | over, ", ".join(map(str, paths)))
    return Recorded(fleet, read_trace(paths, fleet.block_size), _figures(paths), errors)


def _head(path: Path) -> dict[str, Any]:
    try:
        with path.open(encoding="utf-8") as file:
            head: Any = json.loads(file.readline())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: it cannot be read: {error}") from None
    if not isinstance(head, dict) or head.get("kind") != "engine":
        raise ConfigError(f"{path}: not a recording of an engine.")
    return head


def _figures(paths: Iterable[Path]) -> dict[str, Any]:
    lines = [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
    added = {(line["client"], str(line["id"])): line["at"] for line in lines if line["kind"] == "add"}
    ended = [line for line in lines if line["kind"] == "request"]
    ttft_ms, intervals, numbers = [], [], []
    for line in ended:
        client, key, _ = line["sequence"].split("/")
        ttft_ms.append(1000 * (added[client, key] + line["ttft_s"] - line["arrival"]))
        if (number := line["output_tokens"] - 1) > 0:
            intervals.append(1000 * (line["duration_s"] - line["ttft_s"]))
            numbers.append(number)
    prompt_tokens = sum(line["prompt_tokens"] for line in ended)
    return {
        "requests": len(ended),
        "ttft_ms": spread(np.array(ttft_ms)),
        "itl_ms": {"mean": sum(intervals) / sum(numbers)} if numbers else {},
        "hit_rate": sum(line["cached_tokens"] for line in ended) / prompt_tokens if prompt_tokens else 0.0,
    }
