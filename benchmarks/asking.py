"""Questions to a server and their answers in one form, streamed or whole. Streams with ids are resumed."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp

GIVE_UP_S = 120.0
# fields that may differ between two equal answers
_VOLATILE = {
    "id", "created", "created_at", "completed_at", "item_id", "call_id", "sequence_number", "response_id",
    "prompt_tokens_details", "input_tokens_details", "cache_read_input_tokens", "cache_creation_input_tokens",
    "input_tokens",
}  # fmt: skip


@dataclass(frozen=True)
class Question:
    name: str
    path: str
    body: dict[str, Any]


class WrongError(Exception):
    """The answer is an error, or there is no answer. ``lost`` means that a client library would ask again."""

    def __init__(self, text: str, lost: bool = False) -> None:
        super().__init__(text)
        self.lost = lost


@dataclass
class Asked:
    """The parts of an answer received so far, with their times.

    ``waits`` are the phases of its timeline on the same clock.
    """

    question: Question
    times: list[float]
    ids: list[str] = field(default_factory=list)
    last_event: str = ""
    lines: list[str] = field(default_factory=list)
    waits: list[tuple[float, float, str]] = field(default_factory=list)

    @property
    def gaps(self) -> list[float]:
        return [end - begin for begin, end in pairwise(self.times)]

    @property
    def answer(self) -> Any:
        """The whole answer. Raises WrongError."""
        if not self.question.body.get("stream"):
            return stable(json.loads("\n".join(self.lines)))
        events = [json.loads(line) for line in self.lines if line != "[DONE]"]
        if errors := [event for event in events if event.get("error")]:
            raise WrongError(json.dumps(errors[0]))
        return joined(events)


def open_client() -> aiohttp.ClientSession:
    """A client with a new connection for each request. A request fails after GIVE_UP_S seconds without data."""
    connector, timeout = aiohttp.TCPConnector(limit=0, force_close=True), aiohttp.ClientTimeout(sock_read=GIVE_UP_S)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=2**20)


async def ask(client: aiohttp.ClientSession, url: str, asked: Asked) -> None:
    """Ask, or resume a stream after its last event.

    Raises WrongError if the request is refused or the stream ends early.
    """
    streamed = asked.question.body.get("stream")
    if not asked.last_event:
        asked.lines.clear()
    headers = {"x-raylm-resumable": "true"} | ({"last-event-id": asked.last_event} if asked.last_event else {})
    try:
        async with client.post(url + asked.question.path, json=asked.question.body, headers=headers) as response:
            if response.status != 200:
                raise WrongError(f"{response.status} {await response.text()}", response.status >= 500)
            asked.ids.append(response.headers.get("x-request-id", ""))
            if not streamed:
                asked.lines.append(await response.text())
                asked.times.append(time.monotonic())
                return
            async for event_id, data in _events(response):
                asked.times.append(time.monotonic())
                asked.lines.append(data)
                asked.last_event = event_id or asked.last_event
    except (aiohttp.ClientError, TimeoutError) as error:
        raise WrongError(repr(error), lost=True) from error


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[str, str]]:
    """(id, data) of each whole event. Keep-alive events are skipped."""
    event_id = data = ""
    async for line in response.content:
        if line.startswith(b"id: "):
            event_id = line[4:].strip().decode()
        elif line.startswith(b"data: "):
            data = line[6:].strip().decode()
        elif line == b"\n" and data:
            if data != '{"type":"ping"}':
                yield event_id, data
            event_id = data = ""


def stable(value: Any) -> Any:
    """An answer without the fields that may differ."""
    if isinstance(value, dict):
        return {name: stable(part) for name, part in value.items() if name not in _VOLATILE}
    return [stable(part) for part in value] if isinstance(value, list) else value


def joined(events: list[dict[str, Any]]) -> Any:
    """Join the events of a stream to one answer, which does not depend on how the text was split into events."""
    texts: defaultdict[str, str] = defaultdict(str)
    last: dict[str, Any] = {}
    for event in events:
        if event.get("type") == "response.completed":
            return stable(event["response"])
        parts = event.get("choices") or ([event] if isinstance(event.get("delta"), dict) else [])
        for part in parts:
            place = part.get("index", 0)
            for name, text in _texts(part.get("delta") or {}):
                texts[f"{place} {name}"] += text
            for name in ("finish_reason", "stop_reason"):
                if reason := part.get(name) or (part.get("delta") or {}).get(name):
                    last[f"{place} {name}"] = reason
    return {"texts": dict(texts), "ends": last}


def _texts(delta: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in delta.items():
        if isinstance(value, str) and name not in ("role", "type", "stop_reason"):
            yield name, value
