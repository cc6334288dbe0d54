"""/v1/responses/{id}: get, cancel and delete stored responses, and list their input."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from raylm.errors import InvalidRequestError, NotFoundError, OverloadedError, RateLimitError
from raylm.frontend import ApiKey
from raylm.ingress.http.answer import json_response
from raylm.ingress.http.body import JSONObject
from raylm.ingress.http.endpoint import Chunks
from raylm.ingress.http.errors import clip
from raylm.ingress.http.exchange import exchange_of
from raylm.ingress.http.stream_ids import reads_all_events
from raylm.ingress.openai.fields import unsupported
from raylm.ingress.responses.create import follow
from raylm.ingress.responses.pages import check_query, read_page
from raylm.ingress.responses.store import ResponseStore


class Followers:
    """Counts the open streams of stored responses in this replica, by the name of the key."""

    def __init__(self, most: int) -> None:
        """``most`` is the number of streams that may be open."""
        self._most = most
        self._open: Counter[str] = Counter()

    @contextmanager
    def place(self, name: str, key: ApiKey | None) -> Iterator[None]:
        """Count one stream while it is open.

        Raises:
            RateLimitError: the key has as many streams open as its limit ``concurrency``.
            OverloadedError: ``most`` streams are open.
        """
        most = None if key is None else key.limits.concurrency
        if most is not None and self._open[name] >= most:
            message = f"The API key '{name}' already follows {most} streams, its limit 'concurrency'."
            raise RateLimitError(message)
        if self._open.total() >= self._most:
            raise OverloadedError(f"{self._most} streams of stored responses are already open. Please try again.")
        self._open[name] += 1
        try:
            yield
        finally:
            self._open[name] -= 1
            self._open += Counter()  # removes names without streams


class _FollowedResponse(StreamingResponse):
    """A streaming response that is counted until it is sent, or its client disconnects."""

    def __init__(self, events: Chunks, followers: Followers) -> None:
        super().__init__(events, headers={"cache-control": "no-cache"}, media_type="text/event-stream")
        self._followers = followers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = exchange_of(scope).key
        with self._followers.place("" if key is None else key.name, key):
            await super().__call__(scope, receive, send)


def response_routes(store: ResponseStore, max_followed: int) -> list[Route]:
    followers = Followers(max_followed)

    async def retrieve(request: Request) -> Response:
        check_query(request, {"include", "include[]", "stream", "starting_after", "include_obfuscation"})
        query = request.query_params
        if query.get("include_obfuscation", "false") != "false":
            raise unsupported("include_obfuscation", "obfuscation is not supported; give false.")
        if query.get("stream", "false") == "false":
            if "starting_after" in query:
                raise InvalidRequestError("'starting_after' needs 'stream' to be true.", param="starting_after")
            return json_response((await _record(store, request))["response"])
        if (can_be_followed := await store.has_events(*_names(request))) is None:
            raise _not_found(request.path_params["response_id"])
        if not can_be_followed:
            raise unsupported("stream", "only a response requested with 'background' and 'stream' can be followed.")
        after = query.get("starting_after")
        if after is not None and not (after.isascii() and after.isdecimal() and len(after) < 10):
            raise InvalidRequestError("'starting_after' must be the number of an event.", param="starting_after")
        comments = reads_all_events(request.headers)
        events = follow(store, *_names(request), -1 if after is None else int(after), comments=comments)
        return _FollowedResponse(events, followers)

    async def delete(request: Request) -> Response:
        owner, response_id = _names(request)
        if not await store.delete(owner, response_id):
            raise _not_found(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def cancel(request: Request) -> Response:
        record = await _record(store, request)
        if not record["response"]["background"]:
            message = "Only a response requested with 'background' can be cancelled."
            raise InvalidRequestError(message, param="response_id")
        cancelled = await store.cancel(*_names(request))
        return json_response((record if cancelled is None else orjson.loads(cancelled))["response"])

    async def list_input(request: Request) -> Response:
        check_query(request, {"limit", "order", "after", "include", "include[]"})
        return json_response(_page((await _record(store, request))["input"], request))

    async def retrieve_or_delete(request: Request) -> Response:
        return await (delete if request.method == "DELETE" else retrieve)(request)

    path = "/v1/responses/{response_id}"
    return [
        Route(path, retrieve_or_delete, methods=["GET", "DELETE"]),
        Route(f"{path}/cancel", cancel, methods=["POST"]),
        Route(f"{path}/input_items", list_input, methods=["GET"]),
    ]


def _names(request: Request) -> tuple[str, str]:
    """(name of the request's key, id of the response)."""
    return exchange_of(request.scope).key_name, request.path_params["response_id"]


async def _record(store: ResponseStore, request: Request) -> JSONObject:
    owner, response_id = _names(request)
    found = await store.get(owner, response_id)
    if found is None:
        raise _not_found(response_id)
    record: JSONObject = orjson.loads(found)
    return record


def _page(items: list[JSONObject], request: Request) -> JSONObject:
    """A page of items, by default the newest first, after the item that the client names."""
    asked = read_page(request)
    ordered = items if asked.order == "asc" else items[::-1]
    if asked.after is not None:
        ids = [item["id"] for item in ordered]
        if asked.after not in ids:
            raise InvalidRequestError("'after' is not the id of an item of this input.", param="after")
        ordered = ordered[ids.index(asked.after) + 1 :]
    page = ordered[: asked.limit]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": "", "last_id": ""}
    return {"object": "list", "data": page, "has_more": len(page) < len(ordered), **ends}


def _not_found(response_id: str) -> NotFoundError:
    shown = clip(response_id, 100)
    return NotFoundError(f"Response with id '{shown}' not found.", param="response_id")
