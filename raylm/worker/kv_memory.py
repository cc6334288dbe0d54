"""KVMemory: populates the memory of a KV pool on a CPU before steps write it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from threading import Thread, main_thread
from weakref import ref

from torch import Tensor

from raylm.native import populate

_IDLE_S = 0.02
_PIECE_BYTES = 2 << 20


class KVMemory:
    """Populates the blocks that will be used next, while no step runs. Steps run inside it as a context manager.

    The system allocates memory on the first write, and the writing step waits: in a virtual machine 3 ms for 2 MiB, a
    tenth of the time of a prompt. The pool allocates unused blocks in order. Therefore, once the worker is idle for
    20 ms, the ``ahead`` blocks after the highest used block are populated. Memory that is never needed is not taken.

    Args:
        halves: keys and values of each layer, each (blocks, ...) and contiguous; () disables this class.
        ahead: number of blocks to populate beyond the highest used block.
    """

    def __init__(self, halves: Sequence[Tensor] = (), ahead: int = 0) -> None:
        self._halves, self._ahead = list(halves), ahead
        self._there = 0  # number of populated blocks
        self._wanted = min(ahead, len(halves[0]) if halves else 0)
        self._thread: Thread | None = None
        self._pieces: Iterator[Tensor] = iter(())
        self.__exit__()

    def reach(self, blocks: Sequence[int]) -> None:
        """Announce that these blocks will be written."""
        if blocks and self._halves:
            self._wanted = max(self._wanted, min(max(blocks) + 1 + self._ahead, len(self._halves[0])))

    def __enter__(self) -> None:
        """Called when a step begins."""
        self._busy = True

    def __exit__(self, *error: object) -> None:
        self._busy, self._idle_since = False, time.monotonic()
        if self._there < self._wanted and (self._thread is None or not self._thread.is_alive()):
            self._pieces = self._missing()
            self._thread = Thread(target=_ask, args=(ref(self),), name="kv-memory")
            self._thread.start()

    def ask(self) -> float | None:
        """Populate one piece if the worker is idle. Returns the seconds until the next call, or None when done."""
        if self._busy or time.monotonic() - self._idle_since < _IDLE_S:
            return _IDLE_S
        piece = next(self._pieces, None)
        if piece is not None and not populate(piece):
            self._halves, piece = [], None  # not supported: the first write allocates the memory
        return None if piece is None else 0.0

    def wait(self) -> None:
        """Wait until the thread has nothing to do."""
        if self._thread is not None:
            self._thread.join()

    def _missing(self) -> Iterator[Tensor]:
        while self._halves and self._there < self._wanted:
            first = self._there
            self._there = min(self._wanted, first + max(1, _PIECE_BYTES // self._halves[0][0].nbytes))
            yield from (half[first : self._there] for half in self._halves)


def _ask(memory: ref[KVMemory]) -> None:
    """The thread's loop. The weak reference lets the pool be freed with its worker.

    The thread is no daemon: torch would abort the program at interpreter exit.
    """
    while main_thread().is_alive() and (found := memory()) is not None and (pause := found.ask()) is not None:
        del found
        time.sleep(pause)
