"""The outputs of AsyncLLM within one process. They are deltas, which merge while a caller is slow."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Literal, overload

from raylm.messages import FinishReason, Logprobs

AnswerFinishReason = FinishReason | Literal["tool_calls"]


class TokenLogprob:
    """One token's log-probability (natural, raw model distribution) and the most likely tokens in its position.

    ``top`` has (token id, log-probability) of these tokens, in descending order. An entry without log-probabilities has
    token id -1 and rank 0.
    """

    __slots__ = ("_logprobs", "_token_ids", "rank")

    def __init__(self, token_id: int, logprob: float, rank: int, top: Sequence[tuple[int, float]] = ()) -> None:
        self._token_ids = array("i", [token_id, *(other for other, _ in top)])
        self._logprobs = array("d", [logprob, *(value for _, value in top)])
        self.rank = rank

    @property
    def token_id(self) -> int:
        return self._token_ids[0]

    @property
    def logprob(self) -> float:
        return self._logprobs[0]

    @property
    def num_top(self) -> int:
        """The length of ``top``."""
        return len(self._token_ids) - 1

    @property
    def top(self) -> list[tuple[int, float]]:
        return list(zip(self._token_ids[1:], self._logprobs[1:], strict=True))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenLogprob):
            return NotImplemented
        one, two = ((entry._token_ids, entry._logprobs, entry.rank) for entry in (self, other))
        return one == two

    __hash__ = None  # type: ignore[assignment]  # as of a dataclass

    def __repr__(self) -> str:
        return f"TokenLogprob({self.token_id}, {self.logprob}, {self.rank}, {self.top})"


class TokenLogprobs(Sequence[TokenLogprob]):
    """The log-probabilities of consecutive tokens. A TokenLogprob is made when it is read.

    The numbers of all tokens are in four arrays, in blocks that the system has back when they are freed. An answer may
    have hundreds of thousands of entries. As small objects they would leave Python's memory in pieces.
    """

    __slots__ = ("_ends", "_logprobs", "_ranks", "_token_ids")

    def __init__(self, entries: Iterable[TokenLogprob] = ()) -> None:
        self._ends = array("q")  # of each token's numbers in _token_ids and _logprobs
        self._ranks = array("i")
        self._token_ids, self._logprobs = array("i"), array("d")
        for entry in entries:
            self.append(entry)

    @classmethod
    def of_columns(cls, columns: Logprobs) -> TokenLogprobs:
        """The entries of an engine's columns."""
        ends, ranks = array("q", accumulate(columns.counts)), array("i", columns.ranks)
        return cls._of(ends, ranks, array("i", columns.token_ids), array("d", columns.logprobs))

    @classmethod
    def _of(cls, ends: array[int], ranks: array[int], token_ids: array[int], logprobs: array[float]) -> TokenLogprobs:
        found = cls.__new__(cls)
        found._ends, found._ranks, found._token_ids, found._logprobs = ends, ranks, token_ids, logprobs
        return found

    def append(self, entry: TokenLogprob) -> None:
        self._token_ids += entry._token_ids
        self._logprobs += entry._logprobs
        self._ranks.append(entry.rank)
        self._ends.append(len(self._token_ids))

    def extend(self, later: TokenLogprobs) -> None:
        base = len(self._token_ids)
        self._ends.extend([base + end for end in later._ends])
        self._ranks += later._ranks
        self._token_ids += later._token_ids
        self._logprobs += later._logprobs

    @overload
    def __getitem__(self, index: int) -> TokenLogprob: ...

    @overload
    def __getitem__(self, index: slice) -> TokenLogprobs: ...

    def __getitem__(self, index: int | slice) -> TokenLogprob | TokenLogprobs:
        """One entry, or a copy of several entries."""
        if isinstance(index, int):
            place = range(len(self._ends))[index]
            return self._entry(self._start(place), self._ends[place], self._ranks[place])
        start, _, step = index.indices(len(self._ends))
        if step != 1:
            return TokenLogprobs(self[place] for place in range(len(self._ends))[index])
        ends, base = self._ends[index], self._start(start)
        part = slice(base, ends[-1] if ends else base)
        if base:
            ends = array("q", [end - base for end in ends])
        return self._of(ends, self._ranks[index], self._token_ids[part], self._logprobs[part])

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[TokenLogprob]:
        starts = chain((0,), self._ends)
        return map(self._entry, starts, self._ends, self._ranks)

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, TokenLogprobs) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as of a list

    def __repr__(self) -> str:
        return f"TokenLogprobs({list(self)})"

    def _start(self, place: int) -> int:
        return self._ends[place - 1] if place else 0

    def _entry(self, start: int, end: int, rank: int) -> TokenLogprob:
        if start == end:
            return TokenLogprob(-1, 0.0, 0)
        entry = TokenLogprob.__new__(TokenLogprob)
        entry._token_ids, entry._logprobs, entry.rank = self._token_ids[start:end], self._logprobs[start:end], rank
        return entry


class PromptLogprobs(Sequence[TokenLogprob | None]):
    """An entry for each token of a prompt. Tokens without log-probabilities have None, as the first token."""

    __slots__ = ("_known", "_num_missing")

    def __init__(self, known: TokenLogprobs, num_tokens: int) -> None:
        """``known`` are the entries of the last of ``num_tokens`` tokens."""
        self._known, self._num_missing = known, num_tokens - len(known)

    @overload
    def __getitem__(self, index: int) -> TokenLogprob | None: ...

    @overload
    def __getitem__(self, index: slice) -> list[TokenLogprob | None]: ...

    def __getitem__(self, index: int | slice) -> TokenLogprob | list[TokenLogprob | None] | None:
        places = range(len(self))[index]
        return self._at(places) if isinstance(places, int) else [self._at(place) for place in places]

    def __len__(self) -> int:
        return self._num_missing + len(self._known)

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, PromptLogprobs) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as of a list

    def _at(self, place: int) -> TokenLogprob | None:
        if place < self._num_missing:
            return None
        entry = self._known[place - self._num_missing]
        return entry if entry.rank else None


@dataclass(slots=True)
class ToolCallDelta:
    """New text of call ``index`` (from 0) of a sequence. Only the first delta of a call has ``id`` and ``name``.

    ``arguments`` is the next part of a JSON text.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""

    def add(self, later: ToolCallDelta) -> None:
        """Append the next part of the arguments, without copying the existing text."""
        arguments, self.arguments = self.arguments, ""
        arguments += later.arguments
        self.arguments = arguments


@dataclass(slots=True)
class CompletionDelta:
    """New output of one of the n sequences of a request, since the caller's last read.

    ``text`` is final: text that may be the beginning of a stop string is held back. ``token_ids`` may be ahead of
    ``text``. ``logprobs`` has an entry for each of ``token_ids``, or is None. ``finish_reason`` is set only on the last
    delta; ``stop_reason`` is then the matched stop string or stop token id, None for EOS.

    If the request has an AnswerFormat, ``text`` excludes reasoning and tool calls. They are in ``reasoning`` and
    ``tool_calls`` (in order, at most one entry for each call), and ``reasoning_tokens`` counts the tokens of reasoning.
    The first ``tokens_before_answer`` of ``token_ids`` are these tokens and their markers.
    The order of the answer is: the reasoning of a delta, its text, its calls. ``text_logprobs`` are the entries of the
    tokens of ``text``, if log-probabilities were requested. A sequence that made calls and ended normally has the
    finish reason "tool_calls".

    A ``told`` delta has tokens that the caller already has (RequestHead.told). It is never merged with new tokens.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: TokenLogprobs | None = None
    finish_reason: AnswerFinishReason | None = None
    stop_reason: int | str | None = None
    reasoning: str = ""
    reasoning_tokens: int = 0
    tokens_before_answer: int = 0
    tool_calls: list[ToolCallDelta] | None = None
    told: bool = False
    text_logprobs: TokenLogprobs | None = None

    def takes(self, later: CompletionDelta) -> bool:
        """Whether ``add`` of the next delta keeps the order of the parts of the answer."""
        return self.told == later.told and not (self.tool_calls and (later.text or later.reasoning))

    def by_token(self) -> list[CompletionDelta]:
        """One delta for each token, before text is parsed. Returns ``self`` if there is at most one token."""
        if len(self.token_ids) < 2:
            return [self]
        singles = []
        for at, token_id in enumerate(self.token_ids):
            entry = self.logprobs and self.logprobs[at : at + 1]
            singles.append(CompletionDelta(self.index, "", [token_id], entry, told=self.told))
        singles[-1].stop_reason = self.stop_reason
        return singles

    def add(self, later: CompletionDelta) -> None:
        """Append the next delta of the sequence. Lists of ``later`` may become lists of this delta."""
        # A string grows in place if only a local name refers to it. Otherwise each token would copy a long answer.
        text, self.text = self.text, ""
        text += later.text
        self.text = text
        reasoning, self.reasoning = self.reasoning, ""
        reasoning += later.reasoning
        self.reasoning = reasoning
        self.token_ids += later.token_ids
        if later.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = TokenLogprobs()
            self.logprobs.extend(later.logprobs)
        if later.text_logprobs is not None:
            if self.text_logprobs is None:
                self.text_logprobs = TokenLogprobs()
            self.text_logprobs.extend(later.text_logprobs)
        self.reasoning_tokens += later.reasoning_tokens
        self.tokens_before_answer += later.tokens_before_answer
        self.tool_calls = join_calls(self.tool_calls, later.tool_calls)
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason


def join_calls(first: list[ToolCallDelta] | None, later: list[ToolCallDelta] | None) -> list[ToolCallDelta] | None:
    """Join the calls of two successive deltas of a sequence. Both lists may be modified."""
    if not first or not later:
        return first or later
    if first[-1].index == later[0].index:
        first[-1].add(later.pop(0))
    first += later
    return first


@dataclass(slots=True)
class RequestOutput:
    """New output of one request: the deltas of its sequences. ``finished`` is set on the last output.

    A sequence has one delta, with two exceptions. Told tokens have their own delta, before new tokens. Text after calls
    begins a new delta, because the text of a delta comes before its calls.

    ``prompt_logprobs`` (None if not requested) has one entry for each prompt token, None for the first; it is complete
    in the first output. ``num_cached_tokens`` counts prompt tokens that the prefix cache provided. ``vector`` is the
    pooled vector, float32 bytes in the machine's byte order; a request for a vector has one output, without deltas.
    ``place`` is the request's index among requests that are read together.
    """

    request_id: str
    prompt_token_ids: list[int]
    deltas: list[CompletionDelta]
    num_cached_tokens: int = 0
    prompt_logprobs: PromptLogprobs | None = None
    finished: bool = False
    vector: bytes | None = None
    place: int = 0
