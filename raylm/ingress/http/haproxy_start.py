"""Checks before HAProxy starts: its directories and its ports."""

from __future__ import annotations

import os
import re
import socket
import stat
from pathlib import Path

from raylm import ray_private
from raylm.errors import ConfigError
from raylm.serve_variables import SERVE_VARIABLES

_CANNOT_RAISE = re.compile(r"Cannot raise FD limit to (\d+), limit is (\d+)")
_CANNOT_BIND = re.compile(r"cannot bind socket \((?P<reason>[^)]*)\)[^\[]*\[(?P<address>[^\]]*)\]")


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


def explain_limit(error: Exception) -> str | None:
    """Name the limit of open files if HAProxy did not start because of it. Returns None for other errors."""
    lack = _CANNOT_RAISE.search(str(error))
    return lack and f"HAProxy needs {lack[1]} open files, and the hard limit (ulimit -Hn) is {lack[2]}; raise it."


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
