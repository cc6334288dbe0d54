"""Allowed places of a store's file, and its single owner among the actors."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from raylm.errors import ConfigError
from raylm.ingress.responses import storage
from raylm.ingress.responses.database import MEMORY
from raylm.ingress.responses.storage import become_owner, network_storage

MOUNTS = """\
21 1 254:0 / / rw,relatime - ext4 /dev/vda rw
22 21 0:20 / /proc rw - proc proc rw
30 21 0:40 / {folder}/nfs rw,relatime shared:1 - nfs4 server:/export rw,vers=4.2
31 30 0:41 / {folder}/nfs/disk rw - xfs /dev/vdb rw
32 21 0:42 / {folder}/ssh\\040fs rw - fuse.sshfs me@server: rw
33 21 0:43 / {folder}/smb rw - cifs //server/share rw
34 21 0:44 / {folder}/ceph rw - ceph mon:/ rw
35 21 0:45 / {folder}/lustre rw - lustre mgs:/fs rw
36 21 0:46 / {folder}/overlay rw - fuse.fuse-overlayfs overlay rw
37 21 0:47 / {folder}/twice rw - nfs server:/export rw
38 37 0:48 / {folder}/twice rw - ext4 /dev/vdc rw
39 21 0:49 / {folder}/s3 rw - fuse.s3fs s3fs rw
"""


@pytest.fixture
def mounts(tmp_path: Path) -> Path:
    (tmp_path / "mountinfo").write_text(MOUNTS.format(folder=tmp_path))
    return tmp_path / "mountinfo"


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("x.sqlite", None),
        ("nfs/x.sqlite", "nfs4"),
        ("nfs/below/x.sqlite", "nfs4"),
        ("nfs/disk/x.sqlite", None),
        ("nfsx/x.sqlite", None),
        ("ssh fs/x.sqlite", "fuse.sshfs"),
        ("smb/x.sqlite", "cifs"),
        ("ceph/x.sqlite", "ceph"),
        ("lustre/x.sqlite", "lustre"),
        ("overlay/x.sqlite", None),
        ("twice/x.sqlite", None),
        ("s3/x.sqlite", "fuse.s3fs"),
    ],
)
def test_a_network_file_system_is_known_by_its_mount(
    tmp_path: Path, mounts: Path, place: str, kind: str | None
) -> None:
    assert network_storage(tmp_path / place, mounts) == kind


def test_a_link_is_followed(tmp_path: Path, mounts: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nfs")
    assert network_storage(tmp_path / "link" / "x.sqlite", mounts) == "nfs4"


def test_the_disk_of_this_machine_is_none(tmp_path: Path) -> None:
    assert network_storage(tmp_path / "x.sqlite") is None


def test_a_store_on_one_is_refused_by_name(tmp_path: Path, mounts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "network_storage", lambda path: network_storage(path, mounts))
    path = tmp_path / "nfs" / "x.sqlite"
    with pytest.raises(ConfigError, match=r"^ingress.store: .*/nfs/x.sqlite is on a network file system \(nfs4\)"):
        storage.store_path(str(path), "app")
    assert not path.exists()


def test_one_actor_at_a_time_owns_a_file_and_the_next_waits_for_its_end(tmp_path: Path) -> None:
    path = str(tmp_path / "x.sqlite")
    first = become_owner(path)
    assert first is not None
    with pytest.raises(ConfigError, match=r"^ingress.store: .*x.sqlite is in use by another server"):
        become_owner(path, wait_s=0.2)
    ending = threading.Timer(0.3, os.close, [first])
    ending.start()
    second = become_owner(path, wait_s=300)
    ending.join()
    assert second is not None
    os.close(second)


def test_a_store_in_memory_has_no_owner() -> None:
    assert become_owner(MEMORY) is None
