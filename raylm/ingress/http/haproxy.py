"""What RayLM changes in the HAProxy that Serve starts; Serve itself has no settings for it."""

from __future__ import annotations

from typing import Any

from raylm import ray_private
from raylm.errors import EngineUnavailableError
from raylm.ingress.http.errors import envelope
from raylm.ingress.http.middleware import MAX_HEADER_BYTES

_BUFSIZE = MAX_HEADER_BYTES * 3 // 2  # so that it is the ingress that answers when there are too many headers
_HEAD_S = 10  # for the head of a request; HAProxy itself answers 408
_READER_S = 120  # in which a client that has something to read must read some of it
_NO_SPLICING = "-dS"  # with splice(), HAProxy does not see that a client hangs up while it waits for an answer


def configure(manager: object) -> None:
    """Set up HAProxy for a manager that has just been made and has not started it yet.

    Ray gives no limit in time to heads, and an hour to who does not read: 4,096 connections on which nothing comes or
    goes are all that HAProxy takes, and would keep everybody out so long. Where no replica answers, Ray's answer is 500
    in plain text. Ours is for all paths: clients of OpenAI's API read its "error", those of Anthropic's "type" too.
    """
    error = EngineUnavailableError("No replica of the server could answer; try again shortly.")
    body = b'{"type":"error",' + envelope(error, "/")[1:]
    head = (
        f"HTTP/1.1 {error.status} Service Unavailable\r\n"
        f"content-type: application/json\r\nretry-after: {error.retry_after_s}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    ray_private.configure_haproxy(manager, head.encode() + body, _BUFSIZE, _HEAD_S, _READER_S, _NO_SPLICING)


class HAProxyManager(ray_private.haproxy_manager()):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        configure(self)


def configure_controller() -> None:
    """What RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH names: Serve's controller calls it before it starts HAProxy."""
    ray_private.replace_haproxy_manager(HAProxyManager)
