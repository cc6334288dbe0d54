"""What kind of file system a file is on, and which actor owns the file of a store."""

from __future__ import annotations

import fcntl
import os
import re
import time
from pathlib import Path

from raylm.errors import ConfigError
from raylm.ingress.responses.database import MEMORY

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
