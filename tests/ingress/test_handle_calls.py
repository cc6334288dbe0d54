"""Calls by handle: they refuse the same values as HTTP, and a call that its caller abandons ends everywhere."""

from __future__ import annotations

import asyncio
import gc
import pickle
import warnings
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import httpx
import pytest

from raylm.config import Config
from raylm.errors import EngineDiedError, InvalidRequestError, ModelNotFoundError, RayLMError, UnsupportedFieldError
from raylm.frontend import Admission, ClientDisconnectedError, CompletionDelta, RequestHead, RequestOutput, Requests
from raylm.ingress.http.errors import clip
from raylm.params import PoolingParams, SamplingParams
from tests.ingress.bad_inputs import ENDPOINTS
from tests.ingress.console.stack import Stack
from tests.ingress.fake_llm import FakeAsyncLLM, think_and_call

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # warnings of Serve's use of pydantic
    from ray.exceptions import ActorDiedError, RayTaskError

    from raylm.handles import Outputs, Result
    from raylm.ingress.callers import Callers
    from raylm.ingress.handle_calls import HandleCalls
    from raylm.ingress.ingress import Ingress

HI: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
OF_HTTP = (
    "stream", "stream_options", "echo", "include_reasoning", "return_token_ids", "return_tokens_as_token_ids",
    "encoding_format",
)  # fmt: skip


def ingress(llm: FakeAsyncLLM, policy: str = "fair") -> Ingress:
    """An Ingress after Serve has built its application."""
    config = Config.model_validate({"scheduler": {"policy": policy}})
    found = Ingress(config, None)  # type: ignore[arg-type]
    found._llm = llm  # type: ignore[assignment]
    found._requests = Requests(8, llm.timelines)
    found._calls = HandleCalls(found._llm, config, found._requests)
    return found


async def outcome(llm: FakeAsyncLLM, call: str, *args: Any, **fields: Any) -> Any:
    """The result of a call, or the list of its outputs. Only "complete" and "reply" do not stream."""
    made = getattr(ingress(llm), call)(*args, **fields)
    return [output async for output in made] if call in ("generate", "chat") else await made


@pytest.mark.parametrize(
    ("call", "arguments", "param"),
    [
        *(("generate", {"prompt": prompt}, "prompt") for prompt in (None, 5, b"a", (1, 2), ["a", "b"], [[1], [2]])),
        *(("complete", {"prompt": prompt}, "prompt[0]") for prompt in ([True], [1.0])),
        *(("chat", {"messages": messages}, "messages") for messages in (None, "Hi", HI[0], tuple(HI), [])),
        ("chat", {"messages": ["Hi"]}, "messages[0]"),
        ("reply", {"messages": [{"role": "robot", "content": "Hi"}]}, "messages[0].role"),
        ("reply", {"messages": HI, "tool_choice": "required"}, "tool_choice"),
        ("chat", {"messages": HI, "tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
        ("chat", {"messages": HI, "template_kwargs": {}}, "template_kwargs"),
        ("chat", {"messages": HI, "temprature": 0}, "temprature"),
        *(("generate", {"prompt": "a", "params": params}, "params") for params in ({}, PoolingParams(), 1)),
        ("chat", {"messages": HI, "params": {"temperature": 0}}, "params"),
        *(("embed", {"prompt": prompt}, "prompt") for prompt in (["a", "b"], 5, None)),
        ("embed", {"prompt": "a", "params": SamplingParams()}, "params"),
        ("embed", {"prompt": "a", "params": PoolingParams(), "dimensions": 2}, "dimensions"),
        ("score", {"text_1": "a", "text_2": []}, "text_2"),
        ("rerank", {"query": "a", "documents": ["a", 5]}, "documents[1]"),
        *(("chat", {"messages": HI, name: True}, name) for name in OF_HTTP),
        *(("generate", {"prompt": "a", name: True}, name) for name in OF_HTTP),
    ],
)  # fmt: skip
async def test_a_wrong_argument_is_named(call: str, arguments: dict[str, Any], param: str) -> None:
    llm = FakeAsyncLLM()
    with pytest.raises(InvalidRequestError) as caught:
        await outcome(llm, call, **arguments)
    assert caught.value.param == param
    assert not llm.calls
    assert not llm.rendered
    assert not llm.embedded
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (type(copy), copy.message, copy.param) == (type(caught.value), caught.value.message, param)


@pytest.mark.parametrize(
    ("path", "call", "first"),
    [("/v1/chat/completions", "reply", "messages"), ("/v1/completions", "complete", "prompt")],
)
async def test_a_call_and_http_refuse_the_same_in_the_same_words(
    client: httpx.AsyncClient, llm: FakeAsyncLLM, path: str, call: str, first: str
) -> None:
    endpoint, differ, seen = ENDPOINTS[path], [], 0
    good = endpoint.good | {"model": llm.model_name}
    for name, values in endpoint.fields.items():
        for value in values if name not in OF_HTTP else ():
            if value is None or (isinstance(value, int) and abs(value) >= 2**63) or value == ["a"] * 3000:
                continue  # a missing value, an integer beyond JSON, or many prompts
            answer = await client.post(path, json=good | {name: value})
            try:
                await outcome(llm, call, **good | {name: value})
                found = None
            except RayLMError as error:
                found = {"message": clip(error.message, 600), "param": error.param, "code": error.code}
            error = answer.json().get("error")
            wanted = error and {key: error[key] for key in ("message", "param", "code")}
            if found != wanted:
                differ.append(f"{name}={str(value)[:60]}: {found} over HTTP {wanted}")
            seen += 1
    assert not differ, "\n".join(differ)
    assert seen > 150


@pytest.mark.parametrize(("call", "first"), [("generate", "a"), ("chat", HI)])
async def test_a_priority_has_its_policy_or_is_refused(call: str, first: Any) -> None:
    llm = FakeAsyncLLM(admission=Admission())
    for priority in (0, 3):
        with pytest.raises(UnsupportedFieldError, match="fair") as caught:
            await anext(getattr(ingress(llm), call)(first, priority=priority))
        assert caught.value.param == "priority"
    assert not llm.calls
    for policy, given, wanted in (("fair", None, 0), ("fcfs", None, 0), ("priority", -4, -4), ("priority", None, 0)):
        outputs = getattr(ingress(llm, policy), call)(first, priority=given)
        assert [output async for output in outputs][-1].finished
        assert llm.calls[-1].head.priority == wanted


@pytest.mark.parametrize(("streamed", "collected", "first"), [("generate", "complete", "a"), ("chat", "reply", HI)])
async def test_a_collected_answer_is_what_the_stream_brings(streamed: str, collected: str, first: Any) -> None:
    llm = FakeAsyncLLM()
    deltas = [delta for output in await outcome(llm, streamed, first, n=2) for delta in output.deltas]
    whole = await outcome(llm, collected, first, n=2)
    assert whole.finished
    assert [delta.index for delta in whole.deltas] == [0, 1]
    for delta in whole.deltas:
        parts = [part for part in deltas if part.index == delta.index]
        assert len(parts) > 2
        assert delta.text == "".join(part.text for part in parts) == llm.reply + ("1" if delta.index else "")
        assert delta.token_ids == [token for part in parts for token in part.token_ids]
        assert delta.finish_reason == "stop"
    assert whole.num_cached_tokens == len(whole.prompt_token_ids) // 2


async def test_an_answer_has_its_reasoning_and_calls_apart_from_its_text() -> None:
    llm = FakeAsyncLLM()
    think_and_call(llm)
    (delta,) = (await outcome(llm, "reply", HI, tools=[TOOL], tool_choice="auto", reasoning_effort="low")).deltas
    assert (delta.reasoning, delta.text) == ("Hm.", "I ask.")
    assert [(call.name, call.arguments) for call in delta.tool_calls] == [("f", '{"a": 0}'), ("f", '{"a": 1}')]
    assert delta.finish_reason == "tool_calls"
    assert llm.rendered[-1].reasoning_effort == "low"


async def test_params_or_fields_say_how_to_sample_but_not_both() -> None:
    llm = FakeAsyncLLM(sampling_defaults={"temperature": 0.5})
    await outcome(llm, "reply", HI, top_k=3, max_completion_tokens=2)
    assert llm.calls[-1].params == SamplingParams(temperature=0.5, top_k=3, max_tokens=2)
    for call, first in (("reply", HI), ("complete", "a")):
        params = SamplingParams(n=2, seed=3)
        await outcome(llm, call, first, params, cache_salt="s", temperature=None)
        assert llm.calls[-1].params == params
        assert llm.calls[-1].head.cache_salt == "s"
        for name, value in {"seed": 1, "response_format": {"type": "text"}, "max_tokens": 3}.items():
            with pytest.raises(InvalidRequestError, match="params") as caught:
                await outcome(llm, call, first, params, **{name: value})
            assert caught.value.param == name


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_call_that_was_admitted_is_not_refused_when_its_prompt_turns_out_longer(*, streamed: bool) -> None:
    async with Stack() as stack:
        stack.llm.admission = Admission(max_tokens=60)
        calls = HandleCalls(stack.llm, stack.config, Requests(8, stack.llm.timelines))
        with stack.llm.admission.enter(40):  # another call waits
            asked: Any = (None, "7%" * 50, SamplingParams(max_tokens=2, ignore_eos=True))
            outputs = [out async for out in calls.generate(*asked)] if streamed else [await calls.complete(*asked)]
            assert len(outputs[0].prompt_token_ids) > 60, "the prompt is longer than the free tokens"
            assert outputs[-1].finished
        assert (stack.llm.admission.requests, stack.llm.admission.tokens) == (0, 0)


async def test_a_model_is_an_adapter_or_unknown() -> None:
    llm = FakeAsyncLLM()
    with pytest.raises(ModelNotFoundError):
        await outcome(llm, "reply", HI, model="nobody")
    await outcome(llm, "reply", HI, model=llm.model_name)
    assert llm.calls[-1].head.adapter is None


async def test_embed_score_and_rerank_are_those_of_http(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    body = {"model": llm.model_name, "input": "b", "dimensions": 3}
    (row,) = (await client.post("/v1/embeddings", json=body)).json()["data"]
    output = await outcome(llm, "embed", "b", dimensions=3)
    assert output.finished
    assert list(memoryview(output.vector).cast("f")) == pytest.approx(row["embedding"])
    fields: dict[str, Any] = {"text_1": "a", "text_2": ["b", "c"]}
    by_http = (await client.post("/score", json=fields | {"model": llm.model_name})).json()
    assert (await outcome(llm, "score", **fields))["data"] == by_http["data"]
    fields = {"query": "b", "documents": ["z", "a", "c"], "top_n": 2}
    by_http = (await client.post("/rerank", json=fields | {"model": llm.model_name})).json()
    assert (await outcome(llm, "rerank", **fields))["results"] == by_http["results"]


class GivesUp(FakeAsyncLLM):
    """Yields one delta, then ends the stream or the sequence early."""

    ended: Any = None

    async def generate(
        self, prompt: Any, params: SamplingParams, head: RequestHead, answer_format: Any = None
    ) -> AsyncGenerator[RequestOutput, None]:
        delta = CompletionDelta(0, "a", [1], None, self.ended)
        yield RequestOutput(head.request_id, [1], [delta], finished=self.ended is not None)


async def test_what_the_engine_gives_up_is_an_error_and_never_a_short_answer() -> None:
    for call in ("chat", "reply"):
        with pytest.raises(EngineDiedError):
            await outcome(FakeAsyncLLM(fail_after=2, failure=EngineDiedError("gone")), call, HI)
        for ended in (None, "abort", "error"):
            llm = GivesUp()
            llm.ended = ended
            with pytest.raises(RayLMError, match="before it was finished"):
                await outcome(llm, call, HI)


async def test_a_full_queue_or_replica_refuses_and_nothing_is_left() -> None:
    llm = FakeAsyncLLM()
    found = ingress(llm)
    found._requests.shutting_down = True
    for made in (found.reply(HI), found.embed("a"), found.rerank("a", ["b"])):
        with pytest.raises(RayLMError, match="shutting down"):
            await made
    assert not llm.calls
    assert llm.admission.requests == 0


class Process:
    """The answers of the process "gone" in order, and then always True. Other processes always answer True."""

    def __init__(self) -> None:
        self.answers: list[bool | Exception] = []

    def __call__(self, ref: object) -> bool:
        answer = self.answers.pop(0) if ref == "gone" and self.answers else True
        if isinstance(answer, Exception):
            raise answer
        return answer


async def test_a_caller_that_is_gone_ends_its_requests_and_nobody_elses() -> None:
    llm = FakeAsyncLLM(gate=asyncio.Event())
    found, process = ingress(llm), Process()
    found._calls._callers = Callers(process, period_s=0.0)
    gone, kept = [found.stream_to([ref], "chat", HI) for ref in ("gone", "kept")]  # type: ignore[list-item]
    assert not (await anext(gone)).finished
    assert not (await anext(kept)).finished
    process.answers = [False, True, RuntimeError(), False, True]  # two silences, but not in a row
    waiting = asyncio.create_task(anext(gone))
    while process.answers and not waiting.done():  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert not waiting.done()
    process.answers = [False, False, False]
    with pytest.raises(ClientDisconnectedError):
        await waiting
    assert [call.ended for call in llm.calls] == ["aborted", "open"]
    assert llm.gate is not None
    llm.gate.set()
    assert [output async for output in kept][-1].finished
    assert not found._calls._callers._requests
    await found.answer_to(["kept"], "reply", HI)  # type: ignore[list-item]
    assert not found._calls._callers._requests


class Response:
    """A DeploymentHandle's response, streamed or whole."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.cancelled = 0

    def cancel(self) -> None:
        self.cancelled += 1

    def __next__(self) -> Any:
        if not self.items:
            raise StopIteration
        return self.result()

    async def __anext__(self) -> Any:
        if not self.items:
            raise StopAsyncIteration
        return self.result()

    def __await__(self) -> Any:
        yield from asyncio.sleep(0).__await__()
        return self.result()

    def result(self, timeout_s: float | None = None) -> Any:
        item = self.items.pop(0)
        if isinstance(item, BaseException):
            raise item
        return item


def outputs(response: Response) -> Outputs:
    return Outputs(response)  # type: ignore[arg-type]


async def drain(found: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in found]


async def test_outputs_that_are_let_go_of_are_cancelled_once() -> None:
    read, broken, closed, unread = (Response([1, 2, 3]) for _ in range(4))
    assert list(outputs(read)) == [1, 2, 3]  # type: ignore[comparison-overlap]
    for _ in outputs(broken):
        break
    found = outputs(closed)
    assert await anext(found) == 1  # type: ignore[comparison-overlap]
    await found.aclose()
    found.close()
    assert await drain(found) == []
    assert list(found) == []
    outputs(unread)
    gc.collect()
    assert [response.cancelled for response in (read, broken, closed, unread)] == [0, 1, 1, 1]
    assert await drain(outputs(Response([1, 2]))) == [1, 2]  # type: ignore[comparison-overlap]


async def test_results_that_are_let_go_of_are_cancelled_once() -> None:
    read, awaited, unread, late, interrupted = (Response([7]) for _ in range(5))
    assert Result[int](read).result() == await Result[int](awaited) == 7  # type: ignore[arg-type]
    Result[int](unread)  # type: ignore[arg-type]
    late.items = [TimeoutError()]
    with pytest.raises(TimeoutError):
        Result[int](late).result(timeout_s=0.1)  # type: ignore[arg-type]

    async def wait() -> int:
        return await Result[int](interrupted)  # type: ignore[arg-type]

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    gc.collect()
    assert [response.cancelled for response in (read, awaited, unread, late, interrupted)] == [0, 0, 1, 1, 1]


async def test_errors_are_those_that_the_replica_raised() -> None:
    refused = InvalidRequestError("no", param="prompt")
    wrapped = RayTaskError("chat", "Traceback", refused).as_instanceof_cause()
    for response in (Response([wrapped]), Response([1, wrapped])):
        with pytest.raises(InvalidRequestError) as caught:
            list(outputs(response))
        assert caught.value is refused
    with pytest.raises(InvalidRequestError) as caught:
        await drain(outputs(Response([wrapped])))
    assert caught.value is refused
    with pytest.raises(InvalidRequestError) as caught:
        await Result[int](Response([wrapped]))  # type: ignore[arg-type]
    assert caught.value is refused
    with pytest.raises(KeyError):
        list(outputs(Response([KeyError()])))
    with pytest.raises(EngineDiedError, match="replica was lost"):
        list(outputs(Response([1, ActorDiedError()])))
