"""/v1/requests: lists requests in flight and ended ones, shows the timeline or trace of one, and ends one (DELETE)."""

from __future__ import annotations

import time
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from raylm.errors import InvalidRequestError, NotFoundError
from raylm.frontend import Filter, timeline, trace
from raylm.ingress.console.access import owner_of
from raylm.ingress.console.peers import Peers
from raylm.ingress.http.answer import json_response
from raylm.ingress.http.errors import clip

MOST_LISTED = 10_000
_DEFAULT_LISTED = 100
_LONGEST_TEXT = 256
_STATES = ("all", "in_flight", "recent")
QUERIES: dict[str, dict[str, Any]] = {
    "/v1/requests": {
        "state": {"type": "string", "enum": list(_STATES)},
        "q": {"type": "string", "maxLength": _LONGEST_TEXT},
        "key": {"type": "string", "maxLength": _LONGEST_TEXT},
        "model": {"type": "string", "maxLength": _LONGEST_TEXT},
        "since": {"type": "number", "minimum": 0},
        "limit": {"type": "integer", "minimum": 1, "maximum": MOST_LISTED},
    },
    "/v1/requests/{request_id}": {"format": {"type": "string", "enum": ["json", "trace"]}},
}


def request_routes(peers: Peers) -> list[Route]:
    async def listed(request: Request) -> Response:
        wanted = _filter(request)
        answers = await peers.ask("listed", wanted)
        lines = [line for answer in answers.found for line in answer]
        lines.sort(key=lambda line: -line[0])
        data = b",".join(line for _, line in lines[: wanted.limit])
        tail = orjson.dumps({"missing": answers.missing, "now": time.time()})[1:]
        return Response(b'{"object":"list","data":[' + data + b"]," + tail, media_type="application/json")

    async def retrieve(request: Request) -> Response:
        _check_query(request, {"format"})
        form = request.query_params.get("format", "json")
        if form not in ("json", "trace"):
            raise InvalidRequestError("'format' must be json or trace.", param="format")
        raw = await _find(request, owner_of(request))
        if form == "json":
            return json_response(timeline(raw, time.time()))
        name = "".join(char if char.isalnum() else "-" for char in raw["id"])
        headers = {"content-disposition": f'attachment; filename="{name[:80]}.json"'}
        return Response(orjson.dumps(trace(raw, time.time())), headers=headers, media_type="application/json")

    async def delete(request: Request) -> Response:
        _check_query(request, set())
        request_id = request.path_params["request_id"]
        answers = await peers.ask("end", request_id, owner_of(request))
        if not any(answers.found):
            raise NotFoundError(f"No request with the id '{clip(request_id, 100)}' is in flight.", param="request_id")
        return json_response({"id": request_id, "object": "request", "ended": True})

    async def _find(request: Request, owner: str | None) -> dict[str, Any]:
        request_id = request.path_params["request_id"]
        answers = await peers.ask("find", request_id, owner)
        found: list[dict[str, Any]] = [orjson.loads(answer) for answer in answers.found if answer is not None]
        if not found:
            shown = clip(request_id, 100)
            raise NotFoundError(f"No request with the id '{shown}' is in flight or kept.", param="request_id")
        newest = max(found, key=lambda raw: raw["received"])
        return newest if owner is None else _without_others(newest)

    async def retrieve_or_delete(request: Request) -> Response:
        return await (delete if request.method == "DELETE" else retrieve)(request)

    return [
        Route("/v1/requests", listed),
        Route("/v1/requests/{request_id}", retrieve_or_delete, methods=["GET", "DELETE"]),
    ]


def _without_others(raw: dict[str, Any]) -> dict[str, Any]:
    """Hide the ids of other keys' requests on the same engine."""
    for part in raw["parts"]:
        part["events"] = [[*event[:5], ""] for event in part["events"]]
    return raw


def _filter(request: Request) -> Filter:
    query = request.query_params
    _check_query(request, set(QUERIES["/v1/requests"]))
    limit, state, since = query.get("limit", str(_DEFAULT_LISTED)), query.get("state", "all"), query.get("since", "0")
    if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:9]) <= MOST_LISTED):
        raise InvalidRequestError(f"'limit' must lie between 1 and {MOST_LISTED}.", param="limit")
    if state not in _STATES:
        raise InvalidRequestError(f"'state' must be one of {', '.join(_STATES)}.", param="state")
    try:
        ended_since = float(since[:32])
    except ValueError:
        raise InvalidRequestError("'since' must be a time in seconds since the epoch.", param="since") from None
    for name in ("q", "key", "model"):
        if len(query.get(name, "")) > _LONGEST_TEXT:
            raise InvalidRequestError(f"'{name}' must have at most {_LONGEST_TEXT} characters.", param=name)
    return Filter(
        owner=owner_of(request),
        state=state,
        text=query.get("q", ""),
        key=query.get("key"),
        model=query.get("model"),
        since=ended_since,
        limit=int(limit),
    )


def _check_query(request: Request, known: set[str]) -> None:
    for name in request.query_params:
        if name not in known:
            shown = clip(name, 64)
            raise InvalidRequestError(f"'{shown}': this query parameter is not supported.", param=shown)
