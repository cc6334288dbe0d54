"""What the endpoints make of AsyncLLM's outputs: gathered whole, several prompts interleaved, and counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from raylm.errors import RayLMError
from raylm.frontend import CompletionDelta

if TYPE_CHECKING:
    from raylm.frontend import RequestOutput, TokenLogprob

    Outputs = AsyncGenerator[RequestOutput, None]
    _Item = tuple[int, RequestOutput] | Exception | None

_STARTED_AT_ONCE = 32
_UNFINISHED = "The engine ended this request before it was finished."


@dataclass(slots=True)
class Usage:
    """Tokens of one HTTP request over all its prompts and choices."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


def num_details(deltas: Sequence[CompletionDelta]) -> int:
    """Roughly how many things the JSON of these deltas has: one a token, and one for each alternative to it."""
    return sum(1 + len(delta.token_ids) + _num_shown(delta.logprobs or ()) for delta in deltas)


def num_prompt_details(output: RequestOutput) -> int:
    """As ``num_details``, of the prompt's log-probabilities."""
    return _num_shown(output.prompt_logprobs or ())


def _num_shown(entries: Sequence[TokenLogprob | None]) -> int:
    first = next((entry for entry in entries if entry is not None), None)
    return len(entries) * (1 + len(first.top)) if first is not None else 0


async def gather(streams: Sequence[Outputs], n: int, usage: Usage) -> list[RequestOutput]:
    """Read the requests of ``streams``, of ``n`` sequences each, to their end; of each comes one output with it all."""
    choices = [[CompletionDelta(index) for index in range(n)] for _ in streams]
    last: dict[int, RequestOutput] = {}
    async with aclosing(interleave(streams, usage)) as outputs:
        async for place, output in outputs:
            last[place] = output
            for delta in output.deltas:
                choices[place][delta.index].add(delta)
    return [replace(last[place], deltas=deltas) for place, deltas in enumerate(choices)]


async def interleave(streams: Sequence[Outputs], usage: Usage) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """(place of the stream, output) of all streams as they come, counted in ``usage``; closes them when it is closed.

    Raises:
        Exception: what the first failing stream raised.
        RayLMError: a sequence did not end by itself, or a stream without its last output; a short answer would lie.
    """
    begun: set[int] = set()
    unfinished = len(streams)
    async with aclosing(_merge(streams)) as items:
        async for place, output in items:
            if place not in begun:
                begun.add(place)
                usage.prompt_tokens += len(output.prompt_token_ids)
                usage.cached_tokens += output.num_cached_tokens
            for delta in output.deltas:
                if delta.finish_reason in ("abort", "error"):
                    raise RayLMError(_UNFINISHED)
                usage.completion_tokens += len(delta.token_ids)
                usage.reasoning_tokens += delta.reasoning_tokens
            unfinished -= output.finished
            yield place, output
    if unfinished:
        raise RayLMError(_UNFINISHED)


async def _merge(streams: Sequence[Outputs]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for output in only:
                yield 0, output
        return
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
    ended: Exception | None = None
    try:
        async with aclosing(stream) as outputs:
            async for output in outputs:
                await queue.put((place, output))
    except Exception as error:
        ended = error
    await queue.put(ended)
