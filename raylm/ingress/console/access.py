"""Who may see which requests: the owner of a key its own; without keys whoever sits at this machine all of them."""

from __future__ import annotations

import ipaddress

from starlette.requests import Request

from raylm.errors import PermissionDeniedError

_ADVICE = "Without API keys this is answered to this machine alone: use localhost there, or configure keys."


def owner_of(request: Request) -> str | None:
    """The name of the key whose requests may be seen, None where all may be.

    Raises:
        PermissionDeniedError: there are no keys, and the client sits elsewhere.
    """
    scope = request.scope
    if (key := scope.get("raylm.key")) is not None:
        is_admin = getattr(scope.get("raylm.api_key"), "admin", False)
        return None if is_admin else str(key)
    if not _is_local(request):
        raise PermissionDeniedError(_ADVICE)
    return None


def _is_local(request: Request) -> bool:
    """Whether the client, and the one that a proxy on this machine speaks for, is this machine.

    The name that it was called by must be local too: else any page could have its own name lead here.
    """
    client = request.client.host if request.client is not None else ""
    forwarded = request.headers.getlist("x-forwarded-for")
    asked_by = [client, *(forwarded[-1].rpartition(",")[2:] if forwarded else ())]
    return all(map(_is_loopback, asked_by)) and _is_loopback(request.url.hostname or "")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.strip().strip("[]"))
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
