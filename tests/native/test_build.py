"""The native kernels are compiled once for this machine's instructions, and whoever lacks a compiler is told so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from raylm.native import NativeError, build
from raylm.native.library import open_library


def cpuinfo(path: Path, *flags: str) -> Path:
    path.write_text("".join(f"processor : {at}\nflags\t\t: fpu {line}\n" for at, line in enumerate(flags)))
    return path


def test_the_best_instructions_that_all_cores_have(tmp_path: Path) -> None:
    best = " ".join(build.INSTRUCTION_SETS["avx512-bf16"][0])
    old = " ".join(build.INSTRUCTION_SETS["avx2"][0])
    assert build.instruction_set(cpuinfo(tmp_path / "new", best, best + " amx_tile")) == "avx512-bf16"
    assert build.instruction_set(cpuinfo(tmp_path / "mixed", best + " " + old, old)) == "avx2"
    assert build.instruction_set(cpuinfo(tmp_path / "bare", "sse2")) == "plain"
    assert build.instruction_set(tmp_path / "missing") == "plain"


def test_compiled_once_and_again_when_the_source_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sources = tmp_path / "src"
    sources.mkdir()
    (sources / "api.cpp").write_text('extern "C" int answer() { return 41; }')
    monkeypatch.setattr(build, "SOURCES", sources)
    first = build.build("plain")
    made = os.stat(first).st_mtime_ns
    assert "compiling the CPU kernels for plain" in capsys.readouterr().out
    assert build.build("plain") == first
    assert not capsys.readouterr().out
    assert os.stat(first).st_mtime_ns == made
    (sources / "api.cpp").write_text('extern "C" int answer() { return 42; }')
    assert build.build("plain") != first
    assert [path.suffix for path in first.parent.iterdir()] == [".so", ".so"]
    with pytest.raises(NativeError, match=r"cannot be loaded: .*raylm_team_new"):
        open_library(first)


def test_every_process_finds_the_same_library() -> None:
    ask = "from raylm.native import build; print(build.build(build.instruction_set()))"
    found = {
        subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout.split()[-1]
        for _ in range(3)
    }
    assert found == {str(build.build(build.instruction_set()))}


def test_what_the_compiler_says_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "api.cpp").write_text("this is no program")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    with pytest.raises(NativeError, match=r"cannot compile the native kernels: .*api.cpp"):
        build.build("plain")


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NativeError, match=r"no C\+\+ compiler \(g\+\+, clang\+\+, c\+\+\)"):
        build.build("plain")
