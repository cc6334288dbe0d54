"""Disturbed streams: clients that disconnect, engines that die, replicas that stop, and too many streams at once."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import httpx
import orjson
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from starlette.applications import Starlette

from raylm.config import Config
from raylm.errors import EngineDiedError
from raylm.frontend import Requests
from raylm.frontend.outputs import CompletionDelta
from raylm.ingress import build_asgi_app
from raylm.ingress.http import event_stream
from tests.ingress.fake_llm import FakeAsyncLLM
from tests.ingress.harness import CHAT, TEXT, Deadlines, client_of, events, served, until
from tests.ingress.refused import error_of

PATHS = [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT), ("/v1/completions", TEXT | {"prompt": ["a", "b"]})]

ALL_EVENTS = {"x-raylm-resumable": "true"}


def held(app: Starlette) -> int:
    requests: Requests = app.state.requests
    return len(requests._counted | requests._connected)


@pytest.mark.parametrize(("path", "body"), PATHS)
@pytest.mark.parametrize(
    ("failure", "code"), [(EngineDiedError("The engine was lost."), "engine_died"), (RuntimeError("secret"), None)]
)
async def test_a_failure_after_the_first_token_is_an_error_event_and_the_end(
    client: httpx.AsyncClient, llm: FakeAsyncLLM, path: str, body: dict[str, Any], failure: Exception, code: str | None
) -> None:
    llm.fail_after, llm.failure = 3, failure
    answer = await client.post(path, json=body | {"stream": True})
    assert answer.status_code == 200
    *chunks, last = events(answer.text)
    assert set(last) == {"error"}
    assert last["error"]["code"] == code
    assert "secret" not in answer.text
    assert chunks
    assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])


@pytest.mark.parametrize("stream", [False, True])
async def test_no_false_finish_reason(client: httpx.AsyncClient, llm: FakeAsyncLLM, stream: bool,
                                      monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    real = llm._outputs

    async def aborted(call: Any) -> Any:
        async for output in real(call):
            if output.finished:
                output.deltas = [CompletionDelta(0, finish_reason="abort")]
            yield output

    monkeypatch.setattr(llm, "_outputs", aborted)
    answer = await client.post("/v1/chat/completions", json=CHAT | {"stream": stream})
    if stream:
        assert set(events(answer.text)[-1]) == {"error"}
        assert "abort" not in answer.text
    else:
        error_of(answer, 500)


@pytest.mark.parametrize(("path", "body"), PATHS)
async def test_an_engine_that_falls_silent_is_no_finished_answer(
    client: httpx.AsyncClient, llm: FakeAsyncLLM, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = llm._outputs

    async def cut(call: Any) -> Any:
        async for output in real(call):
            if output.finished:
                return
            yield output

    monkeypatch.setattr(llm, "_outputs", cut)
    error_of(await client.post(path, json=body), 500)
    assert set(events((await client.post(path, json=body | {"stream": True})).text)[-1]) == {"error"}


@pytest.mark.parametrize(("path", "body"), PATHS)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_hangs_up_ends_its_request(
    app: Starlette, llm: FakeAsyncLLM, path: str, body: dict[str, Any], stream: bool
) -> None:
    llm.gate = asyncio.Event()
    async with served(app) as url, httpx.AsyncClient(base_url=url) as client:
        if stream:
            async with client.stream("POST", path, json=body | {"stream": True}) as answer:
                await anext(answer.aiter_bytes())
                assert all(call.ended == "open" for call in llm.calls)
        else:
            asking = asyncio.create_task(client.post(path, json=body))
            await until(lambda: bool(llm.calls))
            asking.cancel()
        await until(lambda: all(call.ended == "aborted" for call in llm.calls) and held(app) == 0)
        llm.gate.set()
        assert (await client.post(path, json=body)).status_code == 200


async def test_the_head_waits_for_the_first_token(app: Starlette, llm: FakeAsyncLLM) -> None:
    llm.gate, llm.open_outputs = asyncio.Event(), 0
    async with served(app) as url, httpx.AsyncClient(base_url=url) as client:
        begun = asyncio.Event()

        async def ask() -> None:
            async with client.stream("POST", "/v1/completions", json=TEXT | {"stream": True}):
                begun.set()

        asking = asyncio.create_task(ask())
        await until(lambda: bool(llm.calls))
        assert (await client.get("/health")).status_code == 200  # any data would have been sent before this answer
        assert not begun.is_set()
        asking.cancel()
        await until(lambda: llm.calls[0].ended == "aborted")


async def test_tokens_are_sent_as_they_come(app: Starlette, llm: FakeAsyncLLM) -> None:
    llm.gate = asyncio.Event()
    async with served(app) as url, httpx.AsyncClient(base_url=url) as client:
        async with client.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as answer:
            lines = (line async for line in answer.aiter_lines() if line)
            texts = [(await anext(lines)) for _ in range(2)]
            assert orjson.loads(texts[1][6:])["choices"][0]["delta"]["content"] == "H"
            llm.gate.set()
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"


@pytest.mark.parametrize(
    ("path", "body", "waiting"),
    [
        *((path, body, ": waiting") for path, body in PATHS),
        pytest.param(
            "/v1/responses",
            {"model": "org/fake-model", "input": "Hi"},
            ": waiting",
        ),
        pytest.param(
            "/v1/messages",
            CHAT | {"max_tokens": 9},
            'event: ping\ndata: {"type":"ping"}',
        ),
    ],
)
@pytest.mark.parametrize("open_outputs", [0, 1])
async def test_a_stream_with_nothing_to_tell_is_kept_alive_and_says_the_same(
    app: Starlette,
    llm: FakeAsyncLLM,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
    waiting: str,
    open_outputs: int,
) -> None:
    """While it waits for an engine, and between two tokens."""
    monkeypatch.setattr(event_stream, "KEEP_ALIVE_S", 0.01)
    llm.gate, llm.open_outputs = asyncio.Event(), open_outputs
    async with served(app) as url, httpx.AsyncClient(base_url=url) as client:
        found = ""
        async with client.stream("POST", path, json=body | {"stream": True}, headers=ALL_EVENTS) as answer:
            assert answer.status_code == 200
            async for text in answer.aiter_text():
                found += text
                if found.count(waiting) >= 4:
                    llm.gate.set()
        monkeypatch.setattr(event_stream, "KEEP_ALIVE_S", 100.0)
        calm = (await client.post(path, json=body | {"stream": True}, headers=ALL_EVENTS)).text
    blocks = [block for block in found.split("\n\n") if block != waiting]
    assert len(blocks) == len([block for block in calm.split("\n\n") if block != waiting])
    assert llm.calls[0].ended == "finished"


@pytest.mark.parametrize(("path", "body"), PATHS)
async def test_a_client_that_does_not_ask_gets_no_comments(
    app: Starlette, llm: FakeAsyncLLM, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    monkeypatch.setattr(event_stream, "KEEP_ALIVE_S", 0.01)
    llm.gate, llm.open_outputs = asyncio.Event(), 1
    async with served(app) as url, httpx.AsyncClient(base_url=url) as client:
        asking = asyncio.create_task(client.post(path, json=body | {"stream": True}))
        await until(lambda: bool(llm.calls))
        async with client.stream("POST", path, json=body | {"stream": True}, headers=ALL_EVENTS) as other:
            lines = other.aiter_lines()
            for _ in range(4):
                while await anext(lines) != ": waiting":
                    pass
            llm.gate.set()
        answer = await asking
    assert all(block.startswith("data: ") for block in answer.text.removesuffix("\n\n").split("\n\n"))


async def test_what_goes_wrong_after_a_sign_of_life_is_an_error_event(
    app: Starlette, llm: FakeAsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "KEEP_ALIVE_S", 0.01)
    llm.gate, llm.open_outputs, deadlines = asyncio.Event(), 0, Deadlines(monkeypatch)
    headers, body, text = ALL_EVENTS | {"request-timeout-ms": "3600000"}, CHAT | {"stream": True}, ""
    async with (
        served(app) as url,
        httpx.AsyncClient(base_url=url) as client,
        client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer,
    ):
        assert answer.status_code == 200
        async for part in answer.aiter_text():
            text += part
            await until(lambda: bool(llm.calls))
            deadlines.run_out()
    assert text.startswith(": waiting\n\n")
    assert '"deadline_exceeded"' in text
    assert "[DONE]" not in text
    await until(lambda: held(app) == 0)
    assert llm.calls[0].ended == "aborted"


async def test_clients_of_openai_and_anthropic_leave_signs_of_life_out(
    app: Starlette, llm: FakeAsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "KEEP_ALIVE_S", 0.01)
    opener = asyncio.create_task(open_when_told(llm))
    async with served(app) as url, AsyncExitStack() as clients:
        openai = await clients.enter_async_context(
            AsyncOpenAI(base_url=f"{url}/v1", api_key="-", default_headers=ALL_EVENTS)
        )
        anthropic = await clients.enter_async_context(AsyncAnthropic(base_url=url, api_key="-"))
        llm.gate, llm.open_outputs = asyncio.Event(), 0
        stream = await openai.chat.completions.create(**CHAT, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == llm.reply
        llm.gate = asyncio.Event()
        events = [event async for event in await openai.responses.create(model=CHAT["model"], input="Hi", stream=True)]
        assert events[-1].response.output_text == llm.reply
        llm.gate = asyncio.Event()
        async with anthropic.messages.stream(**CHAT, max_tokens=99) as messages:
            assert await messages.get_final_text() == llm.reply
    opener.cancel()


async def open_when_told(llm: FakeAsyncLLM) -> None:
    """Open each closed gate after a few keep-alives."""
    while True:
        await asyncio.sleep(0.1)
        if llm.gate is not None:
            llm.gate.set()


async def test_too_many_at_once_are_told_so_before_anything_is_done(llm: FakeAsyncLLM) -> None:
    app = build_asgi_app(llm, Config.model_validate({"ingress": {"max_ongoing_requests": 2}}))  # type: ignore[arg-type]
    llm.gate, llm.open_outputs = asyncio.Event(), 0
    async with client_of(app) as client:
        running = [asyncio.create_task(client.post("/v1/completions", json=TEXT)) for _ in range(2)]
        await until(lambda: len(llm.calls) == 2)
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            answer = await client.post(path, content=b"not even JSON")
            assert error_of(answer, 429)["type"] == "rate_limit_error"
            assert int(answer.headers["retry-after"]) >= 1
        assert (await client.get("/health")).status_code == 200
        llm.gate.set()
        assert [(await task).status_code for task in running] == [200, 200]
        assert (await client.post("/v1/completions", json=TEXT)).status_code == 200
    assert held(app) == 0


async def test_refused_requests_free_their_place(app: Starlette, client: httpx.AsyncClient) -> None:
    for content in (b"{", b'{"model": 1}'):
        await client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        await client.post("/v1/completions", content=content)
    assert held(app) == 0


async def test_a_drained_replica_lets_streams_end_within_its_grace(app: Starlette, llm: FakeAsyncLLM) -> None:
    llm.gate = asyncio.Event()
    async with served(app) as url, httpx.AsyncClient(base_url=url) as client:
        running = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT | {"stream": True}))
        await until(lambda: held(app) == 1)
        drained = asyncio.create_task(app.state.requests.drain(30))
        await until(lambda: app.state.requests.shutting_down)
        refused = await client.post("/v1/chat/completions", json=CHAT)
        assert error_of(refused, 503)["code"] == "shutting_down"
        assert refused.headers["retry-after"]
        error_of(await client.get("/health"), 503)
        llm.gate.set()
        assert (await running).text.endswith("data: [DONE]\n\n")
        await drained


async def test_a_drained_replica_tells_streams_that_outlast_its_grace(app: Starlette, llm: FakeAsyncLLM) -> None:
    llm.gate = asyncio.Event()
    async with served(app) as url, httpx.AsyncClient(base_url=url) as client:
        whole = asyncio.create_task(client.post("/v1/completions", json=TEXT))
        async with client.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as stream:
            await until(lambda: len(llm.calls) == 2)
            await app.state.requests.drain(0.1)
            *chunks, last = events("".join([part async for part in stream.aiter_text()]))
        assert last["error"]["code"] == "shutting_down"
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
        assert error_of(await whole, 503)["code"] == "shutting_down"
        assert [call.ended for call in llm.calls] == ["aborted", "aborted"]
        assert held(app) == 0


async def test_a_drain_does_not_wait_for_a_client_that_reads_nothing(app: Starlette, llm: FakeAsyncLLM) -> None:
    llm.reply = "x" * 200_000
    async with served(app) as url:
        host, port = url.removeprefix("http://").split(":")
        body = orjson.dumps(TEXT | {"stream": True, "max_tokens": 200_000})
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
        writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + body)
        await reader.readexactly(100)
        await until(lambda: held(app) == 1)
        await asyncio.sleep(0.3)  # so that the socket's buffers are full
        async with asyncio.timeout(300):  # without a limit it would wait forever
            await app.state.requests.drain(0.1)
        await until(lambda: held(app) == 0)
        assert llm.calls[0].ended == "aborted"
        writer.close()
