"""What AsyncLLM yields to its callers, inside one process; deltas, so that a caller who is slow gets them merged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from raylm.messages import FinishReason, Logprobs

AnswerFinishReason = FinishReason | Literal["tool_calls"]


@dataclass(slots=True)
class TokenLogprob:
    """One token's log-probability (natural, raw model distribution) and the most likely tokens at its place."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]] = field(default_factory=list)


def read_logprobs(columns: Logprobs) -> Iterator[TokenLogprob]:
    """Each token's entry; where none was asked for, it has the token id -1 and the rank 0."""
    offset = 0
    for count, rank in zip(columns.counts, columns.ranks, strict=True):
        ids, values = columns.token_ids[offset : offset + count], columns.logprobs[offset : offset + count]
        offset += count
        if ids:
            yield TokenLogprob(ids[0], values[0], rank, list(zip(ids[1:], values[1:], strict=True)))
        else:
            yield TokenLogprob(-1, 0.0, 0)


@dataclass(slots=True)
class ToolCallDelta:
    """What is new of call ``index`` of a sequence, from 0; ``id`` and ``name`` come on the call's first delta only.

    ``arguments`` is the next piece of a JSON text.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""

    def add(self, later: ToolCallDelta) -> None:
        """Take in the next piece of the arguments, without copying those that are there."""
        arguments, self.arguments = self.arguments, ""
        arguments += later.arguments
        self.arguments = arguments


@dataclass(slots=True)
class CompletionDelta:
    """What is new of one of the n sequences of a request since the caller last looked.

    ``text`` is final: a stop string's beginning is held back until it is decided. ``token_ids`` may run ahead of
    ``text``. ``logprobs`` is aligned with ``token_ids`` or None. ``finish_reason`` is set on the last delta only;
    ``stop_reason`` is then the stop string or stop token id that matched, None for EOS.

    Where the request has an AnswerFormat, reasoning and tool calls are no part of ``text``: they are in ``reasoning``
    and ``tool_calls`` (in order, at most one entry for a call), and ``reasoning_tokens`` of the tokens are reasoning.
    In the answer, the reasoning of a delta stands before its text, and its text before its calls.
    ``text_logprobs`` are the entries of the tokens that ``text`` is made of, if log-probabilities were asked for.
    A sequence that made calls and ended by itself has the finish reason "tool_calls".

    A ``told`` delta is what the caller had before (RequestHead.told); it is never merged with news.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: AnswerFinishReason | None = None
    stop_reason: int | str | None = None
    reasoning: str = ""
    reasoning_tokens: int = 0
    tool_calls: list[ToolCallDelta] | None = None
    told: bool = False
    text_logprobs: list[TokenLogprob] | None = None

    def takes(self, later: CompletionDelta) -> bool:
        """Whether the sequence's next delta can be added to this one without a change of the order of its parts."""
        return self.told == later.told and not (self.tool_calls and (later.text or later.reasoning))

    def by_token(self) -> list[CompletionDelta]:
        """The deltas of the single tokens, as they are before a text is read; of no more than one it is itself."""
        if len(self.token_ids) < 2:
            return [self]
        singles = []
        for at, token_id in enumerate(self.token_ids):
            entry = self.logprobs and self.logprobs[at : at + 1]
            singles.append(CompletionDelta(self.index, "", [token_id], entry, told=self.told))
        singles[-1].stop_reason = self.stop_reason
        return singles

    def add(self, later: CompletionDelta) -> None:
        """Take in the sequence's next delta; the lists of ``later`` may become this one's own."""
        # A text that only a local name holds grows in place; otherwise all of a long answer is copied for each token.
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
        self.tool_calls = join_calls(self.tool_calls, later.tool_calls)
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason


def join_calls(first: list[ToolCallDelta] | None, later: list[ToolCallDelta] | None) -> list[ToolCallDelta] | None:
    """What is new by two deltas of one sequence; takes over both lists."""
    if not first or not later:
        return first or later
    if first[-1].index == later[0].index:
        first[-1].add(later.pop(0))
    first += later
    return first


@dataclass(slots=True)
class RequestOutput:
    """What is new of one request: the deltas of its sequences; ``finished`` on the last output.

    A sequence has one delta, but for two cases: what was ``told`` has its own, before the news; and text behind calls
    begins a new one, as a delta's text stands before its calls.

    ``prompt_logprobs`` (None if not asked for) has one entry a prompt token, None for the first; it is complete in
    the first output. ``num_cached_tokens`` counts prompt tokens that the prefix cache served. ``vector`` is what a
    prompt was pooled to, float32 bytes in the machine's order: the only output then, without deltas. ``place`` is the
    request's among those that are read together.
    """

    request_id: str
    prompt_token_ids: list[int]
    deltas: list[CompletionDelta]
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finished: bool = False
    vector: bytes | None = None
    place: int = 0
