"""TeamSize: how many threads of a team a step is worth, found out from the times of the steps themselves.

Threads that compute a layer together wait for the slowest of them after each of its phases. So one core that others
use now and then costs the whole team what it costs that core, and a step is often faster without it; a long prompt
is faster with it. Which holds changes with the machine's other work, so it is tried, not configured.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_SOON, _LATE = 24, 384
_BETTER, _SLOWER = 0.97, 1.15
_WEIGHT = 0.25
_FLAT_TOKENS = 16


@dataclass(slots=True)
class _Kind:
    """Steps of about the same number of tokens: the best size so far, and seconds a unit of work by size."""

    size: int
    times: dict[int, float] = field(default_factory=dict)
    steps: int = 0
    trial: int = 0  # the size that is being tried, 0 for none
    pause: int = _SOON  # steps from one trial to the next
    down: bool = True  # where the next trial goes


class TeamSize:
    """A hill climb for each kind of step: now and then one step runs with a thread less or more.

    Trials become rare while they lose, and come at once when steps have become slower; so an undisturbed team gives
    away less than a hundredth. ``choose`` and ``observe`` alternate.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._kinds: dict[int, _Kind] = {}
        self._compared: dict[int, float] = {}

    def choose(self, tokens: int) -> int:
        """Threads for a step of so many tokens."""
        kind = self._kind(tokens)
        kind.steps += 1
        kind.trial = self._neighbour(kind) if kind.steps >= kind.pause else 0
        return kind.trial or kind.size

    def observe(self, tokens: int, seconds: float) -> None:
        """The step that was chosen for took so long."""
        kind, number = self._kind(tokens), tokens.bit_length()
        unit = seconds / (tokens + _FLAT_TOKENS)
        if not kind.trial:
            last = kind.times.get(kind.size, unit)
            kind.times[kind.size] = last + _WEIGHT * (unit - last)
            if kind.times[kind.size] > _SLOWER * self._compared.get(number, unit):
                kind.pause, self._compared[number] = _SOON, kind.times[kind.size]
            return
        best = kind.times.get(kind.size, unit)
        kind.steps = 0
        if unit < _BETTER * best:
            kind.down, kind.size, kind.pause = kind.trial < kind.size, kind.trial, _SOON
            kind.times[kind.size] = unit
        else:
            kind.down, kind.pause = not kind.down, min(2 * kind.pause, _LATE)
        self._compared[number] = min(unit, best)

    def _kind(self, tokens: int) -> _Kind:
        return self._kinds.setdefault(tokens.bit_length(), _Kind(self._threads))

    def _neighbour(self, kind: _Kind) -> int:
        """The size to try next: a thread less or more, within what there is."""
        if self._threads == 1:
            return 0
        down = kind.size == self._threads or (kind.down and kind.size > 1)
        return kind.size - 1 if down else kind.size + 1
