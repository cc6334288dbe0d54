"""A wheel's libraries: selected by CPUID, proved by products, and skipped in favour of a slower set if one fails."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from ctypes import CFUNCTYPE, POINTER, c_float, c_int, c_int64, c_void_p, cast
from pathlib import Path
from typing import Any

import pytest

import raylm.native.library as lib
from raylm.native import NativeError, build, kernels
from raylm.native.build import CPU, DRAFTS, INSTRUCTION_SETS, find_compiler, offered
from raylm.native.library import _KERNELS
from raylm.native.proof import prove
from raylm.native.runtime import kernels as fastest

KEY = "0123456789abcdef"
ALL = " ".join(sorted(frozenset.union(*(features for features, _ in INSTRUCTION_SETS.values()))))
REFUSED = "__builtin_trap();"  # ud2, which raises the signal of an unknown instruction
WRONG = ""


def compiled(target: Path, source: str) -> Path:
    file = target.with_suffix(".cpp")
    file.write_text(source)
    subprocess.run([find_compiler(), "-shared", "-fPIC", str(file), "-o", str(target)], check=True)
    file.unlink()
    return target


def processor(target: Path, features: str) -> Path:
    """Compile cpu.cpp for a processor with these features."""
    text = (build.SOURCES / "cpu.cpp").read_text().replace("raylm_cpu_features", "real_features")
    return compiled(target, f'{text}\nextern "C" const char* raylm_cpu_features() {{ return "{features}"; }}')


def broken(target: Path, linear: str) -> Path:
    """Kernels whose functions do nothing, except ``linear`` as the body of the product."""
    bodies = dict.fromkeys(_KERNELS, "") | {"raylm_linear": linear}
    return compiled(target, "\n".join(f'extern "C" void {name}() {{ {body} }}' for name, body in bodies.items()))


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder in place of an installed wheel's libraries."""
    folder = tmp_path / "lib"
    folder.mkdir()
    monkeypatch.setattr(build, "PACKAGED", folder)
    fastest.cache_clear()
    yield folder
    fastest.cache_clear()


@pytest.fixture(scope="module")
def plain() -> Path:
    """The kernels compiled for any processor."""
    return build.build("plain")


def test_a_wheel_needs_no_compiler(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = {(name, build.KERNELS): wheel / f"raylm-{name}-{KEY}.so" for name in INSTRUCTION_SETS}
    files |= {("plain", DRAFTS): wheel / f"raylm-drafts-plain-{KEY}.so"}
    for path in files.values():
        path.touch()
    for (instructions, name), path in files.items():
        assert build.build(instructions, name) == path
        assert build.is_built(instructions)
    assert not (tmp_path / "cache").exists()
    with pytest.raises(NativeError, match="contains no raylm-cpu-plain library; install it again"):
        build.build("plain", CPU)


@pytest.mark.parametrize("chosen", INSTRUCTION_SETS)
def test_cpuid_chooses(wheel: Path, chosen: str) -> None:
    """Each set is selected if all its features exist, and not if one is missing."""
    features = INSTRUCTION_SETS[chosen][0]
    processor(wheel / f"raylm-cpu-plain-{KEY}.so", " ".join(features) + " sse2 ")
    assert build.instruction_set() == chosen
    assert build.missing_features(chosen) == []


@pytest.mark.parametrize("missing", ALL.split())
def test_each_feature_is_needed(wheel: Path, missing: str) -> None:
    processor(wheel / f"raylm-cpu-plain-{KEY}.so", " ".join(set(ALL.split()) - {missing}))
    needing = [name for name, (features, _) in INSTRUCTION_SETS.items() if missing in features]
    assert build.instruction_set() == next(name for name in INSTRUCTION_SETS if name not in needing)
    assert all(missing in build.missing_features(name) for name in needing)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="CPUID is x86's")
def test_cpuid_says_what_the_system_says(tmp_path: Path) -> None:
    known = frozenset(ALL.split())
    by_system = build._cpu_flags(Path("/proc/cpuinfo")) & known
    source = (build.SOURCES / "cpu.cpp").read_text()
    library = ctypes.CDLL(str(compiled(tmp_path / "cpu.so", source)))
    library.raylm_cpu_features.restype = ctypes.c_char_p
    found = frozenset(library.raylm_cpu_features().decode().split())
    assert found == by_system
    assert found <= known


def test_kernels_that_do_not_work_are_left(wheel: Path, plain: Path, caplog: pytest.LogCaptureFixture) -> None:
    processor(wheel / f"raylm-cpu-plain-{KEY}.so", ALL)
    broken(wheel / f"raylm-avx512-bf16-{KEY}.so", REFUSED)
    broken(wheel / f"raylm-avx512-{KEY}.so", WRONG)
    (wheel / f"raylm-avx2-{KEY}.so").write_bytes(b"no library")
    shutil.copy(plain, wheel / f"raylm-plain-{KEY}.so")
    assert kernels().name == f"raylm-plain-{KEY}"
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3
    assert "avx512-bf16 are not used" in said[0]
    assert "with those for avx512: the processor refuses one of their instructions" in said[0]
    assert "with those for avx2: their product of float32 weights is wrong" in said[1]
    assert "with those for plain: raylm-avx2-" in said[2]
    assert {record.__dict__["event"] for record in caplog.records} == {"slower"}


def test_if_none_works_there_are_none(wheel: Path, plain: Path) -> None:
    processor(wheel / f"raylm-cpu-plain-{KEY}.so", "")
    broken(wheel / f"raylm-plain-{KEY}.so", WRONG)
    with pytest.raises(NativeError, match="their product of float32 weights is wrong"):
        kernels()
    broken(wheel / f"raylm-avx2-{KEY}.so", REFUSED)
    with pytest.raises(NativeError, match="refuses"):
        kernels("avx2")


class Spoiled:
    """Correct kernels, except for products with one kind of weights."""

    def __init__(self, library: ctypes.CDLL, kind: int) -> None:
        shape = CFUNCTYPE(None, c_void_p, c_int, POINTER(lib.LinearStruct), c_void_p, c_int, c_void_p, c_int64)
        linear = cast(library.raylm_linear, shape)

        def spoiled(team: Any, dtype: Any, weight: Any, x: Any, rows: Any, out: Any, stride: Any) -> None:
            linear(team, dtype, weight, x, rows, out, stride)
            if weight.contents.kind == kind:
                cast(out, POINTER(c_float))[rows * stride // 2 - 1] += 1

        self._functions = {"raylm_linear": shape(spoiled)}
        self._functions |= {name: library[name] for name in ("raylm_team_new", "raylm_team_free")}

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return self._functions[name]


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4"])
def test_a_wrong_product_of_any_kind_is_found(wheel: Path, plain: Path, kind: str) -> None:
    cpu = processor(wheel / f"raylm-cpu-plain-{KEY}.so", "")
    library: Any = Spoiled(lib.open_library(plain), getattr(lib, kind.upper()))
    with pytest.raises(NativeError, match=f"their product of {kind} weights is wrong"):
        prove(library, cpu)


@pytest.mark.parametrize("instructions", [name for name in INSTRUCTION_SETS if offered(name)])
def test_compiled_kernels_prove_right(instructions: str, tmp_path: Path) -> None:
    prove(kernels(instructions).library, processor(tmp_path / "cpu.so", ""))
