"""TeamSize: chooses the number of threads for a step from measured times of steps.

Threads wait for the slowest after each phase of a layer, so a core that other processes sometimes use slows all of
them. A step is often faster without this core, but a long prompt faster with it. This changes with the other work of
the machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, log

_SOON, _LATE = 32, 512
_TURNS, _STEPS_A_TURN = 4, 3
_BETTER, _SLOWER = 0.97, 1.15
_HOPELESS = 1.3
_WEIGHT = 0.2
_FLAT_TOKENS = 16


@dataclass(slots=True)
class _Trial:
    """A trial: the current size and another size take turns. The current size begins.

    The first step of each turn is not counted, because threads wake up then.
    """

    size: int
    logs: list[float] = field(default_factory=list)  # logarithms of seconds for a unit of work, of each step

    @property
    def tried(self) -> bool:
        """Whether the next step uses the size on trial."""
        return len(self.logs) // _STEPS_A_TURN % 2 == 1

    @property
    def hopeless(self) -> bool:
        """Whether the last step, with the size on trial, took far longer than any step with the current size."""
        return len(self.logs) > _STEPS_A_TURN and self.logs[-1] > max(self.logs[:_STEPS_A_TURN]) + log(_HOPELESS)

    @property
    def ratio(self) -> float:
        """The ratio of the times of the size on trial to those of the current size, by geometric means."""
        counted = [(at // _STEPS_A_TURN % 2, value) for at, value in enumerate(self.logs) if at % _STEPS_A_TURN]
        return exp(sum(value if trial else -value for trial, value in counted) * 2 / len(counted))


@dataclass(slots=True)
class _Kind:
    """Steps with a similar number of tokens."""

    size: int
    steps: int = 0  # since the last trial
    pause: int = _SOON  # steps between trials
    down: bool = True  # whether the next trial uses fewer threads
    usual: float = 0.0  # seconds for a unit of work, a moving average
    expected: float = 0.0  # its value after the last trial
    trial: _Trial | None = None


class TeamSize:
    """A hill climb for each kind of step. ``choose`` and ``observe`` alternate.

    From time to time a size with one thread less or more is tried against the best size. Trials become rarer while they
    lose. A trial starts at once when steps become slower.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._kinds: dict[int, _Kind] = {}

    def choose(self, tokens: int) -> int:
        kind = self._kind(tokens)
        kind.steps += 1
        if kind.trial is None and kind.steps > kind.pause and self._threads > 1:
            down = kind.size == self._threads or (kind.down and kind.size > 1)
            kind.trial = _Trial(kind.size - 1 if down else kind.size + 1)
        return kind.trial.size if kind.trial is not None and kind.trial.tried else kind.size

    def observe(self, tokens: int, seconds: float) -> None:
        kind, unit = self._kind(tokens), seconds / (tokens + _FLAT_TOKENS)
        if kind.trial is not None:
            kind.trial.logs.append(log(unit))
            if kind.trial.hopeless:
                self._keep(kind)
            elif len(kind.trial.logs) == _TURNS * _STEPS_A_TURN:
                self._decide(kind, kind.trial)
            return
        kind.usual += _WEIGHT * (unit - kind.usual) if kind.usual else unit
        kind.expected = kind.expected or unit
        if kind.usual > _SLOWER * kind.expected:
            kind.pause, kind.expected = _SOON, kind.usual

    def _kind(self, tokens: int) -> _Kind:
        return self._kinds.setdefault(tokens.bit_length(), _Kind(self._threads))

    def _decide(self, kind: _Kind, trial: _Trial) -> None:
        if trial.ratio >= _BETTER:
            self._keep(kind)
            return
        kind.down, kind.size, kind.pause = trial.size < kind.size, trial.size, _SOON
        kind.usual *= trial.ratio
        self._end(kind)

    def _keep(self, kind: _Kind) -> None:
        kind.down, kind.pause = not kind.down, min(2 * kind.pause, _LATE)
        self._end(kind)

    def _end(self, kind: _Kind) -> None:
        kind.trial, kind.steps, kind.expected = None, 0, kind.usual
