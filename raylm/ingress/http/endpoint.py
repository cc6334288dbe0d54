"""JSONEndpoint: one POST route as a bare ASGI app; admission, body, deadline, an answer whole or as a stream."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from raylm.errors import DeadlineExceededError, InvalidRequestError
from raylm.frontend import (
    Admission,
    ClientDisconnectedError,
    Lifecycle,
    OngoingRequest,
    Record,
    Throttle,
    Timelines,
    note_body,
)
from raylm.ingress.http.body import BodyReader, JSONObject, check_head, read_json_object
from raylm.ingress.http.errors import as_known_error, error_event, logger
from raylm.ingress.http.event_stream import EventStream
from raylm.ingress.openai.fields import Body

Chunks = AsyncGenerator[bytes, None]
Answer = bytes | list[bytes] | Chunks
_Callback = Callable[[], None]

_ERROR_EVENT_TIMEOUT_S = 1.0
_JSON_HEADERS = [(b"content-type", b"application/json")]
# Seconds, as OpenAI's and Anthropic's clients announce their own time limits; what is no number is ignored.
_CLIENT_TIMEOUTS = ("x-stainless-read-timeout", "x-stainless-timeout")
# Milliseconds, from proxies, or from a client that says more than its library does.
_REQUEST_TIMEOUT = "request-timeout-ms"


@dataclass(frozen=True, eq=False)
class JSONEndpoint:
    """Reads a ``body``, calls ``handler`` with it and the request's id, and sends the Answer.

    A handler ``by_key`` also gets the name of the API key that the request came with, "" if none was needed.

    ``prepare`` makes of the JSON what the body is read from, and names the fields that it left out.

    A stream's head is held back until the first chunk is there, so that what goes wrong before the first token gets
    its true status; what goes wrong later becomes an error event and the end of the stream. While there is nothing to
    tell for KEEP_ALIVE_S ``keep_alive`` is sent, an event that clients leave out, at first behind the head.
    """

    body: type[Body]
    handler: Callable[..., Awaitable[Answer]]
    prepare: Callable[[type[Body], JSONObject], Awaitable[tuple[JSONObject, list[str]]]]
    lifecycle: Lifecycle
    throttle: Throttle
    admission: Admission
    bodies: BodyReader
    max_body_bytes: int
    keep_alive: bytes
    timelines: Timelines
    by_key: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key, path = scope.get("raylm.key", ""), str(scope["path"])
        with suppress(ClientDisconnectedError), self.timelines.request(scope["raylm.request_id"], key, path) as record:
            await self._answer(scope, receive, record.sending(send), record)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, record: Record) -> None:
        await self.throttle.enter()
        headers = Headers(scope=scope)
        with self.lifecycle.admit() as ongoing:
            record.cancel = ongoing.interrupt
            record.mark("body")
            self.admission.check(check_head(headers, self.max_body_bytes))
            with _deadline(headers, ongoing) as on_begin:
                with self.lifecycle.receiving(), ongoing:
                    content = await self.bodies.read(receive, ongoing)
                record.mark("parse")
                await self._serve(content, ongoing, on_begin, scope, receive, send)

    async def _serve(
        self, content: bytes, ongoing: OngoingRequest, on_begin: _Callback, scope: Scope, receive: Receive, send: Send
    ) -> None:
        watch = asyncio.create_task(_watch_disconnect(receive, ongoing))
        try:
            with self.admission.enter(len(content)) as reservation:
                with ongoing:
                    data = await read_json_object(content)
                    data, scope["raylm.ignored_fields"] = await self.prepare(self.body, data)
                    body = await self.body.read(data)
                    note_body(getattr(body, "model", None), getattr(body, "stream", None))
                    key = (scope.get("raylm.key", ""),) if self.by_key else ()
                    answer = await self.handler(body, scope["raylm.request_id"], *key)
                if isinstance(answer, (bytes, list)):
                    on_begin()
                    reservation.release()  # however slowly the client reads
                    await _send_whole([answer] if isinstance(answer, bytes) else answer, send)
                else:
                    async with aclosing(answer):
                        await _send_stream(answer, ongoing, on_begin, scope, send, self.keep_alive)
        finally:
            watch.cancel()


@contextmanager
def _deadline(headers: Headers, ongoing: OngoingRequest) -> Iterator[_Callback]:
    """Interrupt a request when its client stops waiting, unless what this yields was called as the answer began."""
    timeout_s = request_timeout_s(headers)
    if timeout_s is None:
        yield lambda: None
        return
    error = DeadlineExceededError(f"The request was given up: nothing could be answered within {timeout_s:g} s.")
    timer = asyncio.get_running_loop().call_later(timeout_s, ongoing.interrupt, error)
    try:
        yield timer.cancel
    finally:
        timer.cancel()


def request_timeout_s(headers: Headers) -> float | None:
    """Seconds after which the client hangs up if nothing has come by then, None if it does not say."""
    limits = [_positive(headers.get(name, "")) for name in _CLIENT_TIMEOUTS]
    if (given := headers.get(_REQUEST_TIMEOUT)) is not None:
        if not (limit_ms := _positive(given)):
            message = f"The header '{_REQUEST_TIMEOUT}' must be a positive number."
            raise InvalidRequestError(message, param=_REQUEST_TIMEOUT)
        limits.append(limit_ms / 1000)
    return min(filter(None, limits), default=None)


def _positive(text: str) -> float:
    """0 if it is no positive number."""
    try:
        number = float(text) if len(text) < 20 else math.nan
    except ValueError:
        return 0.0
    return number if math.isfinite(number) and number > 0 else 0.0


async def _watch_disconnect(receive: Receive, ongoing: OngoingRequest) -> None:
    try:
        while (await receive())["type"] != "http.disconnect":
            pass
    except Exception as error:
        logger.warning("the connection to a client broke: %s", error)
    ongoing.interrupt(ClientDisconnectedError())


async def _send_whole(pieces: list[bytes], send: Send) -> None:
    headers = [*_JSON_HEADERS, (b"content-length", b"%d" % sum(map(len, pieces)))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for piece in pieces[:-1]:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": pieces[-1]})


async def _send_stream(
    chunks: Chunks, ongoing: OngoingRequest, on_begin: _Callback, scope: Scope, send: Send, keep_alive: bytes
) -> None:
    async with EventStream(send, keep_alive) as events:
        try:
            with ongoing:
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
            event = error_event(as_known_error(error, scope["raylm.request_id"]), scope["path"])
            # A client that does not read may not hold this up for long.
            with suppress(TimeoutError):
                async with asyncio.timeout(_ERROR_EVENT_TIMEOUT_S):
                    await events.end(event)
