"""Admission to the queue for a first token: limits of sequences and tokens, and estimates that adapt."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylm.errors import InvalidRequestError, OverloadedError, RateLimitError
from raylm.frontend import Admission, ApiKey, AsyncLLM, KeyLimits, RequestHead, RequestOutput, StateClient
from raylm.frontend.admission import FairShares, Reservation
from raylm.frontend.request import Arrival, Request
from raylm.frontend.timelines.ring import Timelines
from raylm.params import PoolingParams, SamplingParams
from tests.frontend.played_engine import PlayedEngine


def test_requests_are_bounded_and_leave_with_their_first_token() -> None:
    admission = Admission(max_requests=2)
    first, _ = admission.prompt(5, 1), admission.prompt(5, 1)
    with pytest.raises(OverloadedError):
        admission.prompt(5, 1)
    with pytest.raises(OverloadedError):
        admission.enter(0)
    with pytest.raises(OverloadedError):
        admission.check(0)
    first.begin([0])
    assert (admission.requests, admission.tokens) == (1, 5)
    admission.prompt(5, 1)


def test_tokens_are_bounded_by_estimates_too() -> None:
    admission = Admission(max_tokens=100)
    with admission.enter(200) as hold:  # four bytes per token, because no prompt was tokenized yet
        assert admission.tokens == 50
        with pytest.raises(OverloadedError):
            admission.enter(220)
        hold.grow(1, 400)  # a body may be longer than announced
        assert admission.tokens == 100
        with pytest.raises(OverloadedError), admission.enter(4):
            pass
    assert (admission.requests, admission.tokens) == (0, 0)


def test_who_finds_nobody_waiting_is_let_in_whatever_his_size() -> None:
    admission = Admission(max_requests=4, max_tokens=10)
    with admission.enter(10**6) as hold:
        hold.grow(1024, 0)
        assert admission.requests == 1024
        with pytest.raises(OverloadedError):
            admission.enter(0)
    assert admission.requests == 0


def test_growing_beside_others_is_refused_and_changes_nothing() -> None:
    admission = Admission(max_requests=4)
    admission.prompt(1, 1)
    with admission.enter(40) as hold:
        with pytest.raises(OverloadedError):
            hold.grow(4, 0)
        assert admission.requests == 2
        hold.grow(3, 0)
        assert admission.requests == 4


def test_prompts_take_over_the_estimate_of_their_request() -> None:
    admission = Admission(max_requests=8, max_tokens=1000)
    with admission.enter(800) as request:
        request.grow(4, 0)
        assert (admission.requests, admission.tokens) == (4, 200)
        one = admission.prompt(30, 1, request)
        assert (admission.requests, admission.tokens) == (4, 180)
        rest = [admission.prompt(30, 1, request) for _ in range(3)]
        assert (admission.requests, admission.tokens) == (4, 120)
        one.begin([0])
    assert (admission.requests, admission.tokens) == (3, 90)
    for hold in rest:
        hold.release()
        hold.release()
    assert (admission.requests, admission.tokens) == (0, 0)


def test_siblings_wait_each_and_share_a_prompt() -> None:
    admission = Admission()
    hold = admission.prompt(50, 3)
    assert (admission.requests, admission.tokens) == (3, 50)
    hold.begin([0])
    assert (admission.requests, admission.tokens) == (2, 0)
    hold.begin([0, 1, 2])
    assert admission.requests == 0


def test_estimates_learn() -> None:
    admission = Admission()
    for _ in range(50):
        with admission.enter(10_000) as hold:
            admission.prompt(5_000, 1, hold).release()
            assert hold.tokens == 0
    with admission.enter(10_000) as hold:
        assert 4_000 < hold.tokens <= 5_000


def test_when_to_come_back_is_told_and_travels() -> None:
    admission = Admission(max_requests=1)
    admission.prompt(1, 1)
    with pytest.raises(OverloadedError) as refused:
        admission.enter(0)
    assert refused.value.retry_after_s == 1
    assert pickle.loads(pickle.dumps(OverloadedError("x", retry_after_s=9))).retry_after_s == 9


def test_when_to_come_back_follows_the_pace() -> None:
    now = 100.0
    admission = Admission(max_requests=10, clock=lambda: now)
    admission.prompt(1, 1).begin([0])
    now += 1000.0
    admission.prompt(1, 1)
    for _ in range(4):
        admission.prompt(1, 1).begin([0])
        now += 2.0
    for _ in range(9):
        admission.prompt(1, 1)
    with pytest.raises(OverloadedError) as refused:
        admission.enter(0)
    assert refused.value.retry_after_s == 20


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 5), st.integers(1, 3), st.integers(0, 3)), max_size=12))
def test_nothing_is_left_when_all_have_gone(requests: list[tuple[int, int, int, int]]) -> None:
    admission = Admission(max_requests=12, max_tokens=600)
    holds: list[Reservation] = []
    for num_bytes, prompts, n, begun in requests:
        try:
            with admission.enter(num_bytes) as request:
                request.grow(prompts * n, 0)
                mine = [admission.prompt(num_bytes // 5, n, request) for _ in range(prompts)]
        except OverloadedError:
            assert admission.requests
            continue
        for hold in mine[:begun]:
            hold.begin(range(n))
        holds += mine
        assert admission.requests == sum(hold.requests for hold in holds)
        assert admission.tokens == sum(hold.tokens for hold in holds)
    for hold in holds:
        hold.release()
    assert (admission.requests, admission.tokens) == (0, 0)


async def test_a_prompt_is_refused_before_it_is_tokenized(llm: AsyncLLM, engine: PlayedEngine) -> None:
    llm.admission = Admission(max_requests=1)
    waiting = llm.generate("hello", SamplingParams(), RequestHead(request_id="a"))
    task = asyncio.ensure_future(anext(waiting))
    async with asyncio.timeout(300):
        while not engine.added:  # noqa: ASYNC110
            await asyncio.sleep(0)
    llm._tokenizer.encode = None  # type: ignore[method-assign,assignment]
    with pytest.raises(OverloadedError):
        await anext(llm.generate("hello", SamplingParams(), RequestHead(request_id="b")))
    engine.say((engine.added[0].key, 0, [5], None))
    await task
    assert llm.admission.requests == 0
    await waiting.aclose()


@pytest.mark.parametrize("end", ["tokens", "error"])
async def test_places_are_given_back_when_tokens_come_and_not_when_they_are_read(
    llm: AsyncLLM, engine: PlayedEngine, end: str
) -> None:
    llm.admission = Admission(max_requests=8)
    stream = llm.generate("hello", SamplingParams(n=4), RequestHead(request_id="a"))
    task = asyncio.ensure_future(anext(stream))
    async with asyncio.timeout(300):
        while not engine.added:  # noqa: ASYNC110
            await asyncio.sleep(0)
    key = engine.added[0].key
    engine.say((key, 0, [5], None))
    await task
    assert llm.admission.requests == 3
    if end == "tokens":
        for left, index in ((2, 1), (1, 2), (0, 3)):
            engine.say((key, index, [5], None))
            await engine.heard()
            assert llm.admission.requests == left
    else:
        engine.say(errors=[(key, OverloadedError("x"))])
        await engine.heard()
    assert (llm.admission.requests, llm.admission.tokens) == (0, 0)
    await stream.aclose()
    assert (llm.admission.requests, llm.admission.tokens) == (0, 0)


def test_a_prompt_behind_the_answer_of_its_request_waits_by_itself() -> None:
    """For example the prompt of a background response."""
    admission = Admission(max_requests=1)
    request = Request(Arrival("a", "/"), Timelines(), admission)
    request.wait(10)
    request.leave_queue()
    waiting = admission.prompt(1, 1)
    with pytest.raises(OverloadedError):
        admission.prompt(1, 1, request.reservation)
    waiting.release()
    admission.prompt(1, 1, request.reservation)


@pytest.mark.parametrize("by_tokens", [False, True])
def test_one_key_turns_no_other_away(by_tokens: bool) -> None:
    most = {"max_tokens": 8} if by_tokens else {"max_requests": 8}
    admission = Admission(**most, policy=FairShares(lambda: 3))
    assert fill(admission, "a") == 4, "half of the queue is left for other keys"
    assert fill(admission, "b") == 2
    assert [fill(admission, key) for key in "cdef"] == [1] * 4, "a key without a waiting request is not refused"


def fill(admission: Admission, key: str, weight: float = 1.0) -> int:
    """The number of small requests of a key that are admitted."""
    holds: list[Reservation] = []
    while True:
        try:
            holds.append(admission.enter(4, key, weight))
        except OverloadedError:
            return len(holds)


def test_shares_go_by_weight_and_an_only_key_has_all() -> None:
    admission = Admission(max_requests=9, policy=FairShares(lambda: 2))
    assert fill(admission, "a", 2.0) == 6
    assert fill(Admission(max_requests=3, policy=FairShares(lambda: 1)), "a") == 3


def test_a_huge_request_of_one_key_leaves_room_for_others() -> None:
    admission = Admission(max_requests=8, policy=FairShares(lambda: 2))
    with admission.enter(0, "a") as request:
        request.grow(4096, 0)
        with pytest.raises(OverloadedError):
            admission.enter(0, "a")
        admission.enter(0, "b")


def head_of(key: ApiKey, state: StateClient, llm: AsyncLLM) -> RequestHead:
    return RequestHead(request_id="a", request=Request(Arrival("a", "/", key), llm.timelines, llm.admission, state))


async def sent(
    llm: AsyncLLM, engine: PlayedEngine, head: RequestHead, **params: Any
) -> AsyncGenerator[RequestOutput, None]:
    """Send a request of five prompt tokens to the engine, and read its first output. Returns the stream."""
    stream, before = llm.generate([5, 6, 7, 8, 9], SamplingParams(**params), head), len(engine.added)
    task = asyncio.ensure_future(anext(stream))
    async with asyncio.timeout(300):
        while len(engine.added) == before:
            if task.done():
                await task
            await asyncio.sleep(0)
    engine.say((engine.added[-1].key, 0, [300], None))
    await task
    return stream


async def test_tokens_are_reserved_before_the_engine_knows_and_given_back_at_the_end(
    llm: AsyncLLM, engine: PlayedEngine
) -> None:
    key, state = ApiKey("a", limits=KeyLimits(tokens_per_minute=60)), StateClient()
    first = await sent(llm, engine, head_of(key, state, llm), max_tokens=20)
    second = await sent(llm, engine, head_of(key, state, llm), max_tokens=20)
    with pytest.raises(RateLimitError, match=r"tokens_per_minute' of 60.* 25 tokens .* 10 are left"):
        await sent(llm, engine, head_of(key, state, llm), max_tokens=20)
    assert len(engine.added) == 2, "the third request was refused before it was sent"
    await first.aclose()  # it counts 5 + 1 tokens
    await state.publish()
    third = await sent(llm, engine, head_of(key, state, llm), max_tokens=20, n=1)
    standing = state.standing("a")
    assert standing is not None
    assert standing.remaining_tokens == 60 - 6 - 25 - 25
    for stream in (second, third):
        await stream.aclose()
    await state.close()


async def test_an_answer_is_as_long_as_its_key_may_ask_for(llm: AsyncLLM, engine: PlayedEngine) -> None:
    state = StateClient()
    brief = ApiKey("brief", max_output=7)
    stream = await sent(llm, engine, head_of(brief, state, llm))
    assert engine.added[-1].params.max_tokens == 7
    await stream.aclose()
    for params, param in (({"max_tokens": 8}, "max_tokens"), ({"min_tokens": 8}, "min_tokens")):
        with pytest.raises(InvalidRequestError, match="at most 7") as refused:
            await sent(llm, engine, head_of(brief, state, llm), **params)
        assert refused.value.param == param
    few = ApiKey("few", limits=KeyLimits(tokens_per_minute=25))
    stream = await sent(llm, engine, head_of(few, state, llm), n=2)
    assert engine.added[-1].params.max_tokens == 10, "the rest of the minute after the prompt, halved"
    await stream.aclose()
    with pytest.raises(InvalidRequestError) as refused:
        await sent(llm, engine, head_of(few, state, llm), max_tokens=21)
    assert refused.value.param == "max_tokens"
    with pytest.raises(InvalidRequestError, match="takes at least 6 tokens with its answer") as refused:
        await sent(llm, engine, head_of(ApiKey("x", limits=KeyLimits(tokens_per_minute=5)), state, llm))
    assert refused.value.param == "prompt", "the client sent no other field"
    await state.close()


async def test_prompts_that_come_together_are_reserved_at_once(llm: AsyncLLM, engine: PlayedEngine) -> None:
    key, state = ApiKey("a", limits=KeyLimits(tokens_per_minute=60)), StateClient()
    head, prompts = head_of(key, state, llm), [[5, 6, 7], [5, 6]]
    heads = [head.nth(0), head.nth(1)]
    with pytest.raises(InvalidRequestError, match="at most 27 for each of these prompts"):
        await llm.reserve(prompts, SamplingParams(max_tokens=28), heads)
    assert state.standing("a") is None, "the limits were not used"
    assert await llm.reserve(prompts, SamplingParams(), heads) == prompts
    standing = state.standing("a")
    assert standing is not None
    assert standing.remaining_tokens == 60 - 5 - 2 * 27
    streams = [llm.generate(prompt, SamplingParams(), nth) for prompt, nth in zip(prompts, heads, strict=True)]
    tasks = [asyncio.ensure_future(anext(stream)) for stream in streams]
    async with asyncio.timeout(300):
        while len(engine.added) < 2:  # noqa: ASYNC110 - the played engine has no event for it
            await asyncio.sleep(0)
    assert [request.params.max_tokens for request in engine.added] == [27, 27]
    for request in engine.added:
        engine.say((request.key, 0, [300, 301], None))
    await asyncio.gather(*tasks)
    for stream in streams:
        await stream.aclose()
    await state.publish()
    third = await sent(llm, engine, head_of(key, state, llm), max_tokens=1)
    standing = state.standing("a")
    assert standing is not None
    assert standing.remaining_tokens == 60 - 5 - 4 - 6, "the tokens of both, and the limit of the third"
    await third.aclose()
    await state.close()


async def test_vectors_beyond_a_minute_never_fit(llm: AsyncLLM, engine: PlayedEngine) -> None:
    key, state = ApiKey("a", limits=KeyLimits(tokens_per_minute=10)), StateClient()
    head = head_of(key, state, llm)
    with pytest.raises(InvalidRequestError, match="up to 12 tokens") as refused:
        await llm.reserve([[5] * 6] * 2, PoolingParams(), [head.nth(0), head.nth(1)])
    assert refused.value.param == "input"
    assert state.standing("a") is None


@pytest.mark.parametrize(("told", "charged"), [((4,), 0 + 6), ((None,), 0), ((), 0 + 10)])
async def test_a_stream_that_goes_on_counts_for_what_was_not_told(
    llm: AsyncLLM, engine: PlayedEngine, told: tuple[int | None, ...], charged: int
) -> None:
    key, state = ApiKey("a", limits=KeyLimits(tokens_per_minute=60)), StateClient()
    head = replace(head_of(key, state, llm), told=told, resumable_as="x", is_resumed=True)
    ended: list[tuple[int, int]] = []
    llm.timelines._on_end = lambda record: ended.extend(part.charged() for part in record.parts)
    params = SamplingParams(max_tokens=10)
    await llm.reserve([[5, 6, 7]], params, [head])
    standing = state.standing("a")
    assert (60 - charged if charged else None) == (standing and standing.remaining_tokens)
    stream = llm.generate([5, 6, 7], params, head)
    task = asyncio.ensure_future(anext(stream))
    async with asyncio.timeout(300):
        while not engine.added:  # noqa: ASYNC110 - the played engine has no event for it
            await asyncio.sleep(0)
    engine.say((engine.added[-1].key, 0, [300] * 10, "length"))
    await task
    with contextlib.suppress(StopAsyncIteration):
        await anext(stream)
    assert head.request is not None
    head.request.end()
    assert ended == [(0, charged)]
    await state.close()
