"""OthersLoad: estimates the load of other clients on an engine, from reports, averages and the arrival of tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from raylm.messages import OtherClients

_MEMORY_S = 30.0  # time constant of the averages; with a few seconds ingresses would follow each other
_LONG_STEPS = 2.0  # a step that takes this many times a decode step computes prompts
_LONG_WEIGHT = 1 / 8  # weight of the newest long step in their mean
_QUEUE_PACE = 16.0  # a queue changes this many times as fast as requests end
_FEW = 0.01  # mean sequences of other clients, below which there are no other clients


def distances(num_engines: int, rank: int) -> list[float]:
    """The distance of each engine from the router of this rank, 0 to 1, on a circle.

    Ranks are placed by J. G. van der Corput's sequence (1935), so that 2, 4 or 8 ranks divide the circle equally. They
    are offset by a quarter of the distance between engines, so that one of two neighbours is nearer.
    """
    halves = int(f"{rank:b}"[::-1], 2) / 2 ** rank.bit_length()
    apart = [((place - 0.25) / num_engines - halves) % 1.0 for place in range(num_engines)]
    return [2 * min(share, 1 - share) for share in apart]


@dataclass(slots=True)
class OthersLoad:
    """The load of other clients on one engine.

    ``told`` is the load that the engine reported at ``told_at``, in seconds since the epoch. ``heard_at`` is the time
    of the latest tokens of this process. The weight of a report decreases with its age (M. Dahlin, "Interpreting Stale
    Load Information", 1999). The average load of the engine replaces it, so that ingresses with old reports prefer
    different engines. The arrival of tokens is information too: if a sequence of this process is decoded there, a pause
    shows a step that computes prompts.
    """

    told: OtherClients = field(default_factory=OtherClients)
    told_at: float = 0.0
    usual_tokens: float = 0.0
    usual_sequences: float = 0.0
    heard_at: float = 0.0
    pause_s: float = 0.0
    long_s: float = 0.0

    @property
    def exist(self) -> bool:
        """Whether other clients use the engine, or used it recently."""
        return self.told.sequences > 0 or self.usual_sequences > _FEW

    def tell(self, told: OtherClients, at: float) -> None:
        """Record a report. The previous report enters the averages for the time that it was valid."""
        if (lasted_s := at - self.told_at) > 0:
            share = min(1.0, lasted_s / _MEMORY_S)
            self.usual_tokens += share * (self.told.queued_tokens - self.usual_tokens)
            self.usual_sequences += share * (self.told.sequences - self.usual_sequences)
        self.told, self.told_at = told, at

    def hear(self, now: float, goes_on: bool, decode_s: float) -> None:
        """Record the arrival of tokens. ``goes_on``: of sequences that had tokens.

        ``decode_s``: usual seconds of a step.
        """
        self.pause_s = now - self.heard_at if goes_on else 0.0
        self.heard_at = now
        if self.pause_s > _LONG_STEPS * decode_s:
            self.long_s += (_LONG_WEIGHT if self.long_s else 1.0) * (self.pause_s - self.long_s)

    def doubt(self, now: float, service_s: float) -> float:
        """0 to 1: how uncertain the reported queue is now. A request takes ``service_s`` seconds on average."""
        return self._doubt(now, service_s / _QUEUE_PACE)

    def sequences(self, now: float, service_s: float) -> float:
        doubt = self._doubt(now, service_s)
        return self.told.sequences * (1.0 - doubt) + self.usual_sequences * doubt

    def _doubt(self, now: float, period_s: float) -> float:
        age = max(0.0, now - self.told_at)
        return min(1.0, age / period_s) if period_s > 0 else 1.0

    def told_s(self, now: float, token_s: float) -> float:
        """Seconds that prompts in the reported queue still take. The time since the report is subtracted."""
        return max(0.0, self.told.queued_tokens * token_s - max(0.0, now - self.told_at))

    def unheard_s(self, doubt: float, token_s: float) -> float:
        """Seconds that prompts since the report are expected to take, if no tokens arrive that show it."""
        return self.usual_tokens * token_s * doubt

    def heard_s(self, now: float, decode_s: float) -> float:
        """Seconds that prompts since the report are expected to take, judged by pauses between tokens."""
        return self.long_s if max(self.pause_s, now - self.heard_at) > _LONG_STEPS * decode_s else 0.0
