"""Checks whether a Host header names this server, and whether a request comes from this machine."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import Scope

from raylm.errors import PermissionDeniedError
from raylm.ingress.http.exchange import exchange_of

_ANY = "*"
_ADVICE = "Without API keys this is answered to this machine alone: use localhost there, or configure keys."


class Hosts:
    """The names of a server: localhost, the machine's name, and the ``allowed`` names. '*' allows every name.

    Every IP address is allowed. A page loaded from an address came from the server at that address. A page of another
    site needs a name that resolves to this machine (DNS rebinding).
    """

    def __init__(self, allowed: tuple[str, ...]) -> None:
        own = socket.gethostname().lower()
        self._has_any = _ANY in allowed
        self._names = {"localhost", own, f"{own}.local", *map(str.lower, allowed)}

    def know(self, headers: Headers) -> bool:
        """Whether the Host header names this server. Browsers always send a Host header."""
        return self._has_any or all(map(self._knows, headers.getlist("host")))

    def _knows(self, host: str) -> bool:
        name = _name_in(host)
        return name in self._names or name.endswith(".localhost") or _address(name) is not None


def check_local(scope: Scope) -> None:
    """Check a request that a server without keys answers only to its own machine.

    Raises:
        PermissionDeniedError: The request comes from another machine, or its Host is unknown.
    """
    if not exchange_of(scope).is_local:
        raise PermissionDeniedError(_ADVICE)


def comes_from_here(scope: Scope, headers: Headers, nodes: Collection[str] = ()) -> bool:
    """Whether the request comes from this machine, or from one of the cluster's ``nodes`` through the node's own proxy.

    A proxy, on this machine or on a node, adds the address of its client at the end of X-Forwarded-For.
    """
    client = (scope.get("client") or ("",))[0]
    if not (forwarded := headers.getlist("x-forwarded-for")):
        return is_loopback(client)
    return is_loopback(forwarded[-1].rpartition(",")[2]) and (is_loopback(client) or client in nodes)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a name or an address (without a port)."""
    if host.lower() == "localhost":
        return True
    address = _address(host)
    mapped = getattr(address, "ipv4_mapped", None) or address
    return mapped is not None and mapped.is_loopback


def _name_in(host: str) -> str:
    """The name in a Host header, without the port and without a dot at the end."""
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
