"""Plain-text errors of Serve get OpenAI's envelope. RayLM's own answers are not changed."""

from __future__ import annotations

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from raylm.ingress import serve_middlewares

pytestmark = pytest.mark.filterwarnings("ignore")  # importing Ray's modules gives a warning


async def plain(request: Request) -> Response:
    headers = {"x-request-id": "a"}
    return PlainTextResponse("Serve says no", int(request.path_params["status"]), headers)


async def away(request: Request) -> Response:
    return PlainTextResponse("Serve says no", 503)


async def ours(request: Request) -> Response:
    response = JSONResponse({"error": {"message": "ours"}}, 503, {"retry-after": "9"})
    response.headers.append("x-request-id", "a")
    response.headers.append("x-request-id", "a")
    return response


async def stream(request: Request) -> Response:
    return StreamingResponse((chunk async for chunk in _chunks()), media_type="text/event-stream")


async def _chunks():  # type: ignore[no-untyped-def]
    for number in range(3):
        yield f"data: {number}\n\n".encode()


@pytest.fixture
def client() -> httpx.AsyncClient:
    routes = [Route("/plain/{status}", plain), Route("/ours", ours), Route("/stream", stream)]
    routes += [Route("/-/{status}", plain), Route("/{path:path}", away, methods=["POST"])]
    app: ASGIApp = Starlette(routes=routes)
    for middleware in serve_middlewares():
        app = middleware.cls(app, *middleware.args, **middleware.kwargs)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


@pytest.mark.parametrize(
    ("status", "code", "shown"),
    [
        (404, "not_found", 404),
        (408, None, 500),
        (429, "overloaded", 429),
        (500, None, 500),
        (502, "engine_unavailable", 503),
        (503, "engine_unavailable", 503),
    ],
)
async def test_serves_failures_are_said_anew(
    client: httpx.AsyncClient, status: int, code: str | None, shown: int
) -> None:
    answer = await client.get(f"/plain/{status}")
    assert answer.status_code == shown
    assert answer.json()["error"]["code"] == code
    assert ("retry-after" in answer.headers) == (shown in {429, 503})
    assert "Serve" not in answer.text


@pytest.mark.parametrize("prefix", ["", "/up", "/v1/models"])
@pytest.mark.parametrize(
    "path", ["/v1/messages", "/v1/messages/count_tokens", "/v1/chat/completions", "/v1/messages-of"]
)
async def test_they_have_the_form_of_their_api_below_any_prefix(
    client: httpx.AsyncClient, prefix: str, path: str
) -> None:
    answer = await client.post(f"{prefix}{path}")
    assert answer.status_code == 503
    error = answer.json()["error"]
    if path.removesuffix("/count_tokens") == "/v1/messages":
        assert answer.json() == {"type": "error", "error": {"type": "overloaded_error", "message": error["message"]}}
    else:
        assert answer.json() == {"error": error}
        assert error["code"] == "engine_unavailable"


async def test_our_failures_pass_with_one_request_id(client: httpx.AsyncClient) -> None:
    answer = await client.get("/ours")
    assert (answer.status_code, answer.json()) == (503, {"error": {"message": "ours"}})
    assert answer.headers["retry-after"] == "9"
    assert answer.headers.get_list("x-request-id") == ["a"]


async def test_plain_successes_streams_and_serves_own_routes_pass(client: httpx.AsyncClient) -> None:
    assert (await client.get("/plain/200")).text == "Serve says no"
    assert (await client.get("/stream")).text == "data: 0\n\ndata: 1\n\ndata: 2\n\n"
    assert (await client.get("/-/503")).text == "Serve says no"
