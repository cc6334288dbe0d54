"""StepCost: the time of a step by its number of tokens, learned from measured steps. Scheduler and worker have one."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from itertools import accumulate
from math import log2

_STEPS_A_KNOT = 7
_KNOTS_AN_OCTAVE = 4
_FLAT = 32  # up to about this many tokens, reading the weights bounds a step, so its time is constant
_FAR = 1 << 21
_SAME = 0.02  # a knot moves only if its median changes by more than this share, so that the curve is seldom rebuilt


class StepCost:
    """Seconds by tokens, as a non-decreasing polyline through knots.

    A knot is the median of the last 7 steps of about the same size (within 20 %). So a single disturbed step has no
    effect, and a lasting change takes effect after four steps. The knot stays while the median stays within 2 % of it.
    Beyond the knots, time is proportional to tokens; up to 32 tokens it is constant.

    A knot of 7 steps is forgotten after ``lifetime`` steps without a step of its size, so that a size that was slow
    once is tried again. A knot of fewer steps is forgotten sooner. With ``lifetime`` None, knots are kept.
    """

    def __init__(self, lifetime: int | None = None) -> None:
        self._lifetime = lifetime
        self._steps: dict[int, deque[tuple[float, int]]] = {}
        self._knots: dict[int, tuple[int, float]] = {}
        self._last: dict[int, int] = {}
        self._seen = self._forgot_at = self._largest = 0
        self._curve: tuple[list[int], list[float]] | None = None

    @property
    def known(self) -> bool:
        return bool(self._steps)

    def times_seen(self, tokens: int) -> int:
        """Number of known steps of about this size, at most 7."""
        self._forget()
        return len(self._steps.get(_size(tokens), ()))

    @property
    def largest(self) -> int:
        """Tokens of the largest known step. Needs at least one step."""
        self._forget()
        return self._largest

    def observe(self, tokens: int, seconds: float) -> None:
        self._seen += 1
        size = _size(tokens)
        if (steps := self._steps.get(size)) is None:
            steps = self._steps[size] = deque(maxlen=_STEPS_A_KNOT)
        steps.append((seconds, tokens))
        self._last[size] = self._seen
        self._largest = max(self._largest, tokens)
        median, of = sorted(steps)[(len(steps) - 1) // 2]
        if (knot := self._knots.get(size)) is None or abs(knot[1] - median) > _SAME * median:
            self._knots[size] = of, median
            self._curve = None

    def curve(self) -> tuple[list[int], list[float]]:
        """(tokens, seconds) of the points of the polyline, from 1 token to 2 million. Needs at least one step."""
        self._forget()
        if self._curve is None:
            knots = sorted(self._knots.values())
            sizes = [tokens for tokens, _ in knots]
            times = list(accumulate((seconds for _, seconds in knots), max))
            least, most = times[0] / max(sizes[0], _FLAT), times[-1] / max(sizes[-1], _FLAT)
            below = [tokens for tokens in (1, _FLAT) if tokens < sizes[0]]
            above = [tokens for tokens in (_FLAT, _FAR) if tokens > sizes[-1]]
            outside = [least * max(tokens, _FLAT) for tokens in below], [most * max(tokens, _FLAT) for tokens in above]
            self._curve = [*below, *sizes, *above], [*outside[0], *times, *outside[1]]
        return self._curve

    def seconds(self, tokens: int) -> float:
        """Expected seconds of a step of ``tokens`` (1 to 2 million). Needs at least one step."""
        sizes, times = self.curve()
        right = min(bisect_right(sizes, tokens), len(sizes) - 1)
        share = (tokens - sizes[right - 1]) / (sizes[right] - sizes[right - 1])
        return times[right - 1] + share * (times[right] - times[right - 1])

    def tokens_within(self, seconds: float) -> int:
        """Most tokens of a step that takes at most ``seconds``; 0 if no step is that short. Needs at least one step."""
        sizes, times = self.curve()
        right = bisect_right(times, seconds)
        if right in (0, len(times)):
            return sizes[-1] if right else 0
        share = (seconds - times[right - 1]) / (times[right] - times[right - 1])
        return int(sizes[right - 1] + share * (sizes[right] - sizes[right - 1]))

    def _forget(self) -> None:
        if self._lifetime is None or self._forgot_at == self._seen:
            return
        self._forgot_at = self._seen
        share = self._lifetime / (_STEPS_A_KNOT + 1)
        if not self._last or self._seen - min(self._last.values()) <= share:
            return
        times = {size: len(steps) + 1 for size, steps in self._steps.items()}
        for size in [size for size, last in self._last.items() if self._seen - last > share * times[size]]:
            del self._steps[size], self._last[size], self._knots[size]
            self._curve = None
        self._largest = max((tokens for steps in self._steps.values() for _, tokens in steps), default=0)


def _size(tokens: int) -> int:
    return round(_KNOTS_AN_OCTAVE * log2(tokens))
