"""What the endpoints make of AsyncLLM's outputs: gathered whole, several prompts interleaved, and counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raylm.errors import RayLMError
from raylm.frontend import CompletionDelta

if TYPE_CHECKING:
    from raylm.frontend import RequestOutput, TokenLogprob

    Outputs = AsyncGenerator[RequestOutput, None]
    _Item = tuple[int, RequestOutput] | Exception | None


_STARTED_AT_ONCE = 32


@dataclass(slots=True)
class Usage:
    """Tokens of one HTTP request over all its prompts and choices."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    def count_prompt(self, output: RequestOutput) -> None:
        """Count the prompt of a request; call it once, with the request's first output."""
        self.prompt_tokens += len(output.prompt_token_ids)
        self.cached_tokens += output.num_cached_tokens

    def count_delta(self, delta: CompletionDelta) -> None:
        self.completion_tokens += len(delta.token_ids)
        self.reasoning_tokens += delta.reasoning_tokens

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


@dataclass(slots=True)
class Generation:
    """Everything that one prompt's request produced."""

    choices: list[CompletionDelta]
    prompt_token_ids: list[int] = field(default_factory=list)
    seen: bool = False
    prompt_logprobs: list[TokenLogprob | None] | None = None

    @property
    def num_details(self) -> int:
        """Roughly how many things an answer that shows all of it has."""
        entries = self.prompt_logprobs or ()
        first = next((entry for entry in entries if entry is not None), None)
        shown = len(entries) * (1 + len(first.top)) if first is not None else 0
        return shown + num_details(self.choices)


def num_details(sequences: Sequence[CompletionDelta]) -> int:
    """Roughly how many things the JSON of these deltas has: one a token, and one for each alternative to it."""
    details = 0
    for delta in sequences:
        alternatives = len(delta.logprobs[0].top) + 1 if delta.logprobs else 0
        details += 1 + len(delta.token_ids) * (1 + alternatives)
    return details


def finish_reason(delta: CompletionDelta) -> str | None:
    """OpenAI's finish_reason of ``delta``.

    Raises:
        RayLMError: the sequence did not end by itself, which no finish_reason may claim.
    """
    if delta.finish_reason in ("abort", "error"):
        raise RayLMError("The engine ended this request before it was finished.")
    return delta.finish_reason


def extras(with_token_ids: bool | None, token_ids: Sequence[int], stop_reason: int | str | None) -> dict[str, Any]:
    """The fields of a choice beyond OpenAI's: ``token_ids`` if asked for, ``stop_reason`` if there is one."""
    found: dict[str, Any] = {"token_ids": token_ids} if with_token_ids else {}
    return found if stop_reason is None else found | {"stop_reason": stop_reason}


async def gather(streams: Sequence[Outputs], n: int, usage: Usage) -> list[Generation]:
    """Read the requests of ``streams``, of ``n`` sequences each, to their end."""
    found = [Generation([CompletionDelta(index) for index in range(n)]) for _ in streams]
    async with aclosing(interleave(streams)) as outputs:
        async for place, output in outputs:
            generation = found[place]
            if not generation.seen:
                usage.count_prompt(output)
                generation.seen = True
                generation.prompt_token_ids = output.prompt_token_ids
                generation.prompt_logprobs = output.prompt_logprobs
            for delta in output.deltas:
                finish_reason(delta)  # raises where the engine gave up
                generation.choices[delta.index].add(delta)
                usage.count_delta(delta)
    return found


async def interleave(streams: Sequence[Outputs]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """(place of the stream, output) of all streams as they come; closes them when it is closed.

    Raises:
        Exception: what the first failing stream raised, or RayLMError if one ended without a last output.
    """
    queue: asyncio.Queue[_Item] = asyncio.Queue(len(streams))  # bounded: a slow reader lets outputs merge upstream
    tasks: list[asyncio.Task[None]] = []
    try:
        for place, stream in enumerate(streams):
            tasks.append(asyncio.create_task(_pump(place, stream, queue)))
            if len(tasks) % _STARTED_AT_ONCE == 0:
                await asyncio.sleep(0)  # each takes a part of a millisecond to reach its engine
        open_streams = len(streams)
        while open_streams:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                open_streams -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(place: int, stream: Outputs, queue: asyncio.Queue[_Item]) -> None:
    finished = False
    try:
        async with aclosing(stream) as outputs:
            async for output in outputs:
                finished = output.finished
                await queue.put((place, output))
        check_finished(finished)
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(None)


def check_finished(finished: bool) -> None:
    """A stream of outputs that ends without its last one is an error, never a short answer.

    Raises:
        RayLMError: it did.
    """
    if not finished:
        raise RayLMError("The engine ended this request before it was finished.")
