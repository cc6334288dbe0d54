"""ServeGen's clients: for each client the rate and burstiness of each ten minutes, and lengths of each six hours.

Source: https://github.com/alibaba/ServeGen, data/*/*/chunk-N-trace.csv with chunk-N-dataset.json beside it. The files
have no requests: arrivals are drawn from the window's gamma or Weibull distribution, and lengths of prompt and answer,
independently, from the client's histograms. Each client is a key. Open loop, without shared prefixes.
"""

from __future__ import annotations

import ast
import csv
import heapq
import json
import math
import random
from bisect import bisect
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Literal

from pydantic import Field

from raylm.errors import ConfigError
from raylm.simulate.production.selection import Advance, Line, Selection, TraceRecord, checked, text_lines

WINDOW_S = 600
COLUMNS = ["timestamp", "rate", "cv", "pattern", "shape", "scale"]
Draw = Callable[[], int]


class _Window(TraceRecord):
    timestamp: int = Field(ge=0)
    rate: float = Field(ge=0, allow_inf_nan=False)
    pattern: Literal["", "Gamma", "Weibull"]
    shape: float = Field(ge=0, allow_inf_nan=False)


class _Lengths(TraceRecord):
    input_tokens: str
    output_tokens: str


class _Client:
    """The requests of one client, from ``begin`` for ``seconds``."""

    def __init__(self, path: Path, selection: Selection, begin: float, seconds: float) -> None:
        self.key = path.name.removesuffix("-trace.csv")
        if self.key == path.name:
            raise ConfigError(f"{path}: must be a file chunk-N-trace.csv, with chunk-N-dataset.json beside it.")
        self._lengths_path = path.with_name(f"{self.key}-dataset.json")
        self._selection, self._begin, self._end = selection, begin, begin + seconds
        self._rng = random.Random(f"{selection.seed} {self.key}")
        self._windows = [one for one in _windows(path) if begin - WINDOW_S < one.timestamp < self._end]

    def arrivals(self) -> Iterator[tuple[float, str, int, int]]:
        """(seconds since the begin, key, prompt tokens, output tokens) in order of time."""
        lengths = self._lengths() if any(one.pattern and one.rate for one in self._windows) else {}
        begins = sorted(lengths)
        for window in self._windows:
            place = bisect(begins, window.timestamp) - 1
            if not window.pattern or not window.rate or place < 0:
                continue
            prompt, output = lengths[begins[place]]
            gap = self._gaps(window)
            at = window.timestamp + gap() * self._rng.random()
            while at < min(window.timestamp + WINDOW_S, self._end):
                if at >= self._begin:
                    yield at - self._begin, self.key, max(1, prompt()), max(1, output())
                at += gap()

    def _gaps(self, window: _Window) -> Callable[[], float]:
        """Draws of the seconds between two arrivals, with the shape of the window and its rate as mean."""
        mean_s = 1 / (window.rate * self._selection.share)
        shape = max(window.shape, 0.02)  # math.gamma below overflows at smaller ones
        if window.pattern == "Gamma":
            return lambda: self._rng.gammavariate(shape, mean_s / shape)
        scale = mean_s / math.gamma(1 + 1 / shape)
        return lambda: self._rng.weibullvariate(scale, shape)

    def _lengths(self) -> dict[int, tuple[Draw, Draw]]:
        """Draws of the lengths of prompt and answer, by the begin of their time, where the client had requests."""
        path = self._lengths_path
        try:
            given = json.loads(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"{path}: it cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from None
        if not isinstance(given, dict) or not all(text.isdecimal() for text in given):
            raise ConfigError(f"{path}: must be an object of seconds.")
        begins = sorted(map(int, given))
        found = {}
        for place, begin in enumerate(begins):
            until = begins[place + 1] if place + 1 < len(begins) else math.inf
            if not (begin < self._end and until > self._begin - WINDOW_S):
                continue
            where = f"{path}, {begin}"
            one = checked(_Lengths, given[str(begin)], where)
            draws = [
                self._histogram(getattr(one, name), f"{where}: {name}") for name in ("input_tokens", "output_tokens")
            ]
            if draws[0] is not None and draws[1] is not None:
                found[begin] = draws[0], draws[1]
        return found

    def _histogram(self, text: str, where: str) -> Draw | None:
        """Draws of a histogram, which is a dictionary of Python as text; None if it is empty."""
        try:
            shares = ast.literal_eval(text)
            values = [int(value) for value in shares]
            ends = list(accumulate(float(share) for share in shares.values()))
        except (AttributeError, SyntaxError, TypeError, ValueError) as error:
            raise ConfigError(f"{where}: must be a dictionary of lengths and their shares ({error}).") from None
        if not values:
            return None
        if not ends[-1] > 0 or min(values) < 0:
            raise ConfigError(f"{where}: lengths must be at least 0, and their shares more than 0.")
        return lambda: self._rng.choices(values, cum_weights=ends)[0]


def _windows(path: Path) -> Iterator[_Window]:
    for where, _, text in text_lines([path], lambda read: None):
        cells = next(csv.reader([text]))
        if len(cells) != len(COLUMNS):
            raise ConfigError(f"{where}: must have the columns {', '.join(COLUMNS)}; it has {len(cells)}.")
        yield checked(_Window, dict(zip(COLUMNS, cells, strict=True)), where)


def servegen(paths: list[Path], selection: Selection, advance: Advance, begin: float, seconds: float) -> Iterator[Line]:
    """Lines of all clients in order of arrival, for ``seconds`` from ``begin`` of the trace.

    ``advance`` is called with seconds.

    Raises:
        ConfigError: names the file, the line or the time, and the field.
    """
    clients = [_Client(path, selection, begin, seconds) for path in paths]
    told = 0
    for at, key, prompt_tokens, output_tokens in heapq.merge(*(client.arrivals() for client in clients)):
        if int(at) > told:
            advance(int(at) - told)
            told = int(at)
        if selection.fits(prompt_tokens, output_tokens):
            yield selection.line(at, prompt_tokens, output_tokens, key=key)
