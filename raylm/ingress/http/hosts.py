"""Which names in Host a server knows as its own, and whether a request comes from its own machine."""

from __future__ import annotations

import ipaddress
import socket

from starlette.datastructures import Headers
from starlette.types import Scope

from raylm.errors import PermissionDeniedError

_ANY = "*"
_ADVICE = "Without API keys this is answered to this machine alone: use localhost there, or configure keys."


class Hosts:
    """The names of a server: localhost, that of the machine, and the ``allowed`` names, of which '*' is any.

    Every address is known: a page that a browser loaded from an address came from that address, while a page of another
    site can let its own name lead to this machine (DNS rebinding).
    """

    def __init__(self, allowed: tuple[str, ...]) -> None:
        own = socket.gethostname().lower()
        self._has_any = _ANY in allowed
        self._names = {"localhost", own, f"{own}.local", *map(str.lower, allowed)}

    def know(self, headers: Headers) -> bool:
        """Whether the Host header names this server; browsers always send one."""
        return self._has_any or all(map(self._knows, headers.getlist("host")))

    def _knows(self, host: str) -> bool:
        name = _name_in(host)
        return name in self._names or name.endswith(".localhost") or _address(name) is not None


def check_local(scope: Scope) -> None:
    """For what a server without keys answers to its own machine alone.

    Raises:
        PermissionDeniedError: the request comes from elsewhere, or its Host is unknown.
    """
    if not scope.get("raylm.is_local", False):
        raise PermissionDeniedError(_ADVICE)


def comes_from_here(scope: Scope, headers: Headers) -> bool:
    """Whether the client, and the client that a proxy on this machine names, is this machine."""
    client = (scope.get("client") or ("",))[0]
    forwarded = headers.getlist("x-forwarded-for")
    return all(map(is_loopback, [client, *(forwarded[-1].rpartition(",")[2:] if forwarded else ())]))


def is_loopback(host: str) -> bool:
    """Whether a name or an address, without a port, can be reached from its own machine alone."""
    if host.lower() == "localhost":
        return True
    address = _address(host)
    mapped = getattr(address, "ipv4_mapped", None) or address
    return mapped is not None and mapped.is_loopback


def _name_in(host: str) -> str:
    """A Host header without its port and the dot behind a full name."""
    name = host.strip().lower()
    if name.startswith("["):
        name, _, port = name[1:].partition("]")
        return name if not port or port[1:].isdecimal() else ""
    return name.partition(":")[0].removesuffix(".")


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.strip().strip("[]"))
    except ValueError:
        return None
