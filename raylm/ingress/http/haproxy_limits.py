"""HAProxy's numbers of connections, and whether the limit of open files allows them."""

from __future__ import annotations

import os
import resource

from raylm.errors import ConfigError

_MOST_VARIABLE = "RAY_SERVE_HAPROXY_MAXCONN"
_PER_ADDRESS_VARIABLE = "RAYLM_HAPROXY_CONNECTIONS_PER_ADDRESS"
_CONNECTIONS = 16_384  # open at the same time
_FEWEST = 256
_DESCRIPTORS = 512  # file descriptors of HAProxy itself; two connections need five more
_FEWEST_DESCRIPTORS = 34  # of those, without which HAProxy does not start


def max_connections() -> int:
    """The maximum of client connections: RAY_SERVE_HAPROXY_MAXCONN, or what the limit of file descriptors allows."""
    if (said := _number(_MOST_VARIABLE)) is not None:
        return said
    most = _open_files()
    return _CONNECTIONS if most is None else max(_FEWEST, min(_CONNECTIONS, (most - _DESCRIPTORS) * 2 // 5))


def connections_per_address(most: int) -> int:
    said = _number(_PER_ADDRESS_VARIABLE)
    return most // 2 if said is None else said


def check_open_files() -> None:
    """Check that HAProxy can start with ``max_connections``. ConfigError if the hard limit of open files is too low."""
    connections, most = max_connections(), _open_files()
    needed = connections * 5 // 2 + _FEWEST_DESCRIPTORS
    if most is not None and most < needed:
        lower = f", or lower {_MOST_VARIABLE}" if connections > _FEWEST else ""
        raise ConfigError(
            f"ulimit -n: the hard limit of open files is {most}, and HAProxy needs {needed} for {connections} "
            f"connections; raise it{lower}."
        )


def _open_files() -> int | None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if most == resource.RLIM_INFINITY else most


def _number(variable: str) -> int | None:
    said = os.environ.get(variable, "")
    if said and (not said.isdecimal() or not int(said)):
        raise ConfigError(f"{variable}: {said!r} is not a number of connections, 1 or more.")
    return int(said) if said else None
