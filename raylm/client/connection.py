"""Connection: sends requests to one server, and reads its streams of server-sent events."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Any

import aiohttp

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # could move a cursor or begin an escape sequence
DEFAULT_URL = "http://127.0.0.1:8000"
_ADDRESS = re.compile(r"(https?://.+|(\[[0-9a-f:]+\]|[\w.-]+):\d+(/.*)?|localhost)$", re.IGNORECASE)
_LONGEST_MESSAGE = 300
_BUFFER = 2**20  # bytes; a line may have twice as many
_READS_COMMENTS = {"x-raylm-resumable": "true"}  # RayLM then sends comments to keep a silent stream alive


class ServerError(Exception):
    """A request that failed. ``kind`` is the HTTP status, or one of

    connection  no server answers at the address, or the connection was lost
    timeout     the answer took longer than the limit
    stream      the server sent an error, or data that is not an event, after the beginning of its answer
    cut off     the stream ended too early
    """

    def __init__(self, kind: str, message: str) -> None:
        self.kind, self.message = kind, clean(message)
        super().__init__(self.message)


def clean(text: str) -> str:
    """Make a server's text safe for a terminal: characters that would control the terminal become U+FFFD."""
    return _CONTROL.sub("\ufffd", text.replace("\r\n", "\n"))


def is_address(word: str) -> bool:
    """Whether a word is a server's address: http(s)://…, HOST:PORT or localhost."""
    return _ADDRESS.match(word) is not None


class Connection:
    """An async context. ``url`` may omit http:// and may end in /v1. Without a ``key`` none is sent.

    ``timeout_s`` limits a whole answer. Any number of requests may be open. Without ``keep_alive`` each request has its
    own TCP connection. llama-server closes the connection of a stream, sometimes after it was reused.
    """

    def __init__(
        self, url: str = DEFAULT_URL, key: str | None = None, timeout_s: float | None = None, *, keep_alive: bool = True
    ) -> None:
        whole = url if "://" in url else f"http://{url}"
        self.url = whole.rstrip("/").removesuffix("/v1")
        headers = _READS_COMMENTS | ({"Authorization": f"Bearer {key}"} if key else {})
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=not keep_alive),
            timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=30),
            headers=headers,
            read_bufsize=_BUFFER,
        )

    async def __aenter__(self) -> Connection:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def models(self) -> list[str]:
        """The ids that /v1/models lists.

        Raises:
            ServerError: the request failed.
        """
        try:
            async with self._session.get(f"{self.url}/v1/models") as response:
                await _check(response)
                return [str(model["id"]) for model in (await response.json(content_type=None))["data"]]
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._failure(error) from error
        except (ValueError, KeyError, TypeError) as error:
            raise ServerError("stream", f"{self.url}/v1/models is not a list of models: {error!r}") from error

    async def first_model(self) -> str:
        """The first model in the list. Raises ServerError if there is none."""
        found = await self.models()
        if not found:
            raise ServerError("404", f"{self.url} serves no model")
        return found[0]

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The events of the answer to ``body``, posted to ``path``, up to [DONE].

        Raises:
            ServerError: there is no answer, the answer is or contains an error, or it ends too early.
        """
        try:
            async with self._session.post(self.url + path, json=body) as response:
                await _check(response)
                async for event in events(response):
                    if event.get("error"):
                        raise ServerError("stream", _message(event))
                    yield event
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._failure(error) from error
        except ValueError as error:  # a line is longer than the buffer
            raise ServerError("stream", f"the answer cannot be read: {error}") from error

    def _failure(self, error: Exception) -> ServerError:
        if isinstance(error, aiohttp.ClientConnectorError):
            return ServerError("connection", f"no server answers at {self.url} ({error.strerror or error})")
        if isinstance(error, aiohttp.ServerTimeoutError | TimeoutError):
            return ServerError("timeout", "the answer took too long")
        return ServerError("connection", f"the connection to {self.url} was lost: {error}")


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON events of a stream up to [DONE]. Raises ServerError if it ends before."""
    async for line in response.content:
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            try:
                event = json.loads(data)
            except ValueError:
                raise ServerError("stream", f"an event is not JSON: {_short(data.decode(errors='replace'))}") from None
            if not isinstance(event, dict):
                raise ServerError("stream", f"an event is not an object: {_short(data.decode(errors='replace'))}")
            yield event
    raise ServerError("cut off", "the stream ended too early")


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status == 200:
        return
    text = await response.text(errors="replace")
    try:
        text = _message(json.loads(text))
    except ValueError:
        text = _short(text)
    raise ServerError(str(response.status), f"{response.status} {text or response.reason}")


def _message(said: Any) -> str:
    """The message of an error's JSON, in the forms of different servers."""
    error = said.get("error", said) if isinstance(said, dict) else said
    found = error.get("message", error) if isinstance(error, dict) else error
    return _short(str(found))


def _short(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= _LONGEST_MESSAGE else f"{words[:_LONGEST_MESSAGE]} …"
