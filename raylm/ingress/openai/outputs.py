"""Helpers for endpoints that read AsyncLLM's outputs: gather whole answers, merge several prompts, count usage."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from raylm.errors import RayLMError
from raylm.frontend import CompletionDelta

if TYPE_CHECKING:
    from raylm.frontend import RequestOutput, TokenLogprob

    Outputs = AsyncGenerator[RequestOutput, None]
    _Item = RequestOutput | Exception | None

_STARTED_AT_ONCE = 32
_UNFINISHED = "The engine ended this request before it was finished."


@dataclass(slots=True)
class Usage:
    """Tokens of one HTTP request, over all prompts and choices. ``unfinished`` counts the open prompts."""

    unfinished: int = 1
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    _begun: set[int] = field(default_factory=set)

    def count(self, output: RequestOutput) -> None:
        """Count an output. The first output of a prompt counts its prompt.

        Raises:
            RayLMError: a sequence was aborted or failed, for which there is no finish_reason.
        """
        if output.place not in self._begun:
            self.begin(output)
        for delta in output.deltas:
            if delta.finish_reason in ("abort", "error"):
                raise RayLMError(_UNFINISHED)
            self.add(delta)
        self.unfinished -= output.finished

    def begin(self, output: RequestOutput) -> None:
        """Count the prompt, if this is its first output."""
        if output.place not in self._begun:
            self._begun.add(output.place)
            self.prompt_tokens += len(output.prompt_token_ids)
            self.cached_tokens += output.num_cached_tokens

    def add(self, delta: CompletionDelta) -> None:
        """Count the tokens of a delta."""
        self.completion_tokens += len(delta.token_ids)
        self.reasoning_tokens += delta.reasoning_tokens

    def check_finished(self) -> None:
        """Check that all streams have ended with their last output, so that no answer is cut.

        Raises:
            RayLMError: a stream ended early.
        """
        if self.unfinished:
            raise RayLMError(_UNFINISHED)

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


def num_details(deltas: Sequence[CompletionDelta]) -> int:
    """About the number of items in the JSON of these deltas: one for each token and each alternative."""
    return sum(1 + len(delta.token_ids) + _num_shown(delta.logprobs or ()) for delta in deltas)


def num_prompt_details(output: RequestOutput) -> int:
    """As ``num_details``, for the prompt's log-probabilities."""
    return _num_shown(output.prompt_logprobs or ())


def _num_shown(entries: Sequence[TokenLogprob | None]) -> int:
    first = next((entry for entry in entries if entry is not None), None)
    return len(entries) * (1 + first.num_top) if first is not None else 0


async def gather(streams: Sequence[Outputs], n: int, usage: Usage, at_once: float) -> list[RequestOutput]:
    """Read ``streams`` to their end, of ``n`` sequences each. Returns one complete output for each stream.

    ``at_once`` is as in ``merge``.
    """
    choices = [[CompletionDelta(index) for index in range(n)] for _ in streams]
    last: dict[int, RequestOutput] = {}
    async with aclosing(merge(streams, len(streams), at_once)) as outputs:
        async for output in outputs:
            usage.count(output)
            last[output.place] = output
            for delta in output.deltas:
                choices[output.place][delta.index].add(delta)
    usage.check_finished()
    return [replace(last[place], deltas=deltas) for place, deltas in enumerate(choices)]


def merge(streams: Iterable[Outputs], num_streams: int, at_once: float) -> Outputs:
    """Iterate over the outputs of all ``num_streams`` streams as they arrive, with the ``place`` of their stream.

    Streams are started in order. At most ``at_once`` started streams have no output yet. An iterator that makes each
    stream when it is started saves memory. Closing the result closes all started streams.

    Raises:
        Exception: the exception of the first stream that failed.
    """
    if num_streams == 1:
        return next(iter(streams))
    return _interleave(streams, num_streams, int(min(at_once, num_streams)))


async def _interleave(streams: Iterable[Outputs], num_streams: int, at_once: int) -> Outputs:
    queue: asyncio.Queue[_Item] = asyncio.Queue(num_streams)  # bounded, so that outputs merge while the reader is slow
    pumps: set[asyncio.Task[None]] = set()  # running tasks only: a task takes a kilobyte, and there may be thousands
    starting = asyncio.create_task(_start(streams, queue, at_once, pumps))
    try:
        open_streams = num_streams
        while open_streams:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                open_streams -= 1
            else:
                yield item
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        for pump in (running := [*pumps]):
            pump.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _start(
    streams: Iterable[Outputs], queue: asyncio.Queue[_Item], at_once: int, pumps: set[asyncio.Task[None]]
) -> None:
    room = asyncio.Semaphore(at_once)
    for place, stream in enumerate(streams):
        await room.acquire()
        pump = asyncio.create_task(_pump(place, stream, queue, room))
        pumps.add(pump)
        pump.add_done_callback(pumps.discard)
        if place % _STARTED_AT_ONCE == 0:
            await asyncio.sleep(0)  # each takes part of a millisecond to reach its engine


async def _pump(place: int, stream: Outputs, queue: asyncio.Queue[_Item], room: asyncio.Semaphore) -> None:
    """Put the outputs of a stream, and then its error or None, on the queue. Releases its place in ``room``."""
    ended: Exception | None = None
    waits = True
    try:
        async with aclosing(stream) as outputs:
            async for output in outputs:
                if waits:
                    waits = False
                    room.release()
                output.place = place
                await queue.put(output)
    except Exception as error:
        ended = error
    if waits:
        room.release()
    await queue.put(ended)
