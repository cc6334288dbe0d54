"""The file of a store: its path, what kind of file system it is on, and which actor owns it."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import time
from pathlib import Path
from urllib.parse import quote

from raylm.errors import ConfigError
from raylm.folders import in_home, user_folder
from raylm.ingress.responses.database import MEMORY, keep_private

_MOUNTS = Path("/proc/self/mountinfo")
# Types in /proc/self/mountinfo. Locks and shared memory of such files are not those of a local disk, or other machines
# can change them. Any other FUSE than those below may be one. A container's own root (9p, virtiofs) is taken for local.
_NETWORK = frozenset({
    "afs", "beegfs", "ceph", "cifs", "coda", "gfs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4",
    "ocfs2", "orangefs", "pvfs2", "smb3", "smbfs", "wekafs",
})  # fmt: skip
_LOCAL_FUSE = frozenset({
    "fuseblk", "fuse.bindfs", "fuse.encfs", "fuse.ext2", "fuse.fuse-overlayfs", "fuse.gocryptfs", "fuse.mergerfs",
    "fuse.ntfs", "fuse.ntfs-3g",
})  # fmt: skip
_ESCAPE = re.compile(r"\\([0-7]{3})")
_OWNER_S = 30.0  # for the one before to end
_POLL_S = 0.1


def find_store(knob: str | None, application: str) -> Path | None:
    """The path of the store: ``ingress.store``, by default a file of the application. None means in memory.

    Outside an application the default is in memory. Does not create or read files.
    """
    if knob == MEMORY or (knob is None and not application):
        return None
    if knob is not None:
        return in_home(knob, "ingress.store")
    return user_folder("XDG_STATE_HOME", "~/.local/state") / f"{quote(application, safe='')}.sqlite"


def store_path(knob: str | None, application: str) -> str:
    """As ``find_store``, and create the file. Raises ConfigError if it cannot be written."""
    if (path := find_store(knob, application)) is None:
        return MEMORY
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (kind := network_storage(path)) is not None:
            raise ConfigError(
                f"ingress.store: {path} is on a network file system ({kind}), on which SQLite's log does not work; "
                "choose a file on a disk of the machine."
            )
        keep_private(path)
        for one in (path, path.parent):  # SQLite's log is beside the file
            if not os.access(one, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ConfigError(f"ingress.store: {path} cannot be written ({error.strerror}); choose another file.") from None
    return str(path)


def network_storage(path: Path, mounts: Path = _MOUNTS) -> str | None:
    """The type of the network file system that ``path`` is on, None for a disk of the machine."""
    here, found, longest = path.resolve(), "", -1
    for line in mounts.read_text(errors="surrogateescape").splitlines():
        before, _, after = line.partition(" - ")
        at = Path(_ESCAPE.sub(lambda code: chr(int(code[1], 8)), before.split()[4]))
        if here.is_relative_to(at) and len(at.parts) >= longest:  # the last mount at a place hides those before
            longest, found = len(at.parts), after.split()[0]
    is_network = found in _NETWORK or (found.startswith("fuse") and found not in _LOCAL_FUSE)
    return found if is_network else None


def become_owner(path: str, wait_s: float = _OWNER_S) -> int | None:
    """Take the lock of a store's file for the life of this process; the descriptor, None for a store in memory.

    Waits for an owner that ends. The lock is a file beside the store's: closing any descriptor of the store's own file
    would release SQLite's locks.

    Raises:
        ConfigError: another process has owned it for ``wait_s``.
    """
    if path == MEMORY:
        return None
    lock = os.open(f"{path}-owner", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    until = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < until:
                time.sleep(_POLL_S)
                continue
            os.close(lock)
            raise ConfigError(
                f"ingress.store: {path} is in use by another server; give each a file, or an application name, of its "
                "own."
            ) from None
        return lock
