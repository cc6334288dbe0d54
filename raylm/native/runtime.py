"""The native kernels of this process: the compiled library, and one team of threads."""

from __future__ import annotations

import ctypes
import threading
from contextlib import suppress
from functools import cache

from raylm.native.build import NativeError, build, instruction_set
from raylm.native.library import open_library
from raylm.native.memory import Arena


class Team:
    """Threads that compute together and sleep in between. They end with this object."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self.threads, self._library = threads, library
        self.handle = library.raylm_team_new(threads)

    def use(self, threads: int) -> None:
        """Use only ``threads`` of the team's threads from now on."""
        self._library.raylm_team_use(self.handle, threads)

    def __del__(self) -> None:
        self._library.raylm_team_free(self.handle)


class Kernels:
    """The loaded library and its threads. Calls must come from one thread at a time."""

    def __init__(self, instructions: str) -> None:
        path = build(instructions)
        self.name = path.stem  # includes the source, compiler and instruction set
        self.library = open_library(path)
        self.arena, self.lock = Arena(), threading.Lock()
        self.team = Team(self.library, 1)

    def use_threads(self, threads: int) -> None:
        """Use ``threads`` threads from now on. Existing decoders keep their threads."""
        with self.lock:
            if threads != self.team.threads:
                self.team = Team(self.library, threads)


@cache
def kernels(instructions: str | None = None) -> Kernels:
    """The kernels for this machine, compiled if needed and loaded once. Raises NativeError."""
    return Kernels(instructions or instruction_set())


def use_threads(threads: int) -> None:
    """Set the threads of the native kernels of this process, if they are available."""
    with suppress(NativeError):  # select_kernels has logged it
        kernels().use_threads(threads)
