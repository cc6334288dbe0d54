"""A Request ends once, whatever ends it, and its blocks raise the first reason of an interrupt."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace

import pytest

from raylm.errors import OverloadedError, RateLimitError, ShuttingDownError
from raylm.frontend import (
    Admission,
    ApiKey,
    Arrival,
    AsyncLLM,
    ClientDisconnectedError,
    Filter,
    KeyLimits,
    Request,
    RequestHead,
    Requests,
    StateClient,
    Timelines,
    current_id,
)
from raylm.frontend.text.tokenizer import Tokenizer
from raylm.messages import ParkedTokens
from raylm.params import SamplingParams
from tests.frontend.played_engine import PlayedEngine
from tests.frontend.test_with_engine_core import until

FROM = Arrival("a", "/v1/completions")


class GoneError(Exception):
    """The reason of an interrupt."""


def new_request(arrival: Arrival = FROM) -> Request:
    return Request(arrival, Timelines(), Admission())


async def outcome(act: Callable[[asyncio.Task[None], Request], object]) -> BaseException | None:
    """The exception that ends a task in a block of its request, after ``act`` on the task and the request."""
    request = new_request()

    async def work() -> None:
        with request.working():
            await asyncio.sleep(1000)

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    act(task, request)
    (found,) = await asyncio.gather(task, return_exceptions=True)
    return found


async def test_a_block_raises_the_first_reason_and_a_cancellation_from_elsewhere_stays_one() -> None:
    def twice(_: object, request: Request) -> None:
        request.interrupt(ClientDisconnectedError())
        request.interrupt(RuntimeError())

    def both(task: asyncio.Task[None], request: Request) -> None:
        request.interrupt(GoneError())
        task.cancel()

    assert isinstance(await outcome(lambda _, request: request.interrupt(GoneError())), GoneError)
    assert isinstance(await outcome(lambda _, request: request.hang_up(GoneError())), GoneError)
    assert isinstance(await outcome(twice), ClientDisconnectedError)
    assert isinstance(await outcome(lambda task, _: task.cancel()), asyncio.CancelledError)
    assert isinstance(await outcome(both), asyncio.CancelledError)


async def test_an_interrupt_before_the_block_is_raised_as_it_is_entered() -> None:
    request = new_request()
    request.interrupt(GoneError())
    for _ in range(2):
        with pytest.raises(GoneError), request.working():
            raise AssertionError("the block was entered")


async def test_an_interrupt_by_the_own_task_raises_its_reason_at_once() -> None:
    request, task = new_request(), asyncio.current_task()
    assert task is not None

    def interrupt() -> None:
        with request.working():
            request.interrupt(GoneError("first"))
            raise AssertionError("the block went on")

    with pytest.raises(GoneError, match="first"):
        interrupt()
    assert task.cancelling() == 0
    await asyncio.sleep(0)  # the task has no pending cancellation


async def test_a_request_that_is_kept_outlives_its_connection() -> None:
    request = new_request()

    async def connect(until: Awaitable[object]) -> None:
        with request.connected():
            request.keep()
            await until

    async def work() -> None:
        with request.working():
            await asyncio.sleep(1000)

    connection = asyncio.create_task(connect(asyncio.sleep(1000)))
    await asyncio.sleep(0)
    job = asyncio.create_task(work())
    await asyncio.sleep(0)
    request.hang_up(ClientDisconnectedError())
    with pytest.raises(ClientDisconnectedError):
        await connection
    assert not job.done()
    request.interrupt(GoneError())
    with pytest.raises(GoneError):
        await job


def test_what_was_taken_is_given_back_once_in_reverse_order() -> None:
    timelines, log = Timelines(), list[str]()

    @contextmanager
    def account(name: str) -> Iterator[str]:
        log.append(f"+{name}")
        yield name
        log.append(f"-{name}")

    request = Request(FROM, timelines, Admission())
    assert [request.take(account(name)) for name in ("place", "queue")] == ["place", "queue"]
    assert len(timelines.listed(Filter(None, "in_flight"))) == 1
    for error in (OverloadedError("full"), None, GoneError()):
        request.end(error)
    assert log == ["+place", "+queue", "-queue", "-place"]
    assert (request.record.error, request.record.status) == ("overloaded", 429)
    assert (len(timelines.listed(Filter(None, "in_flight"))), len(timelines.listed(Filter(None, "recent")))) == (0, 1)


async def test_tokens_that_were_claimed_are_given_back_when_nothing_was_generated(
    llm: AsyncLLM, engine: object
) -> None:
    state, key = StateClient(), ApiKey("alice", limits=KeyLimits(tokens_per_minute=100))
    for _ in range(3):
        request = Request(Arrival("a", "/", key), llm.timelines, llm.admission, state)
        await llm.reserve([[5, 6]], SamplingParams(max_tokens=90), [RequestHead(request_id="a", request=request)])
        request.end()
    await state.close()


@pytest.mark.parametrize("is_resumed", [False, True])
async def test_a_key_pays_for_no_token_behind_a_stop_string(
    llm: AsyncLLM, engine: PlayedEngine, tokenizer: Tokenizer, is_resumed: bool
) -> None:
    """One message has the stop string and later tokens: accepted drafts, or tokens that were parked for a stream."""
    state, limits = StateClient(), KeyLimits(tokens_per_minute=1000)
    request = Request(
        Arrival("r", "/v1/completions", ApiKey("alice", limits=limits)), llm.timelines, Admission(), state
    )
    head = RequestHead(request_id="r", request=request)
    token_ids = tokenizer.encode_now("ab." + "z" * 40, add_special_tokens=False)
    if is_resumed:
        engine.parked["stream"] = ParkedTokens([token_ids], [None], [None])
        head = replace(head, told=(1,), resumable_as="stream", is_resumed=True, stream="stream")

    async def read() -> int:
        async with aclosing(llm.generate([5, 6, 7], SamplingParams(max_tokens=100, stop=("b.",)), head)) as outputs:
            return sum([len(delta.token_ids) async for output in outputs for delta in output.deltas])

    call = asyncio.create_task(read())
    if not is_resumed:
        await until(lambda: bool(engine.added))
        engine.say((engine.added[0].key, 0, token_ids, None))
    num_tokens = await call
    request.end()
    assert num_tokens < len(token_ids)
    await state.claim("alice", limits, 1000 - (num_tokens - 1 if is_resumed else 3 + num_tokens))
    with pytest.raises(RateLimitError):
        await state.claim("alice", limits, 1)
    await state.close()


async def test_a_replica_drains_the_job_and_the_connection_of_a_request() -> None:
    requests, outcomes = Requests(8, Timelines()), list[str]()
    opened = asyncio.Event()

    async def work(request: Request) -> None:
        try:
            with request.working():
                await asyncio.sleep(1000)
        except ShuttingDownError:
            outcomes.append("job")
        finally:
            request.end()

    async def connect() -> None:
        try:
            async with requests.open(FROM, Admission()) as request:
                with request.connected():
                    assert current_id() == request.id
                    request.keep()
                    job = asyncio.create_task(work(request))
                    opened.set()
                    await asyncio.sleep(1000)
        except ShuttingDownError:
            outcomes.append("connection")
        await job

    connection = asyncio.create_task(connect())
    await opened.wait()
    assert requests.num_ongoing == 1
    await asyncio.sleep(0)
    await requests.drain(0.0)
    await connection
    assert sorted(outcomes) == ["connection", "job"]
    assert (requests.num_ongoing, current_id()) == (0, "")
    with pytest.raises(ShuttingDownError):
        async with requests.open(FROM, Admission()):
            raise AssertionError("it was let in")


async def test_a_full_replica_counts_a_kept_request_until_its_job_ends() -> None:
    timelines = Timelines()
    requests = Requests(1, timelines)
    async with requests.open(FROM, Admission()) as request:
        request.keep()
    for expected in (1, 0):
        assert requests.num_ongoing == expected
        if expected:
            with pytest.raises(OverloadedError):
                async with requests.open(FROM, Admission()):
                    raise AssertionError("it was let in")
            request.end()
    assert len(timelines.listed(Filter(None, "recent"))) == 2
