"""The native kernels are compiled once for this machine's instructions. Without a compiler the error says so."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
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
    assert sorted(path.suffix for path in first.parent.iterdir()) == ["", ".so", ".so"]  # "": the lock
    with pytest.raises(NativeError, match=r"cannot be loaded: .*raylm_team_new"):
        open_library(first)


def test_drafts_are_a_library_of_their_own_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("api.cpp", "drafts.cpp", "kernel.h"):
        (tmp_path / name).write_text('extern "C" int answer() { return 1; }')
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    drafts, kernels = build.build("plain", build.DRAFTS), build.build("plain")
    assert drafts != kernels
    (tmp_path / "kernel.h").write_text("// other kernels")
    assert build.build("plain", build.DRAFTS) == drafts
    assert build.build("plain") != kernels
    (tmp_path / "drafts.cpp").write_text("this is no program")
    with pytest.raises(NativeError, match=r"cannot compile the native drafts: .*drafts.cpp"):
        build.build("plain", build.DRAFTS)


ASK = """
import sys, time
from pathlib import Path
from raylm.native import build
build.SOURCES = Path(sys.argv[1])
compile_it = build._compile
def slow(*args):
    print("compiles", flush=True)
    time.sleep(float(sys.argv[2]))
    compile_it(*args)
build._compile = slow
print(build.build("plain").name, flush=True)
"""


def test_processes_that_need_it_together_compile_it_once(tmp_path: Path) -> None:
    sources = tmp_path / "src"
    sources.mkdir()
    (sources / "api.cpp").write_text('extern "C" int answer() { return 41; }')
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}

    def ask(seconds: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", ASK, str(sources), seconds]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    with ask("60") as killed:
        assert killed.stdout is not None
        assert any(line == "compiles\n" for line in killed.stdout)
        with ask("0") as second, ask("0") as third:
            assert second.stdout is not None
            assert "waiting" in second.stdout.readline()
            killed.kill()
            outputs = [process.communicate()[0] for process in (second, third)]
    assert sum(output.splitlines().count("compiles") for output in outputs) == 1
    assert len({output.splitlines()[-1] for output in outputs}) == 1
    assert [path.name for path in (tmp_path / "cache" / "raylm").iterdir() if path.suffix == ".new"] == []


def test_the_child_of_the_server_compiles_without_torch_while_others_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = threading.Event()

    def compile_it(compiler: str, instructions: str, target: Path, lock: object, name: str) -> None:
        target.write_bytes(b"")
        began.set()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_DRIVER", tmp_path / "no GPU")
    monkeypatch.setattr(build, "_compile", compile_it)
    build.build_beside()
    assert began.wait(300)
    assert build.build(build.instruction_set()).exists()
    lean = "import sys; from raylm.native import build_beside; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", lean], capture_output=True, text=True, check=True).stdout == "False\n"


def test_nothing_is_compiled_beside_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_DRIVER", tmp_path)
    monkeypatch.setattr(threading, "Thread", None)
    build.build_beside()


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(NativeError, match=r"cache .*raylm cannot be written"):
        build.build("plain")


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
