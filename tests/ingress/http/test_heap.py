"""The memory that an ingress allocates for large answers returns to the system."""

from __future__ import annotations

import asyncio
import platform
import subprocess
import sys
import threading
import tracemalloc

import httpx
import pytest

from raylm.ingress.http import answer
from raylm.ingress.http import heap as heap_module
from raylm.ingress.http.answer import Pieces, json_answer
from raylm.ingress.http.heap import TRIM_AFTER_BYTES, HeapTrimmer
from tests.ingress.harness import TEXT

THREADS = """
import threading
from pathlib import Path
from raylm.ingress.http.heap import HeapTrimmer

def memory_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) / 256

def work():
    bytearray(2**24)  # glibc keeps blocks of this size in its heaps from now on
    together.wait()
    parts = [bytearray(b"x" * 2**22) for _ in range(8)]
    together.wait()

trimmer, together = HeapTrimmer(), threading.Barrier(4)
before = memory_mib()
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
trimmer._trim()
print(memory_mib() - before)
"""


async def test_a_large_answer_of_small_parts_takes_no_more_than_its_bytes() -> None:
    ids = [7] * 500_000
    tracemalloc.start()
    try:
        pieces = await json_answer(lambda: {"tokens": Pieces(ids)}, len(ids))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(map(len, pieces)) > 1_000_000
    assert peak < 6 * answer._PIECE_BYTES, "one object per part would take thirty times the memory"


async def test_the_heap_is_trimmed_once_behind_many_bytes() -> None:
    done = threading.Event()
    calls: list[int] = []
    heap = HeapTrimmer(lambda: (calls.append(1), done.set()))
    for _ in range(8):
        heap.opened()
    heap.carried(TRIM_AFTER_BYTES - 1)
    assert not heap._is_due
    for _ in range(5):
        heap.carried(TRIM_AFTER_BYTES)
    assert await asyncio.to_thread(done.wait, 30)
    assert len(calls) == 1
    heap.carried(TRIM_AFTER_BYTES - 1)
    assert not heap._is_due, "the count starts again"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have other heaps")
def test_the_heaps_of_threads_keep_nothing_large() -> None:
    """Four threads allocate 128 MiB."""
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 16


async def test_garbage_is_collected_once_no_request_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap_module, "_DELAY_S", 0.0)
    trimmed, collected = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    heap = HeapTrimmer(lambda: loop.call_soon_threadsafe(trimmed.set), collected.set)
    for _ in range(2):
        heap.opened()
    heap.carried(TRIM_AFTER_BYTES)
    async with asyncio.timeout(30):
        await trimmed.wait()
    assert not collected.is_set(), "no collection while a request is open"
    heap.carried(0)
    async with asyncio.timeout(30):
        await collected.wait()
    heap.opened()
    heap.carried(0)
    assert not heap._is_due, "no large answer since then"


async def test_bodies_and_answers_count(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    monkeypatch.setattr(HeapTrimmer, "carried", lambda _, num_bytes: counted.append(num_bytes))
    body = TEXT | {"prompt": "a" * 1000}
    reply = await client.post("/v1/completions", json=body)
    (found,) = counted
    assert found == len(reply.request.content) + len(reply.content)


@pytest.mark.long
def test_sixty_of_the_largest_answers_of_each_kind_leave_no_memory() -> None:
    """In a separate process with only the application. It takes a quarter of an hour."""
    command = [sys.executable, "-m", "benchmarks.http.answer_memory", "--check", "--answers", "60"]
    subprocess.run(command, check=True)
