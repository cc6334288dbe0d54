"""Builds the distributions of a release into dist/: the sdist, and a wheel for each machine type.

    python -m deploy.wheels                     # x86_64 and aarch64
    python -m deploy.wheels --machine x86_64

A wheel has the native libraries of all instruction sets of its machine type, so that it needs no compiler. auditwheel
finds the oldest glibc that they can do with, at most that of manylinux_2_28, which torch needs too. The sdist has no
libraries: a package that is installed from it compiles them on first use.

The compilers are g++ and Debian's cross compilers. Compiled libraries stay in build/libraries/ for the next call.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from raylm.native.build import CPU, DRAFTS, INSTRUCTION_SETS, KERNELS, command_for, file_name

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "build" / "libraries"
# By machine type: the compiler, and the instruction sets. On processors other than x86-64, "plain" is all there is.
MACHINES: dict[str, tuple[str, tuple[str, ...]]] = {
    "x86_64": ("x86_64-linux-gnu-g++", tuple(INSTRUCTION_SETS)),
    "aarch64": ("aarch64-linux-gnu-g++", ("plain",)),
}
NEWEST_GLIBC = 28  # 2.28, that of manylinux_2_28
OLD_LIBSTDCXX = Path(__file__).with_name("old_libstdcxx.cpp")


def libraries(machine: str) -> list[Path]:
    """The compiled libraries of a wheel. Compiling all kernels takes some 20 s of a core for each instruction set."""
    compiler, instruction_sets = MACHINES[machine]
    if shutil.which(compiler) is None:
        raise SystemExit(f"make wheel: there is no {compiler}; `apt install {compiler.replace('-g++', '')}`")
    wanted = [*((instructions, KERNELS) for instructions in instruction_sets), ("plain", DRAFTS), ("plain", CPU)]
    return [_compiled(compiler, instructions, name, KEPT / machine) for instructions, name in wanted]


def _compiled(compiler: str, instructions: str, name: str, folder: Path) -> Path:
    library = folder / file_name(compiler, instructions, name)
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        print(f"make wheel: compiling {library.name}", flush=True)
        fresh = library.with_suffix(".new")
        subprocess.run([*command_for(compiler, instructions, name, fresh), str(OLD_LIBSTDCXX), "-s"], check=True)
        fresh.replace(library)
    return library


def sources(target: Path) -> Path:
    """The sdist, built from a copy of the sources, in ``target``."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "raylm"
        shutil.copytree(ROOT / "raylm", copy / "raylm", ignore=shutil.ignore_patterns("__pycache__", "lib"))
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, copy)
        _run("build", "--no-isolation", "--sdist", "--outdir", str(target), str(copy))
    return next(target.glob("*.tar.gz"))


def wheel(sdist: Path, machine: str, libraries: list[Path], target: Path) -> Path:
    """The wheel of an sdist with these libraries, in ``target``, for any Python 3 on ``machine`` with Linux."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        shutil.unpack_archive(sdist, place / "sdist", filter="data")
        _run("build", "--no-isolation", "--wheel", "--outdir", folder, str(next((place / "sdist").iterdir())))
        _run("wheel", "unpack", str(next(place.glob("*.whl"))), "--dest", str(place / "unpacked"))
        package = next((place / "unpacked").iterdir())
        inside = package / "raylm" / "native" / "lib"
        inside.mkdir()
        for library in libraries:
            shutil.copy(library, inside)
        about = next(package.glob("*.dist-info/WHEEL"))
        text = re.sub(r"(?m)^Root-Is-Purelib: true$", "Root-Is-Purelib: false", about.read_text())
        about.write_text(re.sub(r"(?m)^Tag: py3-none-any$", f"Tag: py3-none-linux_{machine}", text))
        target.mkdir(parents=True, exist_ok=True)
        _run("wheel", "pack", str(package), "--dest-dir", str(target))
    return next(target.glob(f"*-py3-none-linux_{machine}.whl"))


def audited(built: Path, machine: str, target: Path) -> Path:
    """The wheel with the tag of the oldest system that has what its libraries need, in ``target``."""
    _run("auditwheel", "repair", "--plat", "auto", "--wheel-dir", str(target), str(built))
    found = next(target.glob(f"*_{machine}.whl"))
    needed = max(map(int, re.findall(r"linux_2_(\d+)_", found.name)), default=0)
    if needed > NEWEST_GLIBC:
        found.unlink()
        raise SystemExit(f"make wheel: the libraries need glibc 2.{needed}, but 2.{NEWEST_GLIBC} is the newest allowed")
    return found


def _run(*command: str) -> None:
    """Run a module of this Python, which finds the programs beside it. Its output is shown if it fails."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    words = [sys.executable, "-m", *command]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=os.environ | {"PATH": path})
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", action="append", choices=MACHINES, help="build for this one; may be repeated")
    target = ROOT / "dist"
    shutil.rmtree(target, ignore_errors=True)
    sdist = sources(target)
    print(sdist)
    for machine in parser.parse_args().machine or MACHINES:
        with tempfile.TemporaryDirectory() as folder:
            print(audited(wheel(sdist, machine, libraries(machine), Path(folder)), machine, target))


if __name__ == "__main__":
    main()
