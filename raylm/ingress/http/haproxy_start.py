"""Checks before HAProxy starts: its directories, its ports and its maximum of connections."""

from __future__ import annotations

import os
import re
import resource
import socket
import stat
from pathlib import Path

from raylm import ray_private
from raylm.errors import ConfigError
from raylm.serve_variables import SERVE_VARIABLES

_PER_ADDRESS_VARIABLE = "RAYLM_HAPROXY_CONNECTIONS_PER_ADDRESS"
_CONNECTIONS = 16_384  # open at the same time
_DESCRIPTORS = 512  # file descriptors of HAProxy itself; two connections need five more
_CANNOT_BIND = re.compile(r"cannot bind socket \((?P<reason>[^)]*)\)[^\[]*\[(?P<address>[^\]]*)\]")


def max_connections() -> int:
    """The maximum of client connections: RAY_SERVE_HAPROXY_MAXCONN, or what the limit of file descriptors allows."""
    if said := os.environ.get("RAY_SERVE_HAPROXY_MAXCONN"):
        return int(said)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return _CONNECTIONS
    return max(256, min(_CONNECTIONS, (most - _DESCRIPTORS) * 2 // 5))


def connections_per_address(most: int) -> int:
    said = os.environ.get(_PER_ADDRESS_VARIABLE, "")
    if said and (not said.isdecimal() or not int(said)):
        raise ConfigError(f"{_PER_ADDRESS_VARIABLE}: {said!r} is not a number of connections, 1 or more.")
    return int(said) if said else most // 2


def own_directories(node_id: str) -> None:
    """Create the directories of this node's HAProxy files with mode 700.

    Refuse directories that other users can change.

    Another user with write access could replace the configuration, which HAProxy runs as this user, or the admin
    socket.

    Raises:
        ConfigError: A directory or one of its parents belongs to another user, or other users can write to it.
    """
    for variable, path in ray_private.haproxys_files().items():
        for directory in (path.parent, path.parent / node_id):
            try:
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                for one in (directory, *directory.absolute().parents):
                    _refuse_if_others_can_write(one, variable, is_ours=one == directory)
            except OSError as error:
                raise ConfigError(f"{variable}: {directory} cannot be used: {error.strerror}.") from error
        (path.parent / node_id).chmod(0o700)


def _refuse_if_others_can_write(directory: Path, variable: str, is_ours: bool) -> None:
    found = directory.lstat() if is_ours else directory.stat()
    belongs = found.st_uid == os.geteuid() or (not is_ours and found.st_uid == 0)
    writable = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and (is_ours or not found.st_mode & stat.S_ISVTX)
    if belongs and not writable and stat.S_ISDIR(found.st_mode):
        return
    why = "can be written to by other users" if belongs else "belongs to another user"
    raise ConfigError(
        f"{variable}: {directory} {why}, who could take over HAProxy; set RAY_SERVE_HAPROXY_CONFIG_FILE_LOC, "
        "RAY_SERVE_HAPROXY_SOCKET_PATH, RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH and RAY_SERVE_HAPROXY_SERVER_STATE_FILE "
        "to files in a directory of your own, of at most 29 bytes, before Ray starts."
    )


def explain_start(error: Exception, http_port: int) -> str | None:
    """Name the address at which HAProxy could not listen, and the option that changes it.

    Returns None for other errors.
    """
    if (found := _CANNOT_BIND.search(str(error))) is None:
        return None
    port = int(found["address"].rpartition(":")[2])
    moves = "http_options.port"
    if port != http_port:
        moves = "RAY_SERVE_HAPROXY_METRICS_PORT or RAY_SERVE_HAPROXY_STATS_PORT"
    return f"HAProxy cannot listen at {found['address']}: {found['reason']}; {moves} moves it."


def is_free(port: int) -> bool:
    """Whether a server could listen at ``port`` on all interfaces now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def lacking_variables() -> str | None:
    """Name the variables required for Serve files that are missing in this Serve process. None if all are set."""
    lacking = [name for name in SERVE_VARIABLES if name not in os.environ]
    if not lacking:
        return None
    return (
        f"controller_options of the Serve file has no {', '.join(lacking)}: RayLM's limits of connections, headers and "
        "probes are not applied; copy them from configs/llama.yaml"
    )
