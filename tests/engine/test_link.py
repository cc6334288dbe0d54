"""Links between real processes: values in order, and a dead process is detected, but no live one."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from raylm.cli.sessions import remove_ended
from raylm.engine import link as link_module
from raylm.engine.link import BEAT_S, SILENCE_S, START_SILENCE_S, Link, Listener

# The process echoes values. "segv" crashes it. After "busy" its main thread computes forever.
ECHO = """
import ctypes, socket, sys
from raylm.engine.link import ThreadLink
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
link = ThreadLink(connection)
link.send_last_words()
link.send(sys.argv[2])
while (value := link.read()) is not None:
    if value == "segv":
        ctypes.string_at(0)
    while value == "busy":
        pass
    link.send(value)
"""


class End:
    """This process's end of a link, with the received values and ends."""

    def __init__(self, **options: Any) -> None:
        self.values: list[Any] = []
        self.ends: list[str] = []
        self.link = Link(self.values.append, self.ends.append, **options)

    async def until(self, condition: Callable[[End], object]) -> None:
        async with asyncio.timeout(300):
            while not condition(self):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def silent_for(self, seconds: float) -> None:
        """Wait until this end has received nothing for longer than ``seconds``."""
        await self.until(lambda end: end.link._silence.silent_s > seconds)

    async def ended(self) -> str:
        await self.until(lambda end: end.ends)
        (why,) = self.ends
        return why


class Parent:
    """Starts processes that connect to it. ``begin`` returns when they have connected."""

    def __init__(self) -> None:
        self.listener = Listener()
        self.ends: list[End] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.options: dict[str, Any] = {}

    def accept(self) -> Link:
        self.ends.append(End(**self.options))
        return self.ends[-1].link

    async def begin(self, **options: Any) -> tuple[End, subprocess.Popen[bytes]]:
        self.options = options
        count = len(self.ends)
        command = [sys.executable, "-c", ECHO, self.listener.path, "hello"]
        self.processes.append(subprocess.Popen(command))  # noqa: ASYNC220
        async with asyncio.timeout(300):
            while len(self.ends) == count or not self.ends[-1].values:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert self.ends[-1].values.pop() == "hello"
        return self.ends[-1], self.processes[-1]


@pytest.fixture
async def parent() -> AsyncIterator[Parent]:
    parent = Parent()
    await parent.listener.serve(parent.accept)
    yield parent
    for end in parent.ends:
        end.link.close()
    parent.listener.close()
    assert not Path(parent.listener.path).parent.exists()
    for process in parent.processes:
        process.kill()
        process.wait()


async def test_values_come_back_in_order_whatever_their_size(parent: Parent) -> None:
    end, process = await parent.begin()
    sent = [list(range(size)) for size in (1, 300, 2, 300_000, 0, 50_000, 3)]
    for value in sent:
        end.link.send(value)
    await end.until(lambda end: len(end.values) == len(sent))
    assert end.values == sent
    assert end.link.pid == process.pid


async def test_a_killed_process_is_lost_and_a_closed_link_tells_nothing(parent: Parent) -> None:
    (killed, process), (closed, other) = await parent.begin(), await parent.begin()
    process.kill()
    assert await killed.ended() == "was lost"
    killed.link.send("nobody reads this")
    closed.link.close()
    assert await asyncio.to_thread(other.wait, 300) == 0, "its end of the link has closed"
    assert closed.ends == []


async def test_a_fatal_signal_writes_the_last_words(parent: Parent) -> None:
    end, _ = await parent.begin()
    end.link.send("segv")
    assert await end.ended() == "crashed: Fatal Python error: Segmentation fault"
    assert "string_at" in end.link.last_words


async def test_a_stopped_process_is_lost_and_killed_while_a_busy_one_is_neither(parent: Parent) -> None:
    (busy, busy_process), (stopped, process) = await parent.begin(kills=True), await parent.begin(kills=True)
    busy.link.send("busy")
    os.kill(process.pid, signal.SIGSTOP)
    assert await stopped.ended() == "has given no sign of life for 3 s"
    assert await asyncio.to_thread(process.wait, 300) == -signal.SIGKILL
    assert busy.ends == []
    assert busy_process.poll() is None


async def test_only_a_parent_kills(parent: Parent, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    end, process = await parent.begin(limit_s=3 * BEAT_S)
    os.kill(process.pid, signal.SIGSTOP)
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
    assert await end.ended() == f"has given no sign of life for {3 * BEAT_S:g} s"
    end.link.kill()
    assert killed == [], "the link has ended, so another process may have its pid"


async def test_while_a_process_starts_it_may_be_silent(parent: Parent) -> None:
    end, process = await parent.begin(limit_s=START_SILENCE_S)
    os.kill(process.pid, signal.SIGSTOP)
    await end.silent_for(1.5)
    assert end.ends == []
    end.link.set_limit(1.0)
    assert await end.ended() == "has given no sign of life for 1 s"


async def test_a_process_that_was_stopped_itself_blames_nobody(parent: Parent) -> None:
    end, process = await parent.begin()
    os.kill(process.pid, signal.SIGSTOP)
    await end.silent_for(0)
    time.sleep(SILENCE_S + 1)  # noqa: ASYNC251 - the event loop stands still, as if this process had been stopped
    await end.silent_for(4 * BEAT_S)
    assert end.ends == []
    os.kill(process.pid, signal.SIGCONT)


async def test_a_value_that_cannot_be_read_ends_the_link() -> None:
    end = End()
    here, there = socket.socketpair()
    await asyncio.get_running_loop().connect_accepted_socket(lambda: end.link, here)
    there.sendall((3).to_bytes(4, "little") + b"abc")
    assert await end.ended() == "sent a value that cannot be read"
    there.close()


async def pair(first: End, second: End) -> None:
    """Connect two ends within this process."""
    for end, connection in zip((first, second), socket.socketpair(), strict=True):
        await asyncio.get_running_loop().connect_accepted_socket(lambda end=end: end.link, connection)


async def test_an_end_that_is_paused_holds_up_the_other_and_loses_nothing() -> None:
    sender, reader = End(room_bytes=16 << 10), End()
    await pair(sender, reader)
    reader.link.pause()
    count = 0
    async with asyncio.timeout(300):
        while sender.link.has_room.is_set():
            sender.link.send(count)
            count += 1
            await asyncio.sleep(0)
        assert 8 <= count < 10_000
        await asyncio.sleep(SILENCE_S + 1)
        assert sender.ends == reader.ends == [], "both ends send signs of life"
        assert reader.values == []
        reader.link.resume()
        await sender.link.has_room.wait()
    sender.link.close()
    assert await reader.ended() == "was lost"
    assert reader.values == list(range(count)), "all values arrive before the end"


def check_works(listener: Listener) -> None:
    directory = Path(listener.path).parent
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(listener.path)
    listener.close()
    assert not directory.exists()


def test_a_socket_is_below_the_place_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        monkeypatch.setattr(tempfile, "tempdir", place)
        listener = Listener("steps")
        assert Path(place) in Path(listener.path).parents
        check_works(listener)


@pytest.mark.parametrize("there", [True, False], ids=["too long", "missing"])
def test_and_elsewhere_where_it_cannot_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    place = tmp_path / ("long" * 30 if there else "missing")
    if there:
        place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    check_works(Listener("supervisor"))
    assert not there or not list(place.iterdir()), "a directory is left behind"


def test_where_it_can_be_nowhere_each_place_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "_MOST_BYTES", 3)
    with pytest.raises(OSError, match=r"/tmp: the path is longer.*/dev/shm: the path is longer.*TMPDIR"):
        Listener("steps")


def test_a_socket_beside_another_one_goes_with_it() -> None:
    supervisor = Listener("supervisor")
    clients = Listener("clients", supervisor.path)
    assert Path(clients.path).parent == Path(supervisor.path).parent
    clients.close()
    assert Path(supervisor.path).exists()
    Listener("others", supervisor.path).socket.close()  # as if its process were killed
    check_works(supervisor)


def test_the_directory_of_a_killed_process_is_removed_and_one_in_use_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = (
        "import sys; from raylm.engine.link import Listener; l = Listener('clients'); print(l.path, flush=True); "
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        path = Path(process.stdout.readline().strip())
        assert path.parent.parent == tmp_path
        assert remove_ended([str(tmp_path)]) == []
        process.kill()
        process.wait()
        assert remove_ended([str(tmp_path)]) == [path.parent.name]
    listener = Listener()
    assert remove_ended([str(tmp_path)]) == []
    listener.close()
    assert list(tmp_path.iterdir()) == []


def test_a_socket_that_cannot_be_bound_leaves_no_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    made: list[str] = []
    make = tempfile.mkdtemp
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **fields: made.append(make(**fields)) or made[-1])
    with pytest.raises(OSError, match="No such file"):
        Listener("no/such/directory")
    assert made
    assert not Path(made[0]).exists()
