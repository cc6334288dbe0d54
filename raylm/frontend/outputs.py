"""The outputs of AsyncLLM within one process. They are deltas, which merge while a caller is slow."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from raylm.messages import FinishReason, Logprobs

AnswerFinishReason = FinishReason | Literal["tool_calls"]


class TokenLogprob:
    """One token's log-probability (natural, raw model distribution) and the most likely tokens in its position.

    ``top`` has (token id, log-probability) of these tokens, in descending order. The numbers are stored in two arrays:
    as Python objects they would take five times the memory, and an answer may have hundreds of thousands.
    """

    __slots__ = ("_logprobs", "_token_ids", "rank")

    def __init__(self, token_id: int, logprob: float, rank: int, top: Sequence[tuple[int, float]] = ()) -> None:
        self._token_ids = array("i", [token_id, *(other for other, _ in top)])
        self._logprobs = array("d", [logprob, *(value for _, value in top)])
        self.rank = rank

    @classmethod
    def of_columns(cls, token_ids: list[int], logprobs: list[float], rank: int) -> TokenLogprob:
        """The entry of a token, which is the first of ``token_ids``; the others are the most likely tokens."""
        entry = cls.__new__(cls)
        entry._token_ids, entry._logprobs, entry.rank = array("i", token_ids), array("d", logprobs), rank
        return entry

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


def read_logprobs(columns: Logprobs) -> Iterator[TokenLogprob]:
    """Iterate over each token's entry. A token without log-probabilities has token id -1 and rank 0."""
    offset = 0
    for count, rank in zip(columns.counts, columns.ranks, strict=True):
        ids, values = columns.token_ids[offset : offset + count], columns.logprobs[offset : offset + count]
        offset += count
        if ids:
            yield TokenLogprob.of_columns(ids, values, rank)
        else:
            yield TokenLogprob(-1, 0.0, 0)


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
    logprobs: list[TokenLogprob] | None = None
    finish_reason: AnswerFinishReason | None = None
    stop_reason: int | str | None = None
    reasoning: str = ""
    reasoning_tokens: int = 0
    tokens_before_answer: int = 0
    tool_calls: list[ToolCallDelta] | None = None
    told: bool = False
    text_logprobs: list[TokenLogprob] | None = None

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
                self.logprobs = []
            self.logprobs += later.logprobs
        if later.text_logprobs is not None:
            if self.text_logprobs is None:
                self.text_logprobs = []
            self.text_logprobs += later.text_logprobs
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
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finished: bool = False
    vector: bytes | None = None
    place: int = 0
