"""The native libraries: those of a wheel, or else compiled on first use.

They are compiled into a cache with the source, compiler and instruction set as key. Concurrent processes compile them
once: the one that compiles holds a lock in the cache.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import platform
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from raylm.errors import ConfigError
from raylm.folders import user_folder
from raylm.stages import report

SOURCES = Path(__file__).parent / "src"
PACKAGED = Path(__file__).parent / "lib"  # only wheels have it
KERNELS, DRAFTS, CPU = "api", "drafts", "cpu"  # sources, each compiled to a library
_ANY_KEY = "[0-9a-f]" * 16
_DRIVER = Path("/proc/driver/nvidia")
_CPUINFO = Path("/proc/cpuinfo")
_COMPILERS = ("g++", "clang++", "c++")
_FLAGS = ("-O3", "-std=c++20", "-shared", "-fPIC", "-pthread", "-fno-math-errno", "-Wno-psabi")
# Best first: the required CPU features (names of /proc/cpuinfo), and the compiler's options.
INSTRUCTION_SETS: dict[str, tuple[frozenset[str], tuple[str, ...]]] = {
    "avx512-bf16": (
        frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd", "avx512_bf16", "avx512_vnni", "fma"}),
        ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mprefer-vector-width=512"),
    ),
    "avx512": (
        frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd", "fma"}),
        ("-march=x86-64-v4", "-mprefer-vector-width=512"),
    ),
    "avx2": (frozenset({"avx2", "fma", "bmi2", "f16c"}), ("-march=x86-64-v3",)),
    "plain": (frozenset(), ()),
}


class NativeError(Exception):
    """The native kernels cannot be built or loaded on this machine; the message has the reason."""


def instruction_set(cpuinfo: Path = _CPUINFO) -> str:
    """The best of INSTRUCTION_SETS that every core of this machine supports."""
    return next(name for name in INSTRUCTION_SETS if offered(name, cpuinfo))


def offered(instructions: str, cpuinfo: Path = _CPUINFO) -> bool:
    """Whether every core of this machine supports this instruction set."""
    return INSTRUCTION_SETS[instructions][0] <= _cpu_flags(cpuinfo)


def missing_features(instructions: str, cpuinfo: Path = _CPUINFO) -> list[str]:
    """The features of an instruction set, as names of /proc/cpuinfo, that not every core has."""
    return sorted(INSTRUCTION_SETS[instructions][0] - _cpu_flags(cpuinfo))


def packaged(instructions: str, name: str = KERNELS) -> Path | None:
    """The library for an instruction set that this wheel contains; None if it was not installed from a wheel.

    Raises NativeError if the wheel contains libraries, but not this one.
    """
    if not PACKAGED.is_dir():
        return None
    if found := next(PACKAGED.glob(f"{_stem(instructions, name)}-{_ANY_KEY}.so"), None):
        return found
    raise NativeError(f"the package contains no {_stem(instructions, name)} library; install it again")


def build(instructions: str, name: str = KERNELS) -> Path:
    """The library for an instruction set: that of the wheel, or the cached one, or compiled now in several seconds.

    Raises NativeError.
    """
    if (found := packaged(instructions, name)) is not None:
        return found
    compiler, library = _library(instructions, name)
    if library.exists():
        return library
    with _locked(library.parent) as lock:
        if not library.exists():
            started = time.perf_counter()
            what = "the CPU kernels" if name == KERNELS else name
            report("stage", "native", f"compiling {what} for {instructions}, once, for up to a minute")
            fresh = library.with_suffix(".new")
            _compile(compiler, instructions, fresh, lock, name)
            fresh.replace(library)
            report("stage", "native", f"compiled in {time.perf_counter() - started:.1f} s")
    return library


def is_built(instructions: str) -> bool:
    """Whether ``build`` has nothing to compile. Raises NativeError without a compiler where one is needed."""
    return packaged(instructions) is not None or _library(instructions)[1].exists()


def _stem(instructions: str, name: str) -> str:
    return f"raylm-{instructions}" if name == KERNELS else f"raylm-{name}-{instructions}"


def file_name(compiler: str, instructions: str, name: str = KERNELS) -> str:
    """The name of a library. Libraries of one name have the same instructions."""
    return f"{_stem(instructions, name)}-{_key(compiler, instructions, name)}.so"


def _library(instructions: str, name: str = KERNELS) -> tuple[str, Path]:
    """The compiler, and the path of its output."""
    compiler = find_compiler()
    try:
        cache = user_folder("XDG_CACHE_HOME", "~/.cache")
    except ConfigError as error:
        raise NativeError(error.message) from error
    return compiler, cache / file_name(compiler, instructions, name)


def build_beside() -> None:
    """Start to compile for this machine's CPU on a thread, unless there is a GPU. ``build`` elsewhere waits for it."""

    def work() -> None:
        with suppress(NativeError):  # code that needs the kernels will report the error
            build(instruction_set())

    if not _DRIVER.exists():
        threading.Thread(target=work, name="compile kernels", daemon=True).start()


@contextmanager
def _locked(cache: Path) -> Iterator[IO[str]]:
    """Hold the cache's lock. The kernel releases it when its last holder has ended."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        file = (cache / "lock").open("w")
    except OSError as error:
        raise NativeError(f"the cache {cache} cannot be written: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("stage", "native", "waiting for the CPU kernels, which another process compiles")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def _compile(compiler: str, instructions: str, target: Path, lock: IO[str], name: str = KERNELS) -> None:
    """The compiler holds ``lock`` too: if this process is killed, the compiler may still be writing ``target``."""
    command = command_for(compiler, instructions, name, target)
    result = subprocess.run(command, capture_output=True, text=True, check=False, pass_fds=[lock.fileno()])
    if result.returncode:
        first = (result.stderr.strip() or "no message").splitlines()[0]
        raise NativeError(
            f"{compiler} cannot compile the native {'kernels' if name == KERNELS else name}: {first[:300]}"
        )


def command_for(compiler: str, instructions: str, name: str, target: Path) -> list[str]:
    """The command that compiles a library."""
    return [compiler, *_FLAGS, *INSTRUCTION_SETS[instructions][1], str(SOURCES / f"{name}.cpp"), "-o", str(target)]


def find_compiler() -> str:
    if found := next(filter(None, map(shutil.which, _COMPILERS)), None):
        return found
    raise NativeError(f"there is no C++ compiler ({', '.join(_COMPILERS)})")


def _key(compiler: str, instructions: str, name: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    flags = (*_FLAGS, *INSTRUCTION_SETS[instructions][1])
    digest = hashlib.sha256(f"{version} {platform.machine()} {flags}".encode())
    own = [SOURCES / f"{name}.cpp"]
    for source in sorted([*SOURCES.glob("*.h"), *own] if name == KERNELS else own):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _cpu_flags(cpuinfo: Path) -> frozenset[str]:
    if cpuinfo == _CPUINFO and (library := packaged("plain", CPU)) is not None:
        features = ctypes.CDLL(str(library)).raylm_cpu_features
        features.restype = ctypes.c_char_p
        return frozenset(features().decode().split())
    if not cpuinfo.exists():
        return frozenset()
    found = [line.split(":", 1)[1].split() for line in cpuinfo.read_text().splitlines() if line.startswith("flags")]
    return frozenset.intersection(*map(frozenset, found)) if found else frozenset()
