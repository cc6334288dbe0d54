"""Checks before Ray starts: one line names the variable, the error, and the solution."""

from __future__ import annotations

import pwd
import re
import shutil
import socket
import stat
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raylm.checkpoint import resolve
from raylm.cli.main import app
from raylm.cli.options import Place, served
from raylm.cli.start_checks import check_cluster, check_files, check_machine, keep_token_private, ray_address
from raylm.config import Config
from raylm.errors import ConfigError
from raylm.native import NativeError, instruction_set, is_built


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    for name in ("RAY_ADDRESS", "RAY_TMPDIR", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)


def refusal_of_machine() -> str:
    with pytest.raises(ConfigError) as caught:
        check_machine()
    return caught.value.message


def refusal_of_cluster(address: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_cluster(address)
    return caught.value.message


def test_this_machine_is_well() -> None:
    check_machine()


def test_a_tmpdir_is_too_long_when_a_socket_in_it_cannot_be_bound(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from ray._private.utils import validate_socket_filepath

    refused = []
    for length in range(15, 60):
        folder = "/" + "x" * (length - 1)
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setenv("RAY_TMPDIR", folder)
        with monkeypatch.context() as patch:
            patch.setattr(tempfile, "gettempdir", lambda: "/tmp")
            try:
                check_machine()
            except ConfigError as error:
                refused.append(length)
                said = error.message
        sockets = f"{folder}/raylm-abcdefgh/ray/session_2026-11-22_10-18-59_796473_4194304/sockets"
        if length in refused:
            with pytest.raises(OSError, match="AF_UNIX"):
                validate_socket_filepath(f"{sockets}/plasma_store")
        else:
            validate_socket_filepath(f"{sockets}/plasma_store")
    assert refused == list(range(refused[0], 60))
    assert said.startswith(f"RAY_TMPDIR: {folder} is too long for the sockets in it, 59 bytes where at most")


@pytest.mark.parametrize("name", ["RAY_TMPDIR", "TMPDIR"])
def test_a_relative_directory_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    monkeypatch.setenv(name, "here")
    assert refusal_of_machine() == f"{name}: here is a relative path; set it to an absolute one."
    assert list(tmp_path.iterdir()) == []


def test_the_sockets_of_engines_need_room_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    monkeypatch.setenv("TMPDIR", str(long))
    assert refusal_of_machine().startswith(f"TMPDIR: {long} is too long for the sockets in it")
    with socket.socket(socket.AF_UNIX) as steps, pytest.raises(OSError, match="AF_UNIX"):
        steps.bind(f"{tempfile.mkdtemp(prefix='raylm-')}/steps")


def test_a_full_disk_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2**30, 2**30 - 2**20, 2**20))
    monkeypatch.setenv("TMPDIR", "/tmp")
    assert "TMPDIR: the disk of /tmp is full (1 MiB are free)" in refusal_of_machine()


def test_a_ray_of_our_own_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ray_address() is None
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert ray_address() is None
    monkeypatch.setenv("RAY_ADDRESS", "1.2.3.4:6379")
    assert ray_address() == "1.2.3.4:6379"


def test_an_address_where_nobody_answers_is_said() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        assert f"RAY_ADDRESS: no Ray answers at {address} (Connection refused)" in refusal_of_cluster(address)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("6379", "'6379' is not HOST:PORT"),
        ("head:port", "'head:port' is not HOST:PORT"),
        ("127.0.0.1:99999", "no Ray answers at 127.0.0.1:99999"),
        ("ray://head:10001", "connects as a driver on a node of the cluster"),
        ("http://head:8265", "writes a file for `serve deploy`"),
    ],
)
def test_an_address_of_another_kind_is_said(address: str, said: str) -> None:
    message = refusal_of_cluster(address)
    assert message.startswith("RAY_ADDRESS: ")
    assert said in message


def test_a_missing_token_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    assert f"there is no token in {tmp_path / 'token'}" in refusal_of_cluster("auto")
    (tmp_path / "token").write_text("\n")
    assert "there is no token" in refusal_of_cluster("auto")
    (tmp_path / "token").write_text("abc")
    check_cluster("auto")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "another"))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "abc")
    check_cluster("auto")


def test_the_command_says_it_in_one_line_and_ends_with_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "nonsense")
    done = CliRunner().invoke(app, ["serve", "embedded"])
    assert (done.exit_code, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("raylm: RAY_ADDRESS: 'nonsense' is not HOST:PORT")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_rays_token_is_made_for_its_user_alone(home: Path) -> None:
    keep_token_private()
    token = home / ".ray" / "auth_token"
    assert re.fullmatch("[0-9a-f]{64}", text := token.read_text())
    assert (mode(token), mode(token.parent)) == (0o600, 0o700)
    assert list(token.parent.iterdir()) == [token]
    keep_token_private()
    assert token.read_text() == text


def test_a_token_that_ray_wrote_for_all_is_closed_and_stays(home: Path) -> None:
    token = home / ".ray" / "auth_token"
    token.parent.mkdir(mode=0o755)
    token.write_text("abc")
    token.chmod(0o644)
    keep_token_private()
    assert token.read_text() == "abc"
    assert (mode(token), mode(token.parent)) == (0o600, 0o700)


@pytest.mark.parametrize("variable", [("RAY_AUTH_MODE", "disabled"), ("RAY_AUTH_TOKEN", "abc")])
def test_no_token_is_made_where_none_is_read(
    home: Path, monkeypatch: pytest.MonkeyPatch, variable: tuple[str, str]
) -> None:
    monkeypatch.setenv(*variable)
    keep_token_private()
    assert list(home.iterdir()) == []


def test_a_home_without_room_for_a_token_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/proc/nope")
    with pytest.raises(ConfigError) as caught:
        keep_token_private()
    assert caught.value.message == (
        "Ray's token cannot be kept in /proc/nope/.ray/auth_token: No such file or directory; "
        "set HOME or RAY_AUTH_TOKEN."
    )


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without an entry in passwd, where HOME is not set."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("homeless")
def test_an_unknown_home_is_said_wherever_it_is_needed() -> None:
    for needs_it in (
        keep_token_private,
        lambda: check_files("default", Config()),
        lambda: served(["~/model"], Place()),
        lambda: resolve("~/model", None),
    ):
        with pytest.raises(ConfigError, match=r"the home directory in ~/.* is unknown; set HOME"):
            needs_it()
    with pytest.raises(NativeError, match=r"the home directory in ~/.* is unknown"):
        is_built(instruction_set())


def test_keys_and_the_store_are_checked_as_the_server_will_use_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nope")
    with pytest.raises(ConfigError, match=r"^ingress.store: /proc/nope/raylm/a.sqlite cannot be written \(No such"):
        check_files("a", Config())
    with pytest.raises(ConfigError, match=r"^ingress.api_keys_file: /no/keys cannot be read"):
        check_files("a", Config.model_validate({"ingress": {"api_keys_file": "/no/keys"}}))
    for store in ("postgresql://nowhere/x", ":memory:", str(tmp_path / "x.sqlite")):
        check_files("a", Config.model_validate({"ingress": {"store": store}}))


def test_a_token_elsewhere_is_closed_and_its_directory_left_alone(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(home / "token"))
    keep_token_private()
    assert list(home.iterdir()) == []
    (home / "token").write_text("abc")
    (home / "token").chmod(0o640)
    home.chmod(0o755)
    keep_token_private()
    assert (mode(home / "token"), mode(home)) == (0o600, 0o755)
