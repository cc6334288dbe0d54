"""Heartbeats of real processes: those that are killed or stopped are found out, and nobody else."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from raylm.engine.liveness import heartbeats
from raylm.engine.liveness.heartbeats import HeartbeatMonitor

# Its main thread computes without a pause, as a step does.
BUSY = """
import sys
from raylm.engine.liveness.heartbeats import send_heartbeats
send_heartbeats(*sys.argv[1:])
while True:
    pass
"""

Begin = Callable[[str], subprocess.Popen[bytes]]


@pytest.fixture
async def monitor() -> AsyncIterator[HeartbeatMonitor]:
    monitor = HeartbeatMonitor(["a", "b"])
    yield monitor
    monitor.close()
    await asyncio.gather(monitor._task, return_exceptions=True)
    assert not Path(monitor.path).parent.exists()


@pytest.fixture
async def begin(monitor: HeartbeatMonitor) -> AsyncIterator[Begin]:
    begun = []

    def begin(name: str) -> subprocess.Popen[bytes]:
        begun.append(subprocess.Popen([sys.executable, "-c", BUSY, monitor.path, name]))
        return begun[-1]

    yield begin
    for process in begun:
        process.kill()
        process.wait()


async def heard(monitor: HeartbeatMonitor, *names: str) -> None:
    async with asyncio.timeout(300):
        while not monitor._connections.keys() >= set(names):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def silent_for(monitor: HeartbeatMonitor, name: str, seconds: float) -> None:
    """Wait until nothing has come from a process for longer than that, as the monitor counts it."""
    async with asyncio.timeout(300):
        while monitor._connections[name].silent_s <= seconds:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_killed_process_is_lost_and_the_first_one_counts(monitor: HeartbeatMonitor, begin: Begin) -> None:
    a, b = begin("a"), begin("b")
    await heard(monitor, "a", "b")
    b.kill()
    async with asyncio.timeout(300):
        assert await monitor.lost == ("b", "was lost")
    a.kill()
    async with asyncio.timeout(300):
        while monitor._connections["a"].is_open:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert monitor.lost.result() == ("b", "was lost")


async def test_a_stopped_process_is_lost_and_killed_while_a_busy_one_is_neither(
    monitor: HeartbeatMonitor, begin: Begin
) -> None:
    busy, stopped = begin("a"), begin("b")
    await heard(monitor, "a", "b")
    monitor.on_start()
    os.kill(stopped.pid, signal.SIGSTOP)
    async with asyncio.timeout(300):
        assert await monitor.lost == ("b", "has given no sign of life for 3 s")
    monitor.kill("b")
    assert await asyncio.to_thread(stopped.wait, 300) == -signal.SIGKILL
    assert busy.poll() is None


async def test_while_a_process_starts_it_may_be_silent(
    monitor: HeartbeatMonitor, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeats, "SILENCE_LIMIT_S", 0.5)
    monkeypatch.setattr(heartbeats, "PERIOD_S", 0.05)
    process = begin("a")
    await heard(monitor, "a")
    os.kill(process.pid, signal.SIGSTOP)
    await silent_for(monitor, "a", 2 * heartbeats.SILENCE_LIMIT_S)
    assert not monitor.lost.done()
    monitor.on_start()
    async with asyncio.timeout(300):
        assert (await monitor.lost)[0] == "a"


async def test_what_is_stopped_at_the_end_is_killed_too(monitor: HeartbeatMonitor, begin: Begin) -> None:
    stopped = begin("a")
    await heard(monitor, "a")
    os.kill(stopped.pid, signal.SIGSTOP)
    await silent_for(monitor, "a", heartbeats._STALE_S)
    monitor.close()
    assert await asyncio.to_thread(stopped.wait, 300) == -signal.SIGKILL


async def test_a_monitor_that_was_stopped_itself_blames_nobody(monitor: HeartbeatMonitor, begin: Begin) -> None:
    process = begin("a")
    await heard(monitor, "a")
    monitor.on_start()
    os.kill(process.pid, signal.SIGSTOP)
    await silent_for(monitor, "a", 0)
    before = monitor._connections["a"].silent_s
    time.sleep(heartbeats.SILENCE_LIMIT_S + 1)  # noqa: ASYNC251 - as if this process had been stopped
    await silent_for(monitor, "a", before + heartbeats.PERIOD_S)
    assert monitor._connections["a"].silent_s < heartbeats.SILENCE_LIMIT_S
    assert not monitor.lost.done()
    os.kill(process.pid, signal.SIGCONT)


async def test_nobody_is_killed_who_is_not_there(
    monitor: HeartbeatMonitor, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
    monitor.kill("a")
    process = begin("a")
    await heard(monitor, "a")
    monitor.kill("a")
    assert killed == [process.pid]
    monkeypatch.undo()
    process.kill()
    await monitor.lost
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
    monitor.kill("a")
    assert killed == [process.pid]
