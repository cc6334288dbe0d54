"""What AsyncLLM yields to its callers, inside one process; deltas, so that a caller who is slow gets them merged."""

from __future__ import annotations

from dataclasses import dataclass, field

from raylm.messages import FinishReason


@dataclass(slots=True)
class TokenLogprob:
    """One token's log-probability (natural, raw model distribution) and the most likely tokens at its place."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass(slots=True)
class CompletionDelta:
    """What is new of one of the n sequences of a request since the caller last looked.

    ``text`` is final: a stop string's beginning is held back until it is decided. ``token_ids`` may run ahead of
    ``text``. ``logprobs`` is aligned with ``token_ids`` or None. ``finish_reason`` is set on the last delta only;
    ``stop_reason`` is then the stop string or stop token id that matched, None for EOS.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestOutput:
    """News of one request: the deltas of its sequences, at most one a sequence; ``finished`` on the last one.

    ``prompt_logprobs`` (None if not asked for) has one entry a prompt token, None for the first; it is complete in
    the first output. ``num_cached_tokens`` counts prompt tokens that the prefix cache served. ``vector`` is what a
    prompt was pooled to, float32 bytes in the machine's order: the only output then, without deltas.
    """

    request_id: str
    prompt_token_ids: list[int]
    deltas: list[CompletionDelta]
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finished: bool = False
    vector: bytes | None = None
