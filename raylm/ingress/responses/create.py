"""POST /v1/responses: OpenAI's newer form of a conversation; whole, streamed, or in the background, and stored."""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import aclosing
from contextvars import Context
from itertools import count
from typing import TYPE_CHECKING

import orjson

from raylm.errors import NotFoundError
from raylm.frontend import Lifecycle, offload
from raylm.ingress.http.body import JSONObject
from raylm.ingress.http.endpoint import Answer, Chunks
from raylm.ingress.http.errors import logger
from raylm.ingress.http.sse import named_event
from raylm.ingress.openai.chat import ChatCompletions
from raylm.ingress.openai.fields import renamed
from raylm.ingress.openai.generation import check_model
from raylm.ingress.openai.logprobs import TokenTexts
from raylm.ingress.responses.body import PARAM_NAMES, ResponsesRequest
from raylm.ingress.responses.input import chat_messages, input_items
from raylm.ingress.responses.job import ResponseItems, ResponseJob
from raylm.ingress.responses.store import ResponseStore

if TYPE_CHECKING:
    from raylm.frontend import AsyncLLM, Place
    from raylm.ingress.openai.outputs import Outputs

_BYTES_A_THING = 64  # of JSON, about


class CreateResponse:
    def __init__(
        self, llm: AsyncLLM, conversations: ChatCompletions, store: ResponseStore, lifecycle: Lifecycle
    ) -> None:
        self._llm = llm
        self._conversations = conversations
        self._store = store
        self._lifecycle = lifecycle
        self._tokens = TokenTexts(llm)
        self._background: set[asyncio.Task[None]] = set()

    async def __call__(self, body: ResponsesRequest, request_id: str, owner: str) -> Answer:
        check_model(body.model, self._llm)
        items = await offload(lambda: input_items(body.input), len(body.input) if isinstance(body.input, list) else 1)
        history = await self._history(owner, body.previous_response_id)
        job, outputs = await self._start(body, history + items, owner)
        record = {"input": items, "history": history}
        if body.background:
            return await self._in_background(job, outputs, record, body.place)
        if body.stream:
            return self._stream(job, outputs, record)
        async with aclosing(job.events(outputs)) as events:
            async for _ in events:
                pass
        await self._keep(job, record)
        return orjson.dumps(job.response())

    async def _start(self, body: ResponsesRequest, items: list[JSONObject], owner: str) -> tuple[ResponseJob, Outputs]:
        response_id = f"resp_{uuid.uuid4().hex}"  # not to be guessed: without keys, who knows it may read the response
        head = [{"role": "system", "content": body.instructions}] if body.instructions else []
        with renamed(PARAM_NAMES):
            chat = (await offload(lambda: body.as_chat(head + chat_messages(items)), len(items))).at(body.place)
            if body.truncation == "auto":
                chat = await self._conversations.fit(chat, body.max_output_tokens or 1)
            params, outputs = await self._conversations.start(chat, response_id, time.time())
        shown = ResponseItems(self._tokens, with_logprobs=body.with_logprobs)
        return ResponseJob(response_id, owner, body, params, shown), outputs

    async def _history(self, owner: str, response_id: str | None) -> list[JSONObject]:
        """The items of the conversation that ends with a stored response."""
        if response_id is None:
            return []
        found = await self._store.get(owner, response_id)
        if found is None:
            message = "The response that 'previous_response_id' names was not found; it may have been too long ago."
            raise NotFoundError(message, param="previous_response_id")
        record: JSONObject = await offload(lambda: orjson.loads(found), len(found) // _BYTES_A_THING)
        return [*record["history"], *record["input"], *record["response"]["output"]]

    async def _keep(self, job: ResponseJob, record: JSONObject) -> None:
        response = job.response()
        if response["store"]:
            things = len(record["history"]) + len(record["input"]) + len(response["output"])
            kept = await offload(lambda: orjson.dumps(record | {"response": response}), things)
            await self._store.put(job.owner, job.id, kept)

    async def _stream(self, job: ResponseJob, outputs: Outputs, record: JSONObject) -> Chunks:
        numbers = count()
        async with aclosing(job.events(outputs)) as items:
            async for events in items:
                if job.done:
                    await self._keep(job, record)  # before the client hears of the end, and goes on from it
                if events:
                    yield b"".join(named_event(event | {"sequence_number": next(numbers)}) for event in events)

    async def _in_background(
        self, job: ResponseJob, outputs: Outputs, record: JSONObject, place: Place | None
    ) -> bytes:
        """Answer at once; the response can be fetched, and cancelled, while it is made and afterwards."""
        await self._keep(job, record)
        # It waits in the queue by itself, and holds what the request that asked for it holds of its key's limits.
        hold = None if place is None else place.hand_over()
        task = asyncio.create_task(self._make(job, outputs, record), context=Context())  # Ray's is the request's
        if hold is not None:
            task.add_done_callback(lambda _: hold.end())
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return orjson.dumps(job.response())

    async def _make(self, job: ResponseJob, outputs: Outputs, record: JSONObject) -> None:
        making = asyncio.create_task(self._run(job, outputs, record))
        cancelled = asyncio.create_task(self._store.until_cancelled(job.owner, job.id))
        try:
            await asyncio.wait([making, cancelled], return_when=asyncio.FIRST_COMPLETED)
            if cancelled.done() and cancelled.exception() is not None:
                logger.warning("response %s can not be cancelled any more", job.id, exc_info=cancelled.exception())
                await making
        finally:
            for task in (making, cancelled):
                task.cancel()
            await asyncio.gather(making, cancelled, return_exceptions=True)

    async def _run(self, job: ResponseJob, outputs: Outputs, record: JSONObject) -> None:
        try:
            with self._lifecycle.admit() as ongoing, ongoing:
                async with aclosing(job.events(outputs)) as events:
                    await anext(events)
                    await self._keep(job, record)  # so that it is shown as begun
                    async for _ in events:
                        pass
        except Exception as error:
            job.fail(error)
        await self._keep(job, record)
