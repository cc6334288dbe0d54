"""Checks before the start of Ray, whose own errors take many lines. Each ConfigError names the cure."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

from raylm.cli.sessions import LONGEST_NAME
from raylm.config import Config
from raylm.errors import ConfigError
from raylm.folders import in_home

_LONGEST_SOCKET = 107  # most bytes in the path of an AF_UNIX socket on Linux
_RAY_SOCKET = "/ray/session_2000-01-01_00-00-00_000000_1234567/sockets/plasma_store"
_OUR_SOCKET = "/raylm-12345678/supervisor"  # the longest path of an engine's sockets
_TOKEN = "~/.ray/auth_token"
_LEAST_FREE = 64 * 2**20
_CONNECT_S = 5.0


def ray_address() -> str | None:
    """The address of the Ray cluster to serve on, from RAY_ADDRESS. None if `raylm serve` starts its own."""
    address = os.environ.get("RAY_ADDRESS", "")
    return None if address in {"", "local"} else address


def temporary_directory() -> str:
    """The directory in which an own Ray keeps its files, in a private folder."""
    return os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"


def check_machine() -> None:
    """Check that an own Ray can start on this machine."""
    folder = temporary_directory()
    name = "RAY_TMPDIR" if os.environ.get("RAY_TMPDIR") else "TMPDIR"
    for variable in (name, "TMPDIR"):
        if not Path(os.environ.get(variable) or "/").is_absolute():
            raise ConfigError(f"{variable}: {os.environ[variable]} is a relative path; set it to an absolute one.")
    _check_length(name, folder, LONGEST_NAME + _RAY_SOCKET)
    _check_length("TMPDIR", tempfile.gettempdir(), _OUR_SOCKET)
    there = next(path for path in (Path(folder), *Path(folder).absolute().parents) if path.exists())
    if not os.access(there, os.W_OK):
        raise ConfigError(f"{name}: {there} cannot be written to; set it to a writable directory.")
    if (free := shutil.disk_usage(there).free) < _LEAST_FREE:
        raise ConfigError(
            f"{name}: the disk of {folder} is full ({free / 2**20:.0f} MiB are free), and Ray keeps its logs and "
            f"sockets there; free some space, or set {name} to a directory on another disk."
        )


def _check_length(name: str, folder: str, socket_path: str) -> None:
    longest = _LONGEST_SOCKET - len(socket_path)
    if (length := len(os.fsencode(folder))) > longest:
        raise ConfigError(
            f"{name}: {folder} is too long for the sockets in it, {length} bytes where at most {longest} fit; "
            f"set it to a shorter directory, such as {name}=/tmp."
        )


def check_files(application: str, config: Config) -> None:
    """Check the API keys and the store of an application in the server's environment, and create the store's file."""
    from raylm.ingress import is_postgres, read_keys, store_path  # imported here, as the launcher does not need them

    read_keys(config.ingress, config.scheduler.policy)
    if not is_postgres(config.ingress.store):
        store_path(config.ingress.store, application)


def keep_token_private() -> None:
    """Create Ray's token in the home directory if there is none, and make it readable only by its user.

    Ray itself writes a token that every user of the machine can read, who could then run any code as this user.
    """
    if os.environ.get("RAY_AUTH_MODE", "token") != "token" or "RAY_AUTH_TOKEN" in os.environ:
        return
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = in_home(named or _TOKEN, "RAY_AUTH_TOKEN_PATH")
    try:
        if named is None:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _close_to_others(path.parent, 0o700)
            if not path.exists():
                _write_at_once(path, secrets.token_hex(32))
        _close_to_others(path, 0o600)
    except OSError as error:
        if named is not None and isinstance(error, FileNotFoundError):
            return  # Ray itself reports it
        raise ConfigError(
            f"Ray's token cannot be kept in {path}: {error.strerror}; set HOME or RAY_AUTH_TOKEN."
        ) from error


def _close_to_others(path: Path, mode: int) -> None:
    found = path.stat()
    if found.st_uid == os.geteuid() and found.st_mode & 0o077:
        path.chmod(mode)


def _write_at_once(path: Path, text: str) -> None:
    """Write a file atomically. If another process does the same, the first file stays."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent) as file:  # of mode 0600
        file.write(text)
        file.flush()
        with suppress(FileExistsError):
            os.link(file.name, path)


def check_cluster(address: str) -> None:
    """Check that a server listens at RAY_ADDRESS, and that a token exists if the cluster needs one."""
    if "://" in address:
        raise ConfigError(
            f"RAY_ADDRESS: {address}: `raylm serve` connects as a driver on a node of the cluster, to HOST:PORT or "
            "'auto'; from elsewhere, `raylm serve --print-config` writes a file for `serve deploy`."
        )
    if address != "auto":
        _check_connection(address)
    if os.environ.get("RAY_AUTH_MODE") == "token" and "RAY_AUTH_TOKEN" not in os.environ:
        path = in_home(os.environ.get("RAY_AUTH_TOKEN_PATH", _TOKEN), "RAY_AUTH_TOKEN_PATH")
        if not path.is_file() or not path.read_text().strip():
            raise ConfigError(
                f"RAY_AUTH_MODE: it is 'token', and there is no token in {path}; copy it from the head of the cluster, "
                "or set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH."
            )


def _check_connection(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"RAY_ADDRESS: {address!r} is not HOST:PORT; `ray start --head` prints the right one.")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"RAY_ADDRESS: no Ray answers at {address} ({reason}); `ray start --head` prints the right address, and "
            "without RAY_ADDRESS `raylm serve` starts its own Ray."
        ) from error
