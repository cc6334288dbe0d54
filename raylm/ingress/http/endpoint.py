"""JSONEndpoint: one POST route as a bare ASGI app; admission, body, deadline, an answer whole or as a stream."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from raylm.errors import DeadlineExceededError, InvalidRequestError, PermissionDeniedError
from raylm.frontend import (
    Admission,
    ApiKey,
    Arrival,
    ClientDisconnectedError,
    Request,
    Requests,
    trace_of,
)
from raylm.ingress.http.body import BodyReader, check_head, read_json_object
from raylm.ingress.http.errors import as_known_error, error_event, logger, route_path
from raylm.ingress.http.event_stream import EventStream
from raylm.ingress.http.exchange import exchange_of
from raylm.ingress.http.hosts import check_local
from raylm.ingress.http.sse import WAITING
from raylm.ingress.http.stream_ids import LAST_EVENT_ID, Posted, reads_all_events
from raylm.ingress.openai.fields import Body
from raylm.messages import ServiceLevel
from raylm.stages import about

if TYPE_CHECKING:
    from raylm.ingress.openai.unknown_fields import IncomingFields

Chunks = AsyncGenerator[bytes, None]
Answer = bytes | list[bytes] | Chunks
_Callback = Callable[[], None]

_ERROR_EVENT_TIMEOUT_S = 1.0
_JSON_HEADERS = [(b"content-type", b"application/json")]
# Seconds, as OpenAI's and Anthropic's clients announce their own time limits; what is no number is ignored.
_CLIENT_TIMEOUTS = ("x-stainless-read-timeout", "x-stainless-timeout")
# Milliseconds, from proxies, or from a client that says more than its library does.
_REQUEST_TIMEOUT = "request-timeout-ms"
# Milliseconds in which the first token should be there, and each further one behind the one before.
_TTFT, _ITL = "x-raylm-ttft-ms", "x-raylm-itl-ms"


@dataclass(frozen=True, eq=False)
class JSONEndpoint:
    """Reads a ``body``, calls ``handler`` with it and the Request, and sends the Answer.

    A handler that is ``for_admins`` is called for keys of admins alone, and without keys for this machine alone. A
    handler whose streams are ``resumable`` also gets what was Posted.

    ``incoming`` makes of the JSON what the body is read from, and names the fields that it left out.

    A stream's head is held back until the first chunk is there, so that what goes wrong before the first token gets
    its true status; what goes wrong later becomes an error event and the end of the stream. While there is nothing to
    tell for KEEP_ALIVE_S ``keep_alive`` is sent, an event that clients leave out, at first behind the head. Without
    ``keep_alive`` it is a comment, for clients that ask for all events.
    """

    body: type[Body]
    handler: Callable[..., Awaitable[Answer]]
    incoming: IncomingFields
    requests: Requests
    bodies: BodyReader
    queue: Admission
    keep_alive: bytes
    for_admins: bool = False
    resumable: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        key = exchange.key
        if self.for_admins and key is None:
            check_local(scope)
        if self.for_admins and key is not None and not key.admin:
            raise PermissionDeniedError("Only an API key with the option 'admin' may do this.")
        headers = Headers(scope=scope)
        trace = trace_of(headers.get("traceparent"), ",".join(headers.getlist("tracestate")))
        arrival = Arrival(exchange.request_id, str(scope["path"]), key, trace)
        with suppress(ClientDisconnectedError):
            async with self.requests.open(arrival, self.queue) as request:
                await self._answer(request, scope, receive, send)

    async def _answer(self, request: Request, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        with request.connected():
            request.check(check_head(headers, self.bodies.max_bytes))
            await request.claim()
        request.record.mark("body")
        with _deadline(headers, request) as on_begin:
            with self.requests.receiving(), request.connected():  # it does not count in the replica meanwhile
                content = await self.bodies.read(receive, request)
            request.record.mark("parse")
            await self._serve(content, request, on_begin, scope, receive, send)

    async def _serve(
        self, content: bytes, request: Request, on_begin: _Callback, scope: Scope, receive: Receive, send: Send
    ) -> None:
        headers, key_name = Headers(scope=scope), request.arrival.key_name
        watch = asyncio.create_task(_watch_disconnect(receive, request))
        try:
            with request.connected():
                request.wait(len(content))
                reads_all = reads_all_events(headers)
                data = await read_json_object(content)
                data, ignored = await self.incoming.prepare(self.body, data)
                exchange_of(scope).ignored_fields = ignored
                body = await self.body.read(data)
                self.incoming.tell(body.left_out)
                self.incoming.meet(headers.get("user-agent", ""))
                ignored += [name for name in body.left_out if name not in ignored]
                request.service = service_level(headers, request.key, body)
                request.record.note_body(getattr(body, "model", None), getattr(body, "stream", None))
                more = (Posted(content, key_name, headers.get(LAST_EVENT_ID, ""), reads_all),) if self.resumable else ()
                answer = await self.handler(body, request, *more)
            if isinstance(answer, (bytes, list)):
                on_begin()
                if not request.kept:
                    request.leave_queue()  # however slowly the client reads
                await _send_whole([answer] if isinstance(answer, bytes) else answer, request.record.sending(send))
            else:
                async with aclosing(answer):
                    keep_alive = self.keep_alive or (WAITING if reads_all else b"")
                    events = EventStream(send, keep_alive, request.record)
                    await _send_stream(answer, request, on_begin, scope, events)
        finally:
            watch.cancel()


@contextmanager
def _deadline(headers: Headers, request: Request) -> Iterator[_Callback]:
    """End a request when its client stops waiting, unless the yielded function was called when the answer began."""
    timeout_s = request_timeout_s(headers)
    if timeout_s is None:
        yield lambda: None
        return
    error = DeadlineExceededError(f"The request was given up: nothing could be answered within {timeout_s:g} s.")
    timer = asyncio.get_running_loop().call_later(timeout_s, request.hang_up, error)
    try:
        yield timer.cancel
    finally:
        timer.cancel()


def service_level(headers: Headers, key: ApiKey | None, body: Body) -> ServiceLevel:
    """What a request's key and its headers say of how it is to be served.

    Engines are told a digest of the key's name. A client's time limit holds for answers that are sent whole: a stream
    begins before its first token, and one in the background before everything.
    """
    is_whole = not (getattr(body, "stream", False) or getattr(body, "background", False))
    return ServiceLevel(
        tenant="" if key is None else _tenant(key.name),
        weight=1.0 if key is None else key.weight,
        ttft_s=_seconds(headers, _TTFT) or (None if key is None else key.ttft_s),
        itl_s=_seconds(headers, _ITL) or (None if key is None else key.itl_s),
        timeout_s=request_timeout_s(headers) if is_whole else None,
        own_prefixes=key is not None and key.own_prefixes,
    )


@lru_cache(maxsize=4096)
def _tenant(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def _seconds(headers: Headers, name: str) -> float | None:
    """Of a header in milliseconds, None without it."""
    if (given := headers.get(name)) is None:
        return None
    if not (milliseconds := _positive(given)):
        raise InvalidRequestError(f"The header '{name}' must be a positive number of milliseconds.", param=name)
    return milliseconds / 1000


def request_timeout_s(headers: Headers) -> float | None:
    """Seconds after which the client hangs up if nothing has come by then, None if it does not say."""
    limits = [_positive(headers.get(name, "")) for name in _CLIENT_TIMEOUTS]
    limits.append(_seconds(headers, _REQUEST_TIMEOUT) or 0.0)
    return min(filter(None, limits), default=None)


def _positive(text: str) -> float:
    """0 if it is no positive number."""
    try:
        number = float(text) if len(text) < 20 else math.nan
    except ValueError:
        return 0.0
    return number if math.isfinite(number) and number > 0 else 0.0


async def _watch_disconnect(receive: Receive, request: Request) -> None:
    try:
        while (await receive())["type"] != "http.disconnect":
            pass
    except Exception as error:
        logger.warning("the connection to a client broke: %s", error, extra=about("client.lost"))
    request.hang_up(ClientDisconnectedError())


async def _send_whole(pieces: list[bytes], send: Send) -> None:
    headers = [*_JSON_HEADERS, (b"content-length", b"%d" % sum(map(len, pieces)))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for piece in pieces[:-1]:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": pieces[-1]})


async def _send_stream(
    chunks: Chunks, request: Request, on_begin: _Callback, scope: Scope, events: EventStream
) -> None:
    async with events:
        try:
            with request.connected():
                first = await anext(chunks)
                on_begin()
                await events.send(first)
                async for chunk in chunks:
                    await events.send(chunk)
                await events.end()
        except ClientDisconnectedError:
            raise
        except Exception as error:
            if not events.begun:
                raise
            event = error_event(as_known_error(error, request.id), route_path(scope))
            # A client that does not read may not hold this up for long.
            with suppress(TimeoutError):
                async with asyncio.timeout(_ERROR_EVENT_TIMEOUT_S):
                    await events.end(event)
