"""Parking: keeps the tokens of requests whose client was lost, so that another client can continue their streams."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from raylm.engine.sequence import RequestState, Sequence
from raylm.messages import EngineCoreRequest, FinishReason, ParkedTokens, ServiceLevel

MOST_BYTES = 64 * 2**20
PERIOD_S = 0.2  # between two calls of ``pass_period``
WHOLE_PERIODS = 15  # for which complete answers are kept: the loss of their client may not be known yet
_BYTES_A_TOKEN = 40  # approximate size of an integer in a list
_BYTES_A_REQUEST = 4096

_Drawn = tuple[list[int], FinishReason | None, int | None]


@dataclass(slots=True)
class _Open:
    """An open request, and the tokens of its ended sequences by index."""

    state: RequestState
    ended: dict[int, _Drawn] = field(default_factory=dict)

    def tokens(self) -> ParkedTokens:
        drawn = self.ended | {seq.index: _drawn_by(seq) for seq in self.state.open}
        every = [drawn.get(index, ([], None, None)) for index in range(self.state.request.params.n)]
        return ParkedTokens([ids for ids, _, _ in every], [why for _, why, _ in every], [at for _, _, at in every])


@dataclass(frozen=True, slots=True)
class _Parked:
    request: EngineCoreRequest
    adapter: int
    tokens: ParkedTokens
    is_whole: bool
    since: int  # period

    @property
    def num_bytes(self) -> int:
        length = len(self.request.prompt_token_ids) + self.tokens.num_tokens
        return _BYTES_A_REQUEST + length * _BYTES_A_TOKEN


class Parking:
    """Owns the tokens of ended requests that can be continued by name. Beyond MOST_BYTES the oldest are dropped.

    Open requests are registered by name too, because a client may return before the engine notices that its ingress
    replica was lost. Tokens can be taken once. Time is counted in periods: the caller calls ``pass_period``.
    """

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}
        self._parked: dict[str, _Parked] = {}
        self._now = 0
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._parked)

    def enter(self, state: RequestState) -> None:
        """Register an open request."""
        if name := state.request.resumable_as:
            self._open[name] = _Open(state)

    def end(self, seq: Sequence) -> None:
        """Keep the tokens of a sequence that has ended."""
        if (known := self._known(seq.state)) is not None and seq.num_generated:
            known.ended[seq.index] = _drawn_by(seq)

    def leave(self, state: RequestState, *, is_whole: bool) -> None:
        """Park the tokens of a request that has ended, after its sequences.

        ``is_whole`` says that every sequence ended by itself rather than by an abort.
        """
        if (known := self._known(state)) is None:
            return
        name = state.request.resumable_as
        del self._open[name]
        if not known.ended:
            return
        self._drop(name)
        parked = _Parked(state.request, state.adapter, known.tokens(), is_whole, self._now)
        self._parked[name] = parked
        self.num_bytes += parked.num_bytes
        while self.num_bytes > MOST_BYTES:
            self._drop(next(iter(self._parked)))

    def forget(self, state: RequestState) -> None:
        """Drop the tokens of an open request: it must not be continued."""
        if self._known(state) is not None:
            del self._open[state.request.resumable_as]

    def take(self, request: EngineCoreRequest, adapter: int) -> ParkedTokens | None:
        """Take the tokens drawn for an identical request under its name. None if there are none."""
        name = request.resumable_as
        if (known := self._open.pop(name, None)) is not None:
            begun, begun_with, tokens = known.state.request, known.state.adapter, known.tokens()
        elif (parked := self._drop(name)) is not None:
            begun, begun_with, tokens = parked.request, parked.adapter, parked.tokens
        else:
            return None
        return tokens if tokens.num_tokens and (_asked(begun), begun_with) == (_asked(request), adapter) else None

    def pass_period(self, most: int) -> None:
        """Count one period. Incomplete answers stay for ``most`` periods, complete ones for at most WHOLE_PERIODS."""
        self._now += 1
        for name, parked in list(self._parked.items()):
            if self._now - parked.since >= (min(most, WHOLE_PERIODS) if parked.is_whole else most):
                self._drop(name)

    def _known(self, state: RequestState) -> _Open | None:
        known = self._open.get(state.request.resumable_as)
        return known if known is not None and known.state is state else None

    def _drop(self, name: str) -> _Parked | None:
        parked = self._parked.pop(name, None)
        if parked is not None:
            self.num_bytes -= parked.num_bytes
        return parked


def _drawn_by(seq: Sequence) -> _Drawn:
    reason, stop_reason = seq.ended_by or (None, None)
    return list(seq.token_ids[seq.num_prompt_tokens :]), reason, stop_reason


def _asked(request: EngineCoreRequest) -> EngineCoreRequest:
    """The request without the fields on which its tokens do not depend."""
    service = ServiceLevel()
    return replace(
        request, key=0, request_id="", arrival_time=0.0, uncached_tokens=None, drawn=(), service=service, priority=0
    )
