"""OthersLoad: what an engine has to do for other clients, by what it told, what is usual, and how its tokens come."""

from __future__ import annotations

from dataclasses import dataclass, field

from raylm.messages import OtherClients

_MEMORY_S = 30.0  # over which what is usual is averaged; with a few seconds ingresses would chase each other
_LONG_STEPS = 2.0  # times a step that only decodes: what takes longer computes prompts
_LONG_WEIGHT = 1 / 8  # of the newest long step in the mean of them
_QUEUE_PACE = 16.0  # times as fast as requests end does another queue become of the one that was told
_FEW = 0.01  # sequences in the mean; below that there are no others


def distances(num_engines: int, rank: int) -> list[float]:
    """0 to 1, of each engine from the router with this rank, on a circle that ranks halve again and again.

    By J. G. van der Corput's sequence (1935) 2, 4, 8 ranks have equal parts. They stand a quarter of the way from one
    engine to the next, so that of two neighbours one is nearer.
    """
    halves = int(f"{rank:b}"[::-1], 2) / 2 ** rank.bit_length()
    apart = [((place - 0.25) / num_engines - halves) % 1.0 for place in range(num_engines)]
    return [2 * min(share, 1 - share) for share in apart]


@dataclass(slots=True)
class OthersLoad:
    """What was ``told`` was so ``told_at``, in seconds since the epoch; tokens of this process came ``heard_at``.

    The older what is told the less it counts (as in M. Dahlin, "Interpreting Stale Load Information", 1999); instead
    of it a load is expected that is usual there, so that ingresses with old news come to prefer different engines.
    Tokens are news, too: while a sequence of this process draws some there, a pause shows a step that computes prompts.
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
        """Whether anybody else uses the engine, or did so of late."""
        return self.told.sequences > 0 or self.usual_sequences > _FEW

    def tell(self, told: OtherClients, at: float) -> None:
        """So it is from now on; what was told before has been so until now."""
        if (lasted_s := at - self.told_at) > 0:
            share = min(1.0, lasted_s / _MEMORY_S)
            self.usual_tokens += share * (self.told.queued_tokens - self.usual_tokens)
            self.usual_sequences += share * (self.told.sequences - self.usual_sequences)
        self.told, self.told_at = told, at

    def hear(self, now: float, goes_on: bool, decode_s: float) -> None:
        """Tokens came; of sequences that had some before, if it ``goes_on``. Other steps take about ``decode_s``."""
        self.pause_s = now - self.heard_at if goes_on else 0.0
        self.heard_at = now
        if self.pause_s > _LONG_STEPS * decode_s:
            self.long_s += (_LONG_WEIGHT if self.long_s else 1.0) * (self.pause_s - self.long_s)

    def doubt(self, now: float, service_s: float) -> float:
        """0 to 1: how little the queue that was told says of the one there is; a request takes ``service_s``."""
        return self._doubt(now, service_s / _QUEUE_PACE)

    def sequences(self, now: float, service_s: float) -> float:
        doubt = self._doubt(now, service_s)
        return self.told.sequences * (1.0 - doubt) + self.usual_sequences * doubt

    def _doubt(self, now: float, period_s: float) -> float:
        age = max(0.0, now - self.told_at)
        return min(1.0, age / period_s) if period_s > 0 else 1.0

    def told_s(self, now: float, token_s: float) -> float:
        """Seconds that the prompts they had queued still take: what was told is computed since then."""
        return max(0.0, self.told.queued_tokens * token_s - max(0.0, now - self.told_at))

    def unheard_s(self, doubt: float, token_s: float) -> float:
        """Seconds that prompts will take that came since, where no tokens show it."""
        return self.usual_tokens * token_s * doubt

    def heard_s(self, now: float, decode_s: float) -> float:
        """The same where tokens come, none in steps as short as those that only decode."""
        return self.long_s if max(self.pause_s, now - self.heard_at) > _LONG_STEPS * decode_s else 0.0
