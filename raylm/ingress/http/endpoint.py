"""JSONEndpoint: one POST route as a bare ASGI app; admission, body, deadline, an answer whole or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Protocol

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from raylm.frontend import Admission, ClientDisconnectedError, Lifecycle, OngoingRequest, Throttle
from raylm.ingress.http.body import JSONObject, check_head, content_length, read_json_object
from raylm.ingress.http.deadline import Deadline
from raylm.ingress.http.errors import as_known_error, error_event, logger
from raylm.ingress.openai.fields import Body

Chunks = AsyncGenerator[bytes, None]
Answer = bytes | list[bytes] | Chunks

_LAST_WORDS_S = 1.0
_JSON_HEADERS = [(b"content-type", b"application/json")]
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Handler(Protocol):
    """Answers the JSON bodies of one route."""

    @property
    def body(self) -> type[Body]:
        """What describes and checks a body's fields."""

    async def __call__(self, data: JSONObject, request_id: str) -> Answer:
        """Answer one request.

        Raises:
            RayLMError: the request is refused or failed.
        """


class JSONEndpoint:
    """Calls ``handler(body, request_id)`` and sends its Answer.

    A stream's head is held back until the first chunk is there, so that everything that goes wrong before the first
    token has its true status; what goes wrong later becomes an error event and the end of the stream.
    """

    def __init__(
        self,
        handler: Handler,
        lifecycle: Lifecycle,
        throttle: Throttle,
        admission: Admission,
        max_body_bytes: int,
    ) -> None:
        self.handler = handler
        self._throttle = throttle
        self._lifecycle = lifecycle
        self._admission = admission
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request.

        Raises:
            RayLMError: the request was refused or failed; nothing has been sent.
        """
        await self._throttle.enter()
        headers = Headers(scope=scope)
        ongoing = self._lifecycle.admit()
        try:
            check_head(headers, self._max_body_bytes)
            with self._admission.enter(content_length(headers)) as hold, Deadline(headers, ongoing) as deadline:
                with ongoing:
                    data, num_bytes = await read_json_object(receive, self._max_body_bytes)
                    hold.grow(1, num_bytes)
                await self._serve(data, ongoing, deadline, scope, receive, send)
        except ClientDisconnectedError:
            return
        finally:
            self._lifecycle.release(ongoing)

    async def _serve(
        self, data: JSONObject, ongoing: OngoingRequest, deadline: Deadline, scope: Scope, receive: Receive, send: Send
    ) -> None:
        watch = asyncio.create_task(_watch_disconnect(receive, ongoing))
        try:
            with ongoing:
                answer = await self.handler(data, scope["raylm.request_id"])
            if isinstance(answer, (bytes, list)):
                deadline.keep()
                await _send_whole([answer] if isinstance(answer, bytes) else answer, scope, send)
            else:
                async with aclosing(answer):
                    await _send_stream(answer, ongoing, deadline, scope, send)
        finally:
            watch.cancel()


async def _watch_disconnect(receive: Receive, ongoing: OngoingRequest) -> None:
    try:
        while (await receive())["type"] != "http.disconnect":
            pass
    except Exception as error:
        logger.warning("the line to a client broke: %s", error)
    ongoing.interrupt(ClientDisconnectedError())


async def _send_whole(pieces: list[bytes], scope: Scope, send: Send) -> None:
    headers = [*_JSON_HEADERS, (b"content-length", b"%d" % sum(map(len, pieces)))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    send = scope["raylm.send"]
    for piece in pieces[:-1]:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": pieces[-1]})


async def _send_stream(chunks: Chunks, ongoing: OngoingRequest, deadline: Deadline, scope: Scope, send: Send) -> None:
    with ongoing:
        first = await anext(chunks)
        deadline.keep()
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
    send = scope["raylm.send"]
    try:
        with ongoing:
            await send({"type": "http.response.body", "body": first, "more_body": True})
            async for chunk in chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
    except ClientDisconnectedError:
        raise
    except Exception as error:
        await _send_last_words(error_event(as_known_error(error, scope["raylm.request_id"]), scope["path"]), send)


async def _send_last_words(event: bytes, send: Send) -> None:
    """End a broken stream; a client that does not read may not hold this up for long."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_LAST_WORDS_S):
            await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
