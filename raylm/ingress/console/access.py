"""Access to requests: a key sees its own requests. Without keys, clients on this machine see all."""

from __future__ import annotations

from starlette.requests import Request

from raylm.ingress.http.exchange import exchange_of
from raylm.ingress.http.hosts import check_local


def owner_of(request: Request) -> str | None:
    """The name of the key whose requests may be seen, None for all requests.

    Raises:
        PermissionDeniedError: no keys are configured, and the client is on another machine or uses an unknown host.
    """
    if (key := exchange_of(request.scope).key) is not None:
        return None if key.admin else key.name
    check_local(request.scope)
    return None
