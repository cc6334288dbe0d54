"""Access to requests: a key sees its own requests. Without keys, clients on this machine see all."""

from __future__ import annotations

from starlette.requests import Request

from raylm.ingress.http.hosts import check_local


def owner_of(request: Request) -> str | None:
    """The name of the key whose requests may be seen, None for all requests.

    Raises:
        PermissionDeniedError: no keys are configured, and the client is on another machine or uses an unknown host.
    """
    scope = request.scope
    if (key := scope.get("raylm.key")) is not None:
        is_admin = getattr(scope.get("raylm.api_key"), "admin", False)
        return None if is_admin else str(key)
    check_local(scope)
    return None
