"""Spans of requests over the whole stack without a model, as an OTLP collector receives them."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from raylm.config import Config
from raylm.errors import InvalidRequestError
from raylm.frontend import Requests, open_observers
from raylm.frontend.timelines.describe import PHASES
from raylm.frontend.timelines.ring import Timelines
from raylm.frontend.tracing import export
from raylm.frontend.tracing.export import SpanExport, traces_url
from raylm.ingress.handle_calls import HandleCalls
from raylm.version import VERSION
from tests.frontend.noted import noted
from tests.frontend.tracing.collector import Collector, values
from tests.ingress.console.stack import Stack
from tests.ingress.harness import CHAT, until
from tests.ingress.test_real_llm import TEXT

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=of-theirs"}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "BATCH_S", 0.02)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector().running() as running:
        yield running


class Kept(logging.Handler):
    """Collects log records."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@asynccontextmanager
async def traced(collector: Collector, **ingress: Any) -> AsyncIterator[Stack]:
    """A stack that sends its spans to ``collector``. At the end all spans are sent."""
    async with Stack(ingress={"otlp_endpoint": collector.url, **ingress}) as stack:
        opened = open_observers(stack.config, "app", "replica-1", stack.llm.text_of)
        stack.llm.timelines.observers = opened
        try:
            yield stack
        finally:
            await asyncio.to_thread(stack.llm.timelines.close, 300)


async def test_a_request_is_a_span_with_its_phases(collector: Collector) -> None:
    async with traced(collector) as stack, stack.client() as client:
        answer = await client.post(
            "/v1/completions", json=TEXT | {"temperature": 0.5, "top_k": 7}, headers={"x-request-id": "find-me"}
        )
        timeline = (await client.get("/v1/requests/find-me")).json()
    assert answer.status_code == 200
    (root,) = collector.roots
    assert collector.paths == ["/v1/traces"]
    assert (root.name, root.parent_span_id, root.status.code) == (
        "text_completion embedded", b"", Status.STATUS_CODE_UNSET,
    )  # fmt: skip
    told = values(root.attributes)
    usage = answer.json()["usage"]
    assert told | {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "raylm",
        "gen_ai.request.model": "embedded",
        "gen_ai.response.model": "embedded",
        "gen_ai.request.id": "find-me",
        "gen_ai.request.stream": False,
        "gen_ai.request.max_tokens": 24,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_k": 7,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.num_sequences": 1,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.latency.e2e": timeline["wall_s"],
        "gen_ai.latency.time_to_first_token": timeline["ttft_s"],
        "http.response.status_code": 200,
        "url.path": "/v1/completions",
        "raylm.engine": "e0",
        "raylm.ingress": "ingress",
    } == told  # fmt: skip
    assert "gen_ai.request.choice.count" not in told
    children = collector.children(root)
    assert [
        (span.name, round((span.end_time_unix_nano - span.start_time_unix_nano) / 1e9, 6)) for span in children
    ] == [(phase["phase"], pytest.approx(phase["seconds"], abs=2e-6)) for phase in timeline["phases"]]
    assert {span.name for span in children} >= {"tokenize", "prefill", "decode"}
    assert all(span.trace_id == root.trace_id and span.kind == Span.SPAN_KIND_INTERNAL for span in children)
    assert [event.name for event in root.events] == ["routed", "first token"]
    wall_ns = root.end_time_unix_nano - root.start_time_unix_nano
    assert sum(span.end_time_unix_nano - span.start_time_unix_nano for span in children) == pytest.approx(
        wall_ns, abs=2e4
    )
    assert collector.resource() | {
        "service.name": "raylm", "service.version": VERSION, "service.instance.id": "replica-1",
        "raylm.application": "app", "raylm.model": "embedded",
    } == collector.resource()  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/chat/completions", CHAT | {"model": "embedded", "max_tokens": 2}, "chat embedded"),
        pytest.param(
            "/v1/messages",
            CHAT | {"model": "embedded", "max_tokens": 2},
            "chat embedded",
        ),
        ("/tokenize", {"model": "embedded", "prompt": "Hi"}, "tokenize embedded"),
    ],
)
async def test_operations_have_the_names_of_the_conventions(
    collector: Collector, path: str, body: dict[str, Any], name: str
) -> None:
    async with traced(collector) as stack, stack.client() as client:
        assert (await client.post(path, json=body)).status_code == 200
    assert [root.name for root in collector.roots] == [name]
    assert {span.name for span in collector.children(collector.roots[0])} <= PHASES.keys()


async def test_the_caller_is_the_parent_and_its_flag_decides(collector: Collector) -> None:
    async with traced(collector) as stack, stack.client() as client:
        await client.post("/v1/completions", json=TEXT, headers=SAMPLED)
        unsampled = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
        await client.post("/v1/completions", json=TEXT, headers=unsampled)
        await client.post("/v1/completions", json=TEXT, headers={"traceparent": "00-nonsense"})
    first, second = sorted(collector.roots, key=lambda span: span.start_time_unix_nano)
    assert (first.trace_id.hex(), first.parent_span_id.hex(), first.trace_state) == (TRACE, PARENT, "vendor=of-theirs")
    assert {span.trace_id.hex() for span in collector.children(first)} == {TRACE}
    assert second.parent_span_id == b""
    assert second.trace_id.hex() != TRACE
    assert len(collector.spans) == 2 + len(collector.children(first)) + len(collector.children(second))


async def test_calls_by_handle_have_parents_too(collector: Collector) -> None:
    async with traced(collector) as stack:
        calls = HandleCalls(stack.llm, stack.config, Requests(8, stack.llm.timelines))
        fields = {"max_tokens": 2, **SAMPLED}
        await calls.complete(None, "Say", **fields)
        messages = [{"role": "user", "content": "Hi"}]
        assert [output async for output in calls.chat(None, messages, max_tokens=2)]
        with pytest.raises(InvalidRequestError) as refused:
            await calls.complete(None, "Say", traceparent=5)
        assert refused.value.param == "traceparent"
    first, second, third = sorted(collector.roots, key=lambda span: span.start_time_unix_nano)
    assert (first.name, first.trace_id.hex(), first.parent_span_id.hex()) == ("text_completion embedded", TRACE, PARENT)
    assert (second.name, second.parent_span_id) == ("chat embedded", b"")
    assert values(third.attributes)["error.type"] == "invalid_request_error"


async def test_a_refusal_is_the_callers_and_a_failure_is_ours(collector: Collector) -> None:
    async with traced(collector) as stack, stack.client() as client:
        assert (await client.post("/v1/completions", json=TEXT | {"max_tokens": -1})).status_code == 400
        stack.llm._input.build = None  # type: ignore[assignment]  # calling it is a bug
        assert (await client.post("/v1/completions", json=TEXT)).status_code == 500
    refused, failed = sorted(collector.roots, key=lambda span: span.start_time_unix_nano)
    assert (refused.status.code, values(refused.attributes)["error.type"]) == (
        Status.STATUS_CODE_UNSET, "invalid_request_error",
    )  # fmt: skip
    assert (failed.status.code, failed.status.message) == (Status.STATUS_CODE_ERROR, "TypeError")
    assert values(failed.attributes)["error.type"] == "TypeError"


async def test_preemptions_are_events(collector: Collector) -> None:
    """Twelve blocks of 16 tokens cannot hold both answers, nor the recomputation of a preempted one."""
    body = TEXT | {"max_tokens": 120}
    async with traced(collector) as stack, stack.client() as client:
        answers = await asyncio.gather(*(client.post("/v1/completions", json=body | {"seed": s}) for s in (1, 2)))
        assert [answer.status_code for answer in answers] == [200, 200]
    events = [(values(root.attributes), event) for root in collector.roots for event in root.events]
    preempted = [(told, values(event.attributes)) for told, event in events if event.name == "preempted"]
    assert preempted
    ids = {values(root.attributes)["gen_ai.request.id"] for root in collector.roots}
    for told, about in preempted:
        assert told["raylm.preemptions"] >= 1
        other = about["raylm.preempted_for"].removeprefix("cmpl-").removesuffix("-0")
        assert other in ids - {told["gen_ai.request.id"]}
        assert about["raylm.tokens"] > 0


async def test_prompts_and_answers_are_in_no_span_unless_asked(collector: Collector) -> None:
    chat = CHAT | {"model": "embedded", "max_tokens": 8, "seed": 1, "stop": ["planted-stop"]}
    chat["messages"] = [{"role": "user", "content": "planted-prompt"}]
    async with traced(collector) as stack, stack.client() as client:
        answer = (await client.post("/v1/chat/completions", json=chat)).json()["choices"][0]["message"]["content"]
        await client.post("/v1/chat/completions", json=chat | {"planted-field": 1})
    sent = b"".join(collector.bodies)
    assert b"chat embedded" in sent
    assert b"planted" not in sent
    assert answer.encode() not in sent

    collector.bodies.clear(), collector.requests.clear()
    async with traced(collector, otlp_content=True) as stack, stack.client() as client:
        answer = (await client.post("/v1/chat/completions", json=chat)).json()["choices"][0]["message"]["content"]
    told = values(collector.roots[0].attributes)
    (asked,), (answered,) = json.loads(told["gen_ai.input.messages"]), json.loads(told["gen_ai.output.messages"])
    assert asked["role"] == "user"
    assert "planted-prompt" in asked["parts"][0]["content"]
    assert (answered["role"], answered["finish_reason"]) == ("assistant", "length")
    assert answer in answered["parts"][0]["content"]


async def test_requests_do_not_wait_for_a_collector_that_is_away(
    collector: Collector, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(logging.root, "handlers", [*logging.root.handlers, root := Kept()])
    collector.status = 400
    async with traced(collector) as stack, stack.client() as client:
        for _ in range(3):
            before = collector.refused
            assert (await client.post("/v1/completions", json=TEXT)).status_code == 200
            await until(lambda before=before: collector.refused > before)  # type: ignore[misc]
        observer = stack.llm.timelines.observers[-1]
        await until(lambda: observer.lost == 3)  # type: ignore[attr-defined]
        collector.status = 200
        assert (await client.post("/v1/completions", json=TEXT)).status_code == 200
    assert len(collector.roots) == 1
    first, second = (record.getMessage() for record in caplog.records if record.name.startswith("raylm"))
    assert "cannot be sent" in first
    assert "Bad Request" in first
    assert "the spans of 3 requests were lost" in second
    assert [record for record in root.records if record.name.startswith("opentelemetry")] == []


class Raising(SpanExporter):
    """An exporter that raises once, as exporters up to 1.30 do where no collector answers, and then takes spans."""

    def __init__(self) -> None:
        self.taken: list[ReadableSpan] = []
        self._raises = True

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        raises, self._raises = self._raises, False
        if raises:
            raise ConnectionError("nobody answers")
        self.taken.extend(spans)
        return SpanExportResult.SUCCESS


async def test_an_exporter_that_raises_loses_its_spans_and_no_later_ones(caplog: pytest.LogCaptureFixture) -> None:
    timelines, exporter = Timelines(), Raising()
    observer = SpanExport(exporter, Resource({}), "there")
    timelines.observers = (observer,)
    with noted(timelines, "first", "", "/"):
        pass
    await until(lambda: observer.lost == 1)
    with noted(timelines, "second", "", "/"):
        pass
    await asyncio.to_thread(timelines.close, 300)
    assert exporter.taken
    assert observer.lost == 1
    assert "spans cannot be sent to there and are being lost: nobody answers" in caplog.text


def test_what_the_queue_cannot_hold_is_lost_and_closing_has_an_end(collector: Collector) -> None:
    """The collector does not answer in time: the exporter repeats requests with 503 for an hour."""
    collector.status = 503
    timelines = Timelines()
    observer = SpanExport(OTLPSpanExporter(traces_url(collector.url), timeout=3600), Resource({}), max_waiting=2)
    timelines.observers = (observer,)
    with noted(timelines, "first", "", "/"):
        pass
    assert collector.has_refused.wait(300)
    for number in range(5):
        with noted(timelines, str(number), "", "/"):
            pass
    assert observer.lost == 3
    observer.close(0.1)
    assert not observer._thread.is_alive()
    assert observer.lost == 6


def test_an_endpoint_has_a_path_or_the_usual_one() -> None:
    assert traces_url("http://c:4318") == traces_url("http://c:4318/") == "http://c:4318/v1/traces"
    assert traces_url("https://c/otlp") == "https://c/otlp/v1/traces"
    assert traces_url("https://c/otlp/v1/traces") == "https://c/otlp/v1/traces"


def test_content_without_an_endpoint_is_refused() -> None:
    with pytest.raises(ValueError, match="otlp_content"):
        Config.model_validate({"ingress": {"otlp_content": True}})
    with pytest.raises(ValueError, match="otlp_endpoint"):
        Config.model_validate({"ingress": {"otlp_endpoint": "localhost:4317"}})
