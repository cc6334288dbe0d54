"""Headers that Serve cannot handle are removed before Serve."""

from __future__ import annotations

import pytest
from starlette.types import Receive, Scope, Send

from raylm.ingress.http.entrance import HeadersMiddleware

KEPT = [(b"x-api-key", b"\xff"), (b"x-request-id", "é".encode()), (b"content-type", b"application/json")]
UNREADABLE = [
    (b"x-request-id", b"\xff"), (b"serve_multiplexed_model_id", b"\xff"), (b"serve-multiplexed_model-id", b"\xff"),
    (b"x-session-id", b"\xff"), (b"traceparent", b"\xff"), (b"x-request-timeout-seconds", b"\xff"),
]  # fmt: skip
STEERING = [(b"x-request-timeout-seconds", b"0.001"), (b"x-request-disconnect-disabled", b"?1")]


@pytest.mark.filterwarnings("ignore")  # importing Ray's modules gives a warning
@pytest.mark.parametrize("in_replica", [True, False])
async def test_serve_gets_no_header_that_it_fails_on(monkeypatch: pytest.MonkeyPatch, in_replica: bool) -> None:
    passed: list[Scope] = []

    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        passed.append(scope)

    if in_replica:
        monkeypatch.setattr("ray.serve.get_replica_context", object)
    sent = [*UNREADABLE, *STEERING, *KEPT]
    await HeadersMiddleware(handle)({"type": "http", "headers": sent}, None, None)  # type: ignore[arg-type]
    assert passed[0]["headers"] == (KEPT if in_replica else [*STEERING, *KEPT])
