"""POST /v1/responses: OpenAI's newer API for conversations, whole, streamed, or in the background, and stored."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Coroutine
from contextlib import aclosing, suppress
from contextvars import Context
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import orjson

from raylm.errors import (
    CancelledRequestError,
    EngineDiedError,
    EngineUnavailableError,
    OverloadedError,
    ShuttingDownError,
    StoreLostError,
)
from raylm.frontend import Request, Requests, offload
from raylm.ingress.http.body import JSONObject
from raylm.ingress.http.endpoint import Answer, Chunks
from raylm.ingress.http.errors import as_known_error, logger
from raylm.ingress.http.sse import WAITING, named_event
from raylm.ingress.openai.chat import ChatCompletions
from raylm.ingress.openai.generation import check_model
from raylm.ingress.openai.logprobs import TokenTexts
from raylm.ingress.responses.body import ResponsesRequest
from raylm.ingress.responses.caller import Caller
from raylm.ingress.responses.compact import CompactRequest
from raylm.ingress.responses.conversation_store import ConversationTurn
from raylm.ingress.responses.history import Given, Histories, turn_of
from raylm.ingress.responses.input import item_id
from raylm.ingress.responses.items import Events, ResponseItems
from raylm.ingress.responses.job import ResponseJob
from raylm.ingress.responses.mcp.rounds import Rounds, Surrounding
from raylm.ingress.responses.mcp.servers import McpServers
from raylm.ingress.responses.sealing import Seal
from raylm.ingress.responses.store import LEASE_S, UNFINISHED, LostJob, ResponseStore, ToldEvents
from raylm.stages import about

if TYPE_CHECKING:
    from raylm.frontend import AsyncLLM
    from raylm.ingress.openai.outputs import Outputs

_RENEW_S = LEASE_S / 3
_BYTES_A_STEP = 16  # of stored events: parsing them takes about as long as one step of Python
_MOST_AT_ONCE = 16  # jobs taken over in one call
_KEPT_EACH_S = 0.05  # events of this period are one entry and one call of the store


class CreateResponse:
    """Creates responses, and is a ``maker`` of background jobs in the store. Takes over jobs of lost makers."""

    def __init__(
        self,
        llm: AsyncLLM,
        conversations: ChatCompletions,
        store: ResponseStore,
        requests: Requests,
        servers: McpServers,
        secret: bytes | None = None,
    ) -> None:
        self._llm = llm
        self._around = Surrounding(conversations, servers, store)
        self._store = store
        self._requests = requests
        self._seal = Seal(secret)
        self.histories = Histories(store, self._seal)
        self._tokens = TokenTexts(llm)
        self._maker = uuid.uuid4().hex
        self._background: set[asyncio.Task[None]] = set()

    async def __call__(self, body: ResponsesRequest, request: Request) -> Answer:
        owner = request.arrival.key_name
        check_model(body.model, self._llm)
        response_id, given = await self.histories.given(body, owner)
        job, outputs = await self._start(request, response_id, body, given, owner)
        if body.background:
            return await self._in_background(job, outputs, given, body, request)
        if body.stream:
            return self._stream(job, outputs, given)
        async with aclosing(job.events(outputs)) as events:
            async for _ in events:
                pass
        await self._keep(job, given)
        return orjson.dumps(job.response())

    async def compact(self, asked: CompactRequest, request: Request) -> bytes:
        """Answer with an item that holds the model's summary of a conversation, sealed for its owner."""
        owner = request.arrival.key_name
        check_model(asked.model, self._llm)
        body = await asked.as_response()
        response_id, given = await self.histories.given(body, owner)
        job, outputs = await self._start(request, response_id, body, given, owner)
        async with aclosing(job.events(outputs)) as events:
            async for _ in events:
                pass
        job.check()
        response = job.response()
        texts = [part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"]]
        sealed = self._seal.close("".join(texts), owner)
        item = {"id": item_id("compaction", response_id, 0), "type": "compaction", "encrypted_content": sealed}
        compacted = {name: response[name] for name in ("id", "created_at", "usage")}
        return orjson.dumps(compacted | {"object": "response.compaction", "output": [item]})

    async def take_over(self) -> None:
        """Renew the leases of jobs here, and take over jobs of lost makers, while this replica serves."""
        while not self._requests.shutting_down:
            try:
                await self.take_over_once()
            except Exception as error:
                logger.warning("background responses could not be renewed: %s", error, extra=about("responses"))
            await asyncio.sleep(_RENEW_S)

    async def take_over_once(self) -> None:
        making = [task.get_name() for task in self._background]
        for lost in await self._store.renew(self._maker, _MOST_AT_ONCE if self._llm.is_ready else 0, making):
            goes_on = about("response.taken_over", lost.response_id)
            logger.info("response %s continues here; its former replica is gone", lost.response_id, extra=goes_on)
            self._begin(lost.response_id, self._make_again(lost))

    async def _start(
        self,
        request: Request,
        response_id: str,
        body: ResponsesRequest,
        given: Given,
        owner: str,
        lost: JSONObject | None = None,
        told: int | None = None,
    ) -> tuple[ResponseJob, Outputs | None]:
        """Start a response, or continue one whose record is ``lost``, of whose tokens ``told`` were sent.

        Returns the job and its outputs, None if it begins with calls of MCP servers.
        """
        checkpoint = {} if lost is None else lost.get("checkpoint") or {}
        rounds = Rounds(self._around, request, response_id, body, given, owner)
        await rounds.open(checkpoint.get("lists"))
        number, calls, spent = (checkpoint.get(name, 0) for name in ("number", "calls", "tokens"))
        made, outputs = checkpoint.get("items", []), None
        if checkpoint.get("pending") or (rounds.approved and not made):
            params = (await rounds.chat(made, number, calls, spent)).params(self._llm.sampling_defaults)
        else:
            told = None if told is None else told - spent
            params, outputs = await rounds.start(made, number, calls, spent, told)
        seal = partial(self._seal.close, owner=owner) if body.with_sealed_reasoning else None
        items = ResponseItems(response_id, self._tokens, rounds.by_name, with_logprobs=body.with_logprobs, seal=seal)
        created_at = int(time.time()) if lost is None else lost["response"]["created_at"]
        job = ResponseJob(response_id, owner, body, params, items, created_at, rounds)
        if "items" in checkpoint:
            job.restore(checkpoint)
        return job, outputs

    async def _record(self, job: ResponseJob, items: list[JSONObject]) -> bytes:
        response = job.response()
        more = {} if job.done else {"checkpoint": job.checkpoint()}
        return await offload(
            lambda: orjson.dumps({"input": items, "response": response, "streamed": job.is_streamed} | more),
            len(items) + len(response["output"]),
        )

    async def _keep(self, job: ResponseJob, given: Given) -> None:
        """Store a response that has ended. If that fails, the response says that it is not stored."""
        response = job.response()
        turn = await self._turn(job, given.items)
        try:
            if response["store"]:
                await self._add(job, given, response["previous_response_id"], None, None, None, turn)
            elif turn is not None:
                await self._store.end_turn(job.owner, turn)
        except StoreLostError as error:
            job.stored = False
            lost = about("response.not_stored", job.id)
            logger.error("response %s was sent, but could not be stored: %s", job.id, error.message, extra=lost)

    async def _add(self, job: ResponseJob, given: Given, previous: str | None, *rest: Any) -> None:
        """Store a new record. If the response before it was deleted meanwhile, its own input has their history."""
        record = await self._record(job, given.items)
        if await self._store.put(job.owner, job.id, record, previous, *rest):
            await self._store.put(job.owner, job.id, await self._record(job, given.all), None, *rest)

    async def _turn(self, job: ResponseJob, items: list[JSONObject]) -> ConversationTurn | None:
        """What a response that ended adds to its conversation, None if it has none, or failed."""
        response = job.response()
        if (conversation := response.get("conversation")) is None or job.status not in ("completed", "incomplete"):
            return None
        return await turn_of(conversation["id"], items + response["output"])

    async def _stream(self, job: ResponseJob, outputs: Outputs | None, given: Given) -> Chunks:
        numbers = count()
        async with aclosing(job.events(outputs)) as happened:
            async for events in happened:
                if job.done:
                    await self._keep(job, given)  # before the client sees the end and continues the conversation
                    for event in events:
                        if "response" in event:
                            event["response"]["store"] = job.stored
                if events:
                    yield b"".join(named_event(event | {"sequence_number": next(numbers)}) for event in events)

    async def _in_background(
        self, job: ResponseJob, outputs: Outputs | None, given: Given, body: ResponsesRequest, request: Request
    ) -> Answer:
        """Answer at once. The response can be fetched, followed and cancelled during generation and later.

        The request is kept, with its place in the queue and its tokens.
        """
        asked: JSONObject = {
            "body": body.model_dump(mode="json", exclude_unset=True),
            "caller": Caller.of(request).as_json(),
        }
        asked["items"] = given.items
        if body.conversation is not None:  # which may change meanwhile
            asked["before"] = given.before
        again = await offload(lambda: orjson.dumps(asked), len(given.all))
        # a streaming client needs the id
        told = _told(job.told_as("created", "queued"), -1, 0) if body.stream else None
        await self._add(job, given, body.previous_response_id, again, self._maker, told)
        job.last = -1 if told is None else told.last
        request.keep()
        self._begin(job.id, self._make(job, outputs, given.items, request)).add_done_callback(lambda _: request.end())
        return follow(self._store, job.owner, job.id, -1) if body.stream else orjson.dumps(job.response())

    def _begin(self, response_id: str, making: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        # an empty context: Ray's context belongs to the request
        task = asyncio.create_task(making, name=response_id, context=Context())
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _make_again(self, lost: LostJob) -> None:
        """Continue a response of a lost maker, for the key that requested it.

        Events that were stored before are not repeated.
        """
        asked = orjson.loads(lost.job)
        caller = Caller.from_json(asked.get("caller"), lost.owner)
        try:
            async with self._requests.open(caller.arrival(lost.response_id), self._llm.admission) as request:
                with request.working():
                    await request.claim(begins=False)
                request.wait(len(lost.job))
                request.service = caller.service
                request.begin()
                await self._make_for(request, lost, asked)
        except (EngineUnavailableError, OverloadedError):
            await self._release(lost.response_id)

    async def _make_for(self, request: Request, lost: LostJob, asked: JSONObject) -> None:
        """As ``_make_again``, for an admitted request."""
        record: JSONObject = orjson.loads(lost.record)
        job = record["response"]
        begun = job["status"] == "in_progress"
        try:
            with request.working():
                body = await ResponsesRequest.read(asked["body"])
                request.record.note_body(body.model, body.stream)
                check_model(body.model, self._llm)
                before = asked.get("before")
                given = Given(
                    asked["items"], await self.histories.before(body, lost.owner) if before is None else before
                )
                sent = lost.tokens if begun else None
                started = self._start(request, lost.response_id, body, given, lost.owner, record, sent)
                made, outputs = await started
        except (EngineUnavailableError, OverloadedError):
            await self._release(lost.response_id)
            return
        except CancelledRequestError:
            await self._store.cancel(lost.owner, lost.response_id)
            return
        except Exception as error:
            known = as_known_error(error, lost.response_id)
            job |= {"status": "failed", "error": {"code": "server_error", "message": known.message}}
            told = _told([{"type": "response.failed", "response": job}], lost.last, lost.tokens)
            ended = orjson.dumps(record)
            await self._store.put(
                lost.owner, lost.response_id, ended, None, None, self._maker, told if record["streamed"] else None
            )
            return
        made.last = lost.last
        await self._make(made, outputs, asked["items"], request, begun=begun)

    async def _make(
        self,
        job: ResponseJob,
        outputs: Outputs | None,
        items: list[JSONObject],
        request: Request,
        *,
        begun: bool = False,
    ) -> None:
        making = asyncio.create_task(self._run(job, outputs, items, request, begun))
        cancelled = asyncio.create_task(self._until_cancelled(job))
        try:
            await asyncio.wait([making, cancelled], return_when=asyncio.FIRST_COMPLETED)
            if cancelled.done() and cancelled.exception() is not None:
                failed = about("response.failed", job.id)
                logger.warning("response %s cannot be cancelled", job.id, exc_info=cancelled.exception(), extra=failed)
                await making
        finally:
            for task in (making, cancelled):
                task.cancel()
            await asyncio.gather(making, cancelled, return_exceptions=True)

    async def _release(self, response_id: str) -> None:
        """Give up a job, so that another replica takes it over. If the store fails, its lease expires."""
        with suppress(StoreLostError):
            await self._store.release(response_id, self._maker)

    async def _until_cancelled(self, job: ResponseJob) -> None:
        while True:
            with suppress(StoreLostError):
                return await self._store.until_cancelled(job.owner, job.id)
            await asyncio.sleep(_RENEW_S)

    async def _run(
        self, job: ResponseJob, outputs: Outputs | None, items: list[JSONObject], request: Request, begun: bool
    ) -> None:
        try:
            with request.working():
                await self._tell(job, outputs, items, begun)
        except (ShuttingDownError, StoreLostError):
            await self._release(job.id)
        except CancelledRequestError:
            with suppress(StoreLostError):
                await self._store.cancel(job.owner, job.id)
        except Exception as error:
            if job.status == "queued" and _may_succeed_later(error):
                await self._release(job.id)
                return
            job.fail(error)
            await self._put(job, items, job.told_as("failed"))

    async def _tell(self, job: ResponseJob, outputs: Outputs | None, items: list[JSONObject], begun: bool) -> None:
        async with aclosing(job.events(outputs, begun=begun)) as happened:
            async for events in happened:
                if job.done or not begun or job.at_checkpoint:
                    begun, job.at_checkpoint = True, False
                    await self._put(job, items, events)
                elif events and job.is_streamed:
                    told = _told(events, job.last, job.tokens)
                    job.last = told.last
                    await self._store.append(job.id, self._maker, told)
                    await asyncio.sleep(_KEPT_EACH_S)  # deltas merge in this time

    async def _put(self, job: ResponseJob, items: list[JSONObject], events: Events) -> None:
        told = _told(events, job.last, job.tokens) if events and job.is_streamed else None
        job.last = job.last if told is None else told.last
        record, turn = await self._record(job, items), await self._turn(job, items)
        await self._store.put(job.owner, job.id, record, None, None, self._maker, told, turn)


def _may_succeed_later(error: Exception) -> bool:
    """Whether the error is temporary, and not about the response."""
    known = isinstance(error, EngineUnavailableError | OverloadedError)
    return known and not isinstance(error, EngineDiedError)


def _told(events: Events, last: int, tokens: int) -> ToldEvents:
    numbered = [event | {"sequence_number": number} for number, event in enumerate(events, last + 1)]
    return ToldEvents(last + len(events), tokens, orjson.dumps(numbered))


def _events_after(after: int, batches: list[bytes]) -> tuple[int, bytes]:
    """The events after number ``after`` in the format of the stream, and the number of the last one."""
    told = [event for batch in batches for event in orjson.loads(batch) if event["sequence_number"] > after]
    return (told[-1]["sequence_number"] if told else after), b"".join(map(named_event, told))


async def follow(store: ResponseStore, owner: str, response_id: str, after: int, *, comments: bool = False) -> Chunks:
    """The events of a background response after number ``after``, as they are stored.

    With ``comments``, yields a comment after each period without events.
    """
    while True:
        try:
            found = await store.follow(owner, response_id, after)
        except StoreLostError:
            await asyncio.sleep(_RENEW_S)
            if comments:
                yield WAITING
            continue
        if found is None:
            return
        batches, status = found
        after, told = await offload(partial(_events_after, after, batches), sum(map(len, batches)) // _BYTES_A_STEP)
        if told:
            yield told
        elif status not in UNFINISHED:
            return
        elif comments:
            yield WAITING
