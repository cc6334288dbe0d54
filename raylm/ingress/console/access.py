"""Who may see which requests: the owner of a key its own; without keys whoever sits at this machine all of them."""

from __future__ import annotations

from starlette.requests import Request

from raylm.ingress.http.hosts import check_local


def owner_of(request: Request) -> str | None:
    """The name of the key whose requests may be seen, None where all may be.

    Raises:
        PermissionDeniedError: there are no keys, and the client sits elsewhere or asks for an unknown host.
    """
    scope = request.scope
    if (key := scope.get("raylm.key")) is not None:
        is_admin = getattr(scope.get("raylm.api_key"), "admin", False)
        return None if is_admin else str(key)
    check_local(scope)
    return None
