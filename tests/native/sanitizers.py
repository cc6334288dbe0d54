"""The native kernels' tests under AddressSanitizer and UndefinedBehaviorSanitizer, the team under ThreadSanitizer.

    python -m tests.native.sanitizers                             # both
    python -m tests.native.sanitizers thread
    python -m tests.native.sanitizers address [-k plain]          # options of pytest

Python itself is not built with a sanitizer. The sanitizer's runtime is preloaded, and only the kernels are checked. The
first finding ends its process. One test is left out, because it takes a quarter of an hour without a sanitizer.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from raylm.native.build import SOURCES, find_compiler

ROOT = Path(__file__).parents[2]
TESTS = (
    "tests/native/test_linear.py", "tests/worker/test_attention.py", "tests/worker/test_same_numbers.py",
    "tests/worker/speculation/test_drafts.py", "tests/hostile/test_files.py",
)  # fmt: skip
# Line numbers without variables: tracking variables through inlined code takes a third of the compiler's time.
WATCHED = ("-g1", "-O1", "-fno-var-tracking", "-fno-omit-frame-pointer")
UNDEFINED = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
SAME = "avx2"  # compiled from the same lines as "plain"
LONGEST = "in_two_hundred"  # a quarter of an hour without a sanitizer
TEAMS = [(threads, seed) for threads in (2, 4, 7) for seed in (1, 2, 3)]


def runtime(name: str) -> str:
    """The path of one of the compiler's libraries."""
    found = subprocess.run([find_compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return found.stdout.strip()


def address(*options: str) -> int:
    """Run the kernels' tests with sanitized kernels. A wrapper of the compiler adds the flags. Returns the exit status.

    The kernels are cached, because each instruction set takes half a minute of a core.
    """
    flags = hashlib.sha256(repr((UNDEFINED, WATCHED)).encode()).hexdigest()[:8]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / f"raylm-sanitizers-{flags}"
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        compiler = Path(folder) / "g++"
        command = shlex.join(["env", "-u", "LD_PRELOAD", find_compiler()])
        compiler.write_text(f'#!/bin/sh\nexec {command} "$@" {shlex.join([*UNDEFINED, *WATCHED])}\n')
        compiler.chmod(0o755)
        env = os.environ | {
            "PATH": f"{folder}:{os.environ['PATH']}",
            "XDG_CACHE_HOME": str(cache),
            "LD_PRELOAD": f"{runtime('libasan.so')}:{runtime('libubsan.so')}",
            "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:allocator_may_return_null=1",
            "UBSAN_OPTIONS": "print_stacktrace=1",
        }
        names = f"not {SAME} and not {LONGEST} and not hundreds"
        chosen = ["-q", "-x", "-p", "no:cacheprovider", "-m", "not gpu and not ray", "-k", names, *options, *TESTS]
        return subprocess.run([sys.executable, "-m", "pytest", *chosen], cwd=ROOT, env=env, check=False).returncode


def thread() -> int:
    """Run random phases of teams. Returns 0 if no data race is found."""
    with tempfile.TemporaryDirectory() as folder:
        program, source = Path(folder) / "stress", Path(__file__).with_name("team_stress.cpp")
        flags = ["-std=c++20", "-pthread", "-fsanitize=thread", *WATCHED, f"-I{SOURCES}"]
        subprocess.run([find_compiler(), *flags, str(source), "-o", str(program)], check=True)
        for threads, seed in TEAMS:
            done = subprocess.run([program, str(threads), "5", str(seed)], capture_output=True, text=True, check=False)
            if done.returncode or done.stdout != "right\n":
                print(f"{threads} threads, seed {seed}: {done.stdout}{done.stderr[:6000]}")
                return 1
            print(f"{threads} threads, seed {seed}: no race", flush=True)
    return 0


def main() -> int:
    match sys.argv[1:]:
        case []:
            return max(address(), thread())
        case ["thread"]:
            return thread()
        case ["address", *options]:
            return address(*options)
    raise SystemExit(__doc__)


if __name__ == "__main__":
    sys.exit(main())
