"""GET /openapi.json: the API's description, made from the routes and from the models that check request bodies."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

import orjson
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from raylm.ingress.console.pages import PAGES
from raylm.ingress.console.requests import QUERIES as REQUEST_QUERIES
from raylm.ingress.http.body import JSONObject
from raylm.ingress.http.endpoint import JSONEndpoint
from raylm.ingress.http.errors import error_format
from raylm.version import VERSION

_REFERENCE = "#/components/schemas/{model}"
_MEDIA_TYPES = {"/metrics": "text/plain", "/docs": "text/html"} | dict.fromkeys(PAGES, "text/html")
_LIST_QUERY: dict[str, JSONObject] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": 100},
    "order": {"type": "string", "enum": ["asc", "desc"]},
    "after": {"type": "string"},
}
_QUERIES: dict[str, dict[str, JSONObject]] = {
    "/v1/responses/{response_id}/input_items": _LIST_QUERY,
    "/v1/conversations/{conversation_id}/items": _LIST_QUERY,
    **REQUEST_QUERIES,
}


def openapi_route() -> Route:
    """A route that describes all routes of its app. The description is made once, off the event loop."""
    described: list[bytes] = []

    async def openapi(request: Request) -> Response:
        if not described:
            described.append(await asyncio.to_thread(document, request.app.routes))
        return Response(described[0], media_type="application/json")

    return Route("/openapi.json", openapi)


def endpoints(routes: Sequence[BaseRoute]) -> list[str]:
    """Method and path of every route, in the order of the routes."""
    return [f"{method} {_path(route)}" for route in routes if isinstance(route, Route) for method in _methods(route)]


def document(routes: Sequence[BaseRoute]) -> bytes:
    """The OpenAPI 3.1 document as JSON."""
    served = [route for route in routes if isinstance(route, Route)]
    bodies = {route.endpoint.body for route in served if isinstance(route.endpoint, JSONEndpoint)}
    ordered: list[Any] = [(body, "validation") for body in sorted(bodies, key=lambda body: body.__name__)]
    _, schemas = models_json_schema(ordered, ref_template=_REFERENCE)
    paths: dict[str, JSONObject] = {}
    for route in served:
        operations = {method.lower(): _operation(route, method) for method in _methods(route)}
        paths.setdefault(_path(route), {}).update(operations)
    errors = {found.name: found.schema for found in map(error_format, paths)}
    keys = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    return orjson.dumps({
        "openapi": "3.1.0",
        "info": {"title": "RayLM", "version": VERSION},
        "security": [{}, {"bearer": []}, {"key": []}],
        "paths": paths,
        "components": {"schemas": schemas["$defs"] | errors, "securitySchemes": keys},
    })  # fmt: skip


def _operation(route: Route, method: str) -> JSONObject:
    path = _path(route)
    body = route.endpoint.body if isinstance(route.endpoint, JSONEndpoint) else None
    answers: JSONObject = {_MEDIA_TYPES.get(path, "application/json"): {"schema": {}}}
    if body is not None and "stream" in body.model_fields:
        answers["text/event-stream"] = {"schema": {"type": "string"}}
    refusal = _json_content(error_format(path).name)
    found: JSONObject = {
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}"),
        "responses": {
            "200": {"description": "The answer.", "content": answers},
            "4XX": {"description": "The request is refused.", "content": refusal},
            "5XX": {"description": "The request failed.", "content": refusal},
        },
    }
    parameters = [(name, "path", {"type": "string"}) for name in route.param_convertors]
    queries = {} if body is not None else _QUERIES.get(path, {})
    parameters += [(name, "query", schema) for name, schema in queries.items()]
    if parameters:
        found["parameters"] = [
            {"name": name, "in": place, "required": place == "path", "schema": schema}
            for name, place, schema in parameters
        ]
    if body is not None:
        found["requestBody"] = {"required": True, "content": _json_content(body.__name__)}
    return found


def _json_content(model: str) -> JSONObject:
    return {"application/json": {"schema": {"$ref": _REFERENCE.format(model=model)}}}


def _path(route: Route) -> str:
    """The path without the types of its parameters: {model_id:path} becomes {model_id}."""
    return re.sub(r":\w+}", "}", route.path)


def _methods(route: Route) -> list[str]:
    return sorted(set(route.methods or ()) - {"HEAD"})
