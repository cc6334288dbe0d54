"""OutputQueue: what one caller has not read yet; it holds one item at most, so a slow caller's deltas merge."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from raylm.errors import RayLMError
from raylm.frontend.outputs import CompletionDelta, RequestOutput, TokenLogprob
from raylm.frontend.threads import offload
from raylm.messages import EngineCoreRequest

PromptLogprobs = list[TokenLogprob | None]


class OutputQueue:
    """One writer (OutputProcessor) and one reader (the caller's generator), on the same event loop."""

    def __init__(self, request: EngineCoreRequest) -> None:
        self.num_cached_tokens = 0
        self._prompt_logprobs: PromptLogprobs | None = None
        self._unread: tuple[Callable[[], PromptLogprobs], int] | None = None
        self._request = request
        self._deltas: dict[int, CompletionDelta] = {}
        self._error: RayLMError | None = None
        self._finished = False
        self._vector: bytes | None = None
        self._wake = asyncio.Event()

    def put(self, delta: CompletionDelta, *, finished: bool) -> None:
        """Add news of one sequence; ``finished`` if it is the last news of the whole request."""
        waiting = self._deltas.get(delta.index)
        if waiting is None:
            self._deltas[delta.index] = delta
        else:
            waiting.add(delta)
        self._finished = self._finished or finished
        self._wake.set()

    def finish(self, vector: bytes) -> None:
        """The prompt has come to a vector."""
        self._vector, self._finished = vector, True
        self._wake.set()

    def put_prompt_logprobs(self, read: Callable[[], PromptLogprobs], size: int) -> None:
        """The prompt's logprobs, ``size`` numbers to be read when the caller takes them."""
        self._unread = (read, size)

    def fail(self, error: RayLMError) -> None:
        """End the request: the reader gets ``error`` at once, in place of what it has not read."""
        self._error = error
        self._wake.set()

    async def get(self) -> RequestOutput:
        """All news since the last call, waiting for some if there are none.

        Raises:
            RayLMError: what ``fail`` was called with.
        """
        await self._wake.wait()
        self._wake.clear()
        if self._error is not None:
            raise self._error
        if self._unread is not None:
            self._prompt_logprobs, self._unread = await offload(*self._unread), None
        deltas, self._deltas = list(self._deltas.values()), {}
        return RequestOutput(
            request_id=self._request.request_id,
            prompt_token_ids=self._request.prompt_token_ids,
            deltas=deltas,
            num_cached_tokens=self.num_cached_tokens,
            prompt_logprobs=self._prompt_logprobs,
            finished=self._finished,
            vector=self._vector,
        )
