"""The native kernels of this process: the library, and one team of threads."""

from __future__ import annotations

import ctypes
import logging
import threading
from contextlib import suppress
from functools import cache

from raylm.native.build import CPU, INSTRUCTION_SETS, NativeError, build, instruction_set, packaged
from raylm.native.library import open_library
from raylm.native.memory import Arena
from raylm.native.proof import prove
from raylm.stages import about

logger = logging.getLogger(__name__)


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
        if (cpu := packaged("plain", CPU)) is not None:
            prove(self.library, cpu)
        self.arena, self.lock = Arena(), threading.Lock()
        self.team = Team(self.library, 1)

    def use_threads(self, threads: int) -> None:
        """Use ``threads`` threads from now on. Existing decoders keep their threads."""
        with self.lock:
            if threads != self.team.threads:
                self.team = Team(self.library, threads)


@cache
def kernels(instructions: str | None = None) -> Kernels:
    """The kernels for this machine, compiled if needed and loaded once. Raises NativeError.

    Of a wheel the best instruction set is used whose kernels work. Without ``instructions`` worse ones are tried, and a
    warning is logged for each that fails.
    """
    if instructions is not None:
        return Kernels(instructions)
    chosen = instruction_set()
    for worse in list(INSTRUCTION_SETS)[list(INSTRUCTION_SETS).index(chosen) + 1 :]:
        try:
            return Kernels(chosen)
        except NativeError as error:
            if packaged("plain") is None:
                raise
            text = "The kernels for %s are not used, and decoding is slower with those for %s: %s"
            logger.warning(text, chosen, worse, error, extra=about("slower"))
            chosen = worse
    return Kernels(chosen)


def use_threads(threads: int) -> None:
    """Set the threads of the native kernels of this process, if they are available."""
    with suppress(NativeError):  # select_kernels has logged it
        kernels().use_threads(threads)
