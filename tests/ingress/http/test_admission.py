"""The queue and the deadlines over HTTP: 429 before any work, and 504 after too long a wait."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import httpx
import openai
import pytest
from starlette.applications import Starlette
from starlette.datastructures import Headers

from raylm.errors import InvalidRequestError
from raylm.frontend import Admission
from raylm.ingress.http.endpoint import request_timeout_s
from tests.ingress.fake_llm import FakeAsyncLLM
from tests.ingress.harness import CHAT, TEXT, Deadlines, client_of, events, served, until
from tests.ingress.http.test_streams import held
from tests.ingress.refused import JSON, error_of
from tests.ingress.test_real_llm import running_stack, wanted

PATHS = [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)]
WORKS = [
    *PATHS,
    ("/tokenize", TEXT),
    ("/tokenize", CHAT),
    ("/detokenize", {"tokens": [5]}),
    pytest.param("/v1/messages/count_tokens", CHAT),
]


@pytest.mark.parametrize(("path", "body"), WORKS)
async def test_a_full_queue_refuses_before_the_body_is_read(
    client: httpx.AsyncClient, llm: FakeAsyncLLM, path: str, body: dict[str, Any]
) -> None:
    llm.admission._max_requests = 1
    waiting = llm.admission.prompt(10, 1)
    answer = await client.post(path, content=b"no JSON", headers=JSON)
    assert answer.status_code == 429
    assert answer.json()["error"]["type"] == "rate_limit_error"
    assert int(answer.headers["retry-after"]) >= 1
    assert (await client.get("/health")).status_code == 200
    waiting.release()
    assert (await client.post(path, json=body)).status_code == 200
    assert (llm.admission.requests, llm.admission.tokens) == (0, 0)


@pytest.mark.parametrize(("path", "body"), PATHS)
async def test_a_prompt_that_does_not_fit_beside_others_is_not_rendered(
    client: httpx.AsyncClient, llm: FakeAsyncLLM, path: str, body: dict[str, Any]
) -> None:
    llm.admission._max_tokens = 1000
    waiting = llm.admission.prompt(100, 1)
    long = {"prompt": "x" * 8000} if "prompt" in body else {"messages": [{"role": "user", "content": "x" * 8000}]}
    error_of(await client.post(path, json=body | long), 429)
    assert (llm.rendered, llm.calls) == ([], [])
    assert (await client.post(path, json=body)).status_code == 200
    waiting.release()
    llm.max_model_len = 10_000
    assert (await client.post(path, json=body | long)).status_code == 200, "alone it need not wait"


async def test_choices_count_each(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    llm.admission._max_requests = 8
    waiting = llm.admission.prompt(1, 1)
    error_of(await client.post("/v1/completions", json=TEXT | {"prompt": ["a"] * 2, "n": 8}), 429)
    error_of(await client.post("/v1/chat/completions", json=CHAT | {"n": 8}), 429)
    assert (await client.post("/v1/completions", json=TEXT | {"prompt": ["a"] * 3, "n": 2})).status_code == 200
    waiting.release()


MANY: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": ["a"] * 20}),
    ("/v1/completions", {"prompt": ["a"] * 20, "n": 2, "stream": True}),
    ("/v1/embeddings", {"input": ["a"] * 20}),
    ("/rerank", {"query": "a", "documents": ["b"] * 19}),
]


@pytest.mark.parametrize(("path", "body"), MANY)
async def test_a_request_of_many_prompts_leaves_most_of_the_queue_to_others(
    client: httpx.AsyncClient, llm: FakeAsyncLLM, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """Its prompts take a quarter of the queue. The next prompt is queued when one of these begins."""
    llm.admission._max_requests, step = 16, asyncio.Semaphore(0)
    begun, ended = 0, 0

    def in_turns(answers: Any) -> Any:
        async def waiting(*args: Any) -> Any:
            nonlocal begun, ended
            begun += 1
            await step.acquire()
            ended += 1
            async with aclosing(answers(*args)) as outputs:
                async for output in outputs:
                    yield output

        return waiting

    monkeypatch.setattr(llm, "generate", in_turns(llm.generate))
    monkeypatch.setattr(llm, "embed", in_turns(llm.embed))
    answer = asyncio.create_task(client.post(path, json={"model": llm.model_name} | body))
    at_once = 4 // body.get("n", 1)
    for number in range(20):
        await until(lambda: ended == number and begun == min(at_once + number, 20))  # noqa: B023
        assert llm.admission.requests == 4
        error_of(await client.post("/v1/completions", json=TEXT | {"n": 13}), 429)
        step.release()
    assert (await answer).status_code == 200
    assert (llm.admission.requests, llm.admission.tokens) == (0, 0)


async def test_refusals_leave_nothing_in_the_queue(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    for content in (b"{", b'{"model": 1}', b'{"model": "org/fake-model", "prompt": []}'):
        error_of(await client.post("/v1/completions", content=content, headers=JSON))
    assert (llm.admission.requests, llm.admission.tokens) == (0, 0)
    assert "raylm:queued_requests{" in (await client.get("/metrics")).text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("header", [("x-stainless-read-timeout", "3600"), ("x-stainless-timeout", "3600"),
                                    ("request-timeout-ms", "3600000")])  # fmt: skip
async def test_who_waited_longer_than_his_client_is_dropped(
    app: Starlette, llm: FakeAsyncLLM, monkeypatch: pytest.MonkeyPatch, stream: bool, header: tuple[str, str]
) -> None:
    llm.gate, llm.open_outputs, deadlines = asyncio.Event(), 0, Deadlines(monkeypatch)
    async with client_of(app) as client:
        call = client.post("/v1/completions", json=TEXT | {"stream": stream}, headers=dict([header]))
        asking = asyncio.create_task(call)
        await until(lambda: bool(llm.calls))
        deadlines.run_out()
        error = error_of(await asking, 504)
        assert (error["type"], error["code"]) == ("timeout_error", "deadline_exceeded")
        await until(lambda: llm.calls[0].ended == "aborted" and held(app) == 0)
        llm.gate.set()
        assert (await client.post("/v1/completions", json=TEXT, headers=dict([header]))).status_code == 200


async def test_a_stream_that_has_begun_has_no_deadline(
    app: Starlette, llm: FakeAsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm.gate, deadlines = asyncio.Event(), Deadlines(monkeypatch)
    async with served(app) as url, httpx.AsyncClient(base_url=url) as client:
        headers, body = {"request-timeout-ms": "3600000"}, TEXT | {"stream": True}
        async with client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
            assert answer.status_code == 200
            assert len(deadlines.timers) == 1
            deadlines.run_out()
            llm.gate.set()
            text = "".join([part async for part in answer.aiter_text()])
        assert events(text)[-1] == "[DONE]"


async def test_the_official_client_tells_its_patience(app: Starlette, llm: FakeAsyncLLM) -> None:
    told: list[float | None] = []

    async def noting(scope: Any, receive: Any, send: Any) -> None:
        told.append(request_timeout_s(Headers(scope=scope)))
        await app(scope, receive, send)

    async with served(noting) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", timeout=7) as api:  # type: ignore[arg-type]
        await api.completions.create(model=llm.model_name, prompt="x")
    assert told == [7.0]


@pytest.mark.parametrize(
    ("headers", "wanted"),
    [
        ({}, None),
        ({"x-stainless-read-timeout": "600"}, 600.0),
        ({"x-stainless-timeout": "NOT_GIVEN", "x-stainless-read-timeout": "30.5"}, 30.5),
        ({"x-stainless-timeout": "600", "request-timeout-ms": "1500"}, 1.5),
        ({"x-stainless-timeout": "nan"}, None),
        ({"x-stainless-timeout": "-1"}, None),
        ({"x-stainless-timeout": "1" * 400}, None),
    ],
)
def test_patience_is_read_as_clients_tell_it(headers: dict[str, str], wanted: float | None) -> None:
    assert request_timeout_s(Headers(headers)) == wanted


@pytest.mark.parametrize("value", ["", "soon", "0", "-5", "inf", "nan", "9" * 400])
async def test_a_wrong_deadline_is_refused_by_name(client: httpx.AsyncClient, value: str) -> None:
    with pytest.raises(InvalidRequestError):
        request_timeout_s(Headers({"request-timeout-ms": value}))
    answer = await client.post("/v1/completions", json=TEXT, headers={"request-timeout-ms": value})
    assert error_of(answer)["param"] == "request-timeout-ms"


async def test_of_a_flood_each_is_answered_rightly_or_told_to_come_back() -> None:
    async with running_stack(Admission(max_requests=16, max_tokens=2_000)) as stack, served(stack.app) as url:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
            flood = asyncio.gather(*(flooded(client, place) for place in range(300)))
            healthy = [(await client.get("/health")).status_code for _ in range(20)]
            statuses = await flood
            assert (await client.post("/v1/completions", json=stack_body(1))).status_code == 200
        assert set(statuses) == {200, 429}
        assert statuses.count(200) >= 16
        assert set(healthy) == {200}
        assert (stack.llm.admission.requests, stack.llm.admission.tokens) == (0, 0)
        assert stack.running == 0


def stack_body(place: int) -> dict[str, Any]:
    return {"model": "embedded", "prompt": [10 + place, 5, 7], "max_tokens": 12, "seed": place}


async def flooded(client: httpx.AsyncClient, place: int) -> int:
    """The status of one request of the flood. A 200 must have the reference text."""
    body = stack_body(place)
    stream = place % 2 == 0
    answer = await client.post("/v1/completions", json=body | {"stream": stream})
    if answer.status_code == 429:
        assert int(answer.headers["retry-after"]) >= 1
        error_of(answer, 429)
    elif stream:
        text = "".join(chunk["choices"][0]["text"] for chunk in events(answer.text)[:-1])
        assert text == wanted(body["prompt"], place, 12)
    else:
        assert answer.json()["choices"][0]["text"] == wanted(body["prompt"], place, 12)
    return answer.status_code
