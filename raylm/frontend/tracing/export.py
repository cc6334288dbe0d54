"""SpanExport: sends the spans of ended requests to a collector by OTLP, on its own thread."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import orjson
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Span, SpanContext, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from raylm.config import Config
from raylm.frontend.timelines.describe import Raw
from raylm.frontend.timelines.record import Part, Record, Trace
from raylm.frontend.tracing.spans import Attributes, SpanData, request_spans
from raylm.stages import about
from raylm.version import VERSION

logger = logging.getLogger("raylm.frontend")

PATH = "/v1/traces"
MAX_WAITING = 1000  # ended requests
MAX_WAITING_WITH_TEXT = 100  # these hold their token ids
BATCH_REQUESTS = 32  # about 300 spans
BATCH_S = 1.0
_LAST_JOIN_S = 0.5
_SCOPE = InstrumentationScope("raylm", VERSION)
_EXPORTER_LOG = "opentelemetry.exporter.otlp.proto.http.trace_exporter"

TextOf = Callable[[list[int]], str]


class SpanExport:
    """A RequestObserver. The end of a request only appends to a queue; a thread does all other work.

    Requests never wait for the collector. Requests that do not fit in the queue, and batches that the collector does
    not accept, are counted in ``lost``; the log says when this begins and ends. OpenTelemetry decides which requests
    are sampled: those of a caller's trace by its flag, others by OTEL_TRACES_SAMPLER.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        resource: Resource,
        collector: str = "",
        text_of: TextOf | None = None,
        max_waiting: int | None = None,
    ) -> None:
        """``collector`` is the name in the log. With ``text_of``, spans include the text of prompts and answers."""
        most = MAX_WAITING if text_of is None else MAX_WAITING_WITH_TEXT
        self.lost = 0
        self._exporter = exporter
        self._collector = collector
        self._text_of = text_of
        self._waiting: queue.Queue[_Unsent | None] = queue.Queue(max_waiting or most)
        self._is_taking = True
        self._ended = _EndedSpans()
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(self._ended)
        self._tracer = provider.get_tracer(_SCOPE.name, _SCOPE.version)
        self._ids, self._resource = RandomIdGenerator(), resource
        self._reason = _FirstWords()
        log = logging.getLogger(_EXPORTER_LOG)
        log.propagate = False
        log.addHandler(self._reason)
        self._thread = threading.Thread(target=self._run, name="raylm-spans", daemon=True)
        self._thread.start()

    def __call__(self, raw: Raw, record: Record) -> None:
        ended = _Unsent(raw, record.trace, None if self._text_of is None else record.parts)
        try:
            self._waiting.put_nowait(ended)
        except queue.Full:
            self.lost += 1

    def close(self, timeout_s: float) -> None:
        """Send waiting requests for at most ``timeout_s``. A batch that is being retried is then dropped."""
        until = time.monotonic() + timeout_s
        with suppress(queue.Full):
            self._waiting.put(None, timeout=timeout_s)
        self._thread.join(max(0.0, until - time.monotonic()))
        self._exporter.shutdown()
        if self._thread.is_alive():
            with suppress(queue.Empty):
                while self._waiting.get_nowait() is not None:
                    self.lost += 1
            self._waiting.put(None)
            self._thread.join(_LAST_JOIN_S)
        logging.getLogger(_EXPORTER_LOG).removeHandler(self._reason)

    def _run(self) -> None:
        is_open = True
        while is_open:
            ended = [self._waiting.get()]
            until = time.monotonic() + BATCH_S
            with suppress(queue.Empty):
                while ended[-1] is not None and len(ended) < BATCH_REQUESTS:
                    ended.append(self._waiting.get(timeout=max(0.0, until - time.monotonic())))
            is_open = ended[-1] is not None
            self._send([one for one in ended if one is not None])

    def _send(self, requests: list[_Unsent]) -> None:
        for ended in requests:
            try:
                self._trace(ended)
            except Exception:  # any exception: the other requests must be sent
                self.lost += 1
                request_id = ended.raw["id"]
                failed = about("otlp.failed", request_id)
                logger.exception("request %s: its spans could not be created", request_id, extra=failed)
            time.sleep(0)  # lets the event loop run
        if not (spans := self._ended.take()):
            return
        self._reason.text = ""
        try:
            is_taking = self._exporter.export(spans) is SpanExportResult.SUCCESS
        except Exception as error:  # as the SDK's own thread: exporters up to 1.30 raise where nobody answers
            is_taking, self._reason.text = False, self._reason.text or " ".join(str(error).split())[:300]
        if not is_taking:
            self.lost += len(requests)
        if is_taking != self._is_taking:
            self._is_taking = is_taking
            self._tell()

    def _tell(self) -> None:
        if self._is_taking:
            logger.warning(
                "spans are sent to %s again; the spans of %d requests were lost",
                self._collector,
                self.lost,
                extra=about("otlp.taken"),
            )
            return
        logger.warning(
            "spans cannot be sent to %s and are being lost: %s",
            self._collector,
            self._reason.text or "it rejects them",
            extra=about("otlp.refused"),
        )

    def _trace(self, ended: _Unsent) -> None:
        """Create the spans of a request. If they are sampled, they end in ``_ended``."""
        context = Context()
        if ended.trace is not None:
            headers = dict(zip(("traceparent", "tracestate"), ended.trace, strict=True))
            context = TraceContextTextMapPropagator().extract(headers, context)
        data, phases = request_spans(ended.raw)
        if self._text_of is not None and ended.parts is not None:
            data.attributes.update(_content(ended.parts, self._text_of))
        span = self._tracer.start_span(
            data.name, context, SpanKind.SERVER, data.attributes, start_time=_nanoseconds(data.start)
        )
        if not span.is_recording():
            return
        for name, at, attributes in data.events:
            span.add_event(name, attributes, _nanoseconds(at))
        if data.error:
            span.set_status(Status(StatusCode.ERROR, data.error))
        for phase in phases:
            self._ended.on_end(self._child(phase, span))
        span.end(_nanoseconds(data.end))

    def _child(self, phase: SpanData, parent: Span) -> ReadableSpan:
        """Create a finished child span. A span of the tracer can still change, and takes three times as long."""
        root = parent.get_span_context()
        number = self._ids.generate_span_id()
        return ReadableSpan(
            phase.name,
            SpanContext(root.trace_id, number, False, root.trace_flags, root.trace_state),
            root,
            self._resource,
            start_time=_nanoseconds(phase.start),
            end_time=_nanoseconds(phase.end),
            instrumentation_scope=_SCOPE,
        )


class _Unsent(NamedTuple):
    """A request that waits to be sent. ``parts`` is None unless text is sent."""

    raw: Raw
    trace: Trace
    parts: list[Part] | None


class _EndedSpans(SpanProcessor):
    """Collects the sampled spans until ``take``."""

    def __init__(self) -> None:
        self._spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is not None and span.context.trace_flags.sampled:
            self._spans.append(span)

    def take(self) -> list[ReadableSpan]:
        taken, self._spans = self._spans, []
        return taken


class _FirstWords(logging.Handler):
    """Keeps the exporter's first log message of a batch, which has the reason of a failure."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = self.text or " ".join(record.getMessage().split())[:300]


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _content(parts: list[Part], text_of: TextOf) -> Attributes:
    """Prompts and answers as the model's text, with the special tokens of its template."""
    asked, answered = [], []
    for part in parts:
        if part.request is None:
            continue
        asked.append(_message("user", text_of(list(part.request.prompt_token_ids))))
        for index, drawn in enumerate(part.drawn):
            reason = part.finish_reasons.get(index, "")
            answered.append(_message("assistant", text_of(drawn)) | ({"finish_reason": reason} if reason else {}))
    return {
        name: orjson.dumps(messages).decode()
        for name, messages in (("gen_ai.input.messages", asked), ("gen_ai.output.messages", answered))
        if messages
    }


def _message(role: str, text: str) -> dict[str, object]:
    return {"role": role, "parts": [{"type": "text", "content": text}]}


def traces_url(endpoint: str) -> str:
    """The URL for spans at an OTLP endpoint. The endpoint's path is optional."""
    endpoint = endpoint.rstrip("/")
    return endpoint if endpoint.endswith(PATH) else endpoint + PATH


def open_export(config: Config, application: str, instance: str, text_of: TextOf) -> SpanExport | None:
    """The export that ``config`` enables, or None. ``instance`` is the ingress's name.

    OpenTelemetry's variables configure the rest: OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES,
    OTEL_EXPORTER_OTLP_HEADERS, _CERTIFICATE, _TIMEOUT, _COMPRESSION, OTEL_TRACES_SAMPLER.
    """
    bounds = config.ingress
    if bounds.otlp_endpoint is None:
        return None
    url = traces_url(bounds.otlp_endpoint)
    ours = {"service.name": "raylm", "service.version": VERSION, "service.instance.id": instance}
    named = Resource(ours | {"raylm.application": application, "raylm.model": config.model_name})
    resource = Resource.create().merge(named).merge(OTELResourceDetector().detect())
    return SpanExport(OTLPSpanExporter(url), resource, url, text_of if bounds.otlp_content else None)
