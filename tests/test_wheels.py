"""Distributions: the content of the sdist and of a wheel, and serving from a wheel without a compiler."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import yaml

from deploy.wheels import __main__ as wheels
from raylm.native import INSTRUCTION_SETS, find_compiler
from raylm.native.build import offered
from raylm.version import VERSION
from tests.serving import Server, chat, free_port, serve_file

ROOT = Path(__file__).parents[1]
ARCHITECTURES = {"x86_64": "Advanced Micro Devices X86-64", "aarch64": "AArch64"}  # names in readelf's output
X86 = [
    "raylm-avx2", "raylm-avx512", "raylm-avx512-bf16", "raylm-cpu-plain", "raylm-drafts-plain", "raylm-plain",
]  # fmt: skip
LIBRARIES = {"x86_64": X86, "aarch64": ["raylm-cpu-plain", "raylm-drafts-plain", "raylm-plain"]}


def tracked() -> set[str]:
    """The files of the package in this checkout."""
    found = subprocess.run(["git", "ls-files", "raylm"], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(found.stdout.split())


def empty_library(folder: Path, name: str, body: str = "return 0;") -> Path:
    source = folder / "source.cpp"
    source.write_text(f'#include <pthread.h>\nextern "C" int answer() {{ {body} }}')
    subprocess.run([find_compiler(), "-shared", "-fPIC", str(source), "-o", str(folder / name)], check=True)
    return folder / name


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheels.sources(tmp_path_factory.mktemp("sdist"))


def test_the_sdist_has_the_sources_and_no_library(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        found = {name.partition("/")[2] for name in archive.getnames()}
    assert sdist.name == f"raylm-{VERSION}.tar.gz"
    assert tracked() <= found
    assert not [name for name in found if name.endswith(".so")]


def test_what_a_wheel_has(sdist: Path, tmp_path: Path) -> None:
    """Builds the whole wheel except the kernels: empty libraries replace them."""
    libraries = [empty_library(tmp_path, f"{stem}-0123456789abcdef.so") for stem in X86]
    built = wheels.audited(wheels.wheel(sdist, "x86_64", libraries, tmp_path / "raw"), "x86_64", tmp_path / "dist")
    assert built.name.startswith(f"raylm-{VERSION}-py3-none-manylinux")
    assert built.name.endswith("_x86_64.whl")
    with zipfile.ZipFile(built) as archive:
        names = {name for name in archive.namelist() if name.startswith("raylm/") and not name.endswith("/")}
        inside = {f"raylm/native/lib/{path.name}" for path in libraries}
        assert names == tracked() | inside
        about = f"raylm-{VERSION}.dist-info"
        tags = Parser().parsestr(archive.read(f"{about}/WHEEL").decode())
        assert tags["Root-Is-Purelib"] == "false"
        platforms = built.stem.rpartition("-")[2].split(".")
        assert sorted(tags.get_all("Tag", [])) == sorted(f"py3-none-{platform}" for platform in platforms)
        for name, wanted, _ in csv.reader(io.StringIO(archive.read(f"{about}/RECORD").decode())):
            if wanted:
                digest = base64.urlsafe_b64encode(hashlib.sha256(archive.read(name)).digest()).rstrip(b"=")
                assert wanted == f"sha256={digest.decode()}"


def test_a_library_that_needs_a_newer_system_is_refused(sdist: Path, tmp_path: Path) -> None:
    newer = "pthread_t t; return pthread_create(&t, 0, 0, 0);"  # a symbol of glibc 2.34
    library = empty_library(tmp_path, "raylm-plain-0123456789abcdef.so", newer)
    raw = wheels.wheel(sdist, "x86_64", [library], tmp_path / "raw")
    with pytest.raises(SystemExit, match=r"need glibc 2\.34, but 2\.28 is the newest allowed"):
        wheels.audited(raw, "x86_64", tmp_path / "dist")


def test_every_file_has_the_same_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {project["version"], str(citation["version"])} == {VERSION}
    released = rf"^## \[{re.escape(VERSION)}\] - {citation['date-released']}$"
    assert re.search(released, (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_the_release_makes_these_distributions() -> None:
    """A tag of this version releases the distributions of ``make wheel``."""
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    release = yaml.safe_load(text)
    assert release[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads "on" as true
    runs = "\n".join(step.get("run", "") for job in release["jobs"].values() for step in job["steps"])
    assert "make wheel" in runs
    assert "make check" in runs
    makefile = (ROOT / "Makefile").read_text()
    assert "python -m deploy.wheels" in makefile
    for compiler, _ in wheels.MACHINES.values():
        if not compiler.startswith("x86_64"):
            assert compiler.replace("-g++", "").join(("g++-", "")) in runs


@pytest.fixture(scope="module")
def built(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheels, by machine type, as ``make wheel`` builds them."""
    dist = tmp_path_factory.mktemp("dist")
    found = {}
    for machine, (compiler, _) in wheels.MACHINES.items():
        if shutil.which(compiler):
            raw = wheels.wheel(sdist, machine, wheels.libraries(machine), tmp_path_factory.mktemp(machine))
            found[machine] = wheels.audited(raw, machine, dist)
    assert "x86_64" in found
    return found


@pytest.fixture(scope="module")
def installed(built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the x86-64 wheel, and with this environment's packages except RayLM."""
    place = tmp_path_factory.mktemp("installed")
    venv.create(place, with_pip=True)
    python = place / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", built["x86_64"]]
    subprocess.run(install, check=True)
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
    mine = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
    Path(packages, "others.pth").write_text(mine)  # its own .pth files are not read: no RayLM
    return place


def without_a_compiler(place: Path, home: Path) -> dict[str, str]:
    """Environment variables with only ``place`` in PATH, and with an empty home."""
    return {"PATH": str(place / "bin"), "HOME": str(home), "HF_HUB_OFFLINE": "1"}


@pytest.mark.long
@pytest.mark.parametrize("machine", LIBRARIES)
def test_the_libraries_of_a_wheel(built: dict[str, Path], machine: str, tmp_path: Path) -> None:
    if machine not in built:
        pytest.skip(f"{wheels.MACHINES[machine][0]} is not installed")
    with zipfile.ZipFile(built[machine]) as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".so"))
        archive.extractall(tmp_path, names)
    assert [Path(name).stem.rpartition("-")[0] for name in names] == LIBRARIES[machine]
    for name in names:
        header = subprocess.run(["readelf", "-h", tmp_path / name], capture_output=True, text=True, check=True).stdout
        assert ARCHITECTURES[machine] in header


COMPUTE = """
import sys
import torch
import raylm.native.runtime as runtime
from raylm.checkpoint import EMBEDDED
from tests.worker.driver import Driver, random_prompt
found = {}
for instructions in sys.argv[2:]:
    runtime.instruction_set = lambda: instructions
    runtime.kernels.cache_clear()
    for dtype, quantization in (("float32", "none"), ("bfloat16", "none"), ("float32", "int8"), ("bfloat16", "int4")):
        driver = Driver(EMBEDDED, num_blocks=40, dtype=dtype, quantization=quantization)
        tokens = random_prompt(300, seed=1)
        driver.add(0, tokens)
        driver.step({0: len(tokens)})
        found[instructions, dtype, quantization] = torch.stack(list(driver.finish(0).logits.values()))
    assert runtime.kernels().name.startswith(f"raylm-{instructions}-")
torch.save({"logits": found, "library": str(runtime.build(instructions))}, sys.argv[1])
"""


def logits(python: Path, folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    """The embedded model's logits by each instruction set of this machine, and the path of the last library."""
    (folder / "tests").symlink_to(ROOT / "tests")
    names = [name for name in INSTRUCTION_SETS if offered(name)]
    command = [python, "-c", COMPUTE, folder / "logits", *names]
    subprocess.run(command, check=True, cwd=folder, env=environment | {"PYTHONPATH": str(folder)})
    return dict(torch.load(folder / "logits"))


@pytest.mark.long
def test_logits_equal_those_of_compiled_kernels(installed: Path, tmp_path: Path) -> None:
    for name in ("wheel", "compiled"):
        (tmp_path / name).mkdir()
    python, environment = installed / "bin" / "python", without_a_compiler(installed, tmp_path)
    theirs = logits(python, tmp_path / "wheel", environment)
    ours = logits(Path(sys.executable), tmp_path / "compiled", dict(os.environ))
    assert Path(theirs["library"]).is_relative_to(installed)
    assert not Path(ours["library"]).is_relative_to(ROOT)
    assert theirs["logits"].keys() == ours["logits"].keys()
    for key, wanted in ours["logits"].items():
        assert torch.equal(theirs["logits"][key], wanted), key


@pytest.mark.long
@pytest.mark.ray
def test_a_wheel_serves_without_a_compiler(installed: Path, tmp_path: Path) -> None:
    environment = without_a_compiler(installed, tmp_path)
    assert not any(shutil.which(name, path=environment["PATH"]) for name in ("cc", "gcc", "g++", "clang++", "c++"))
    port = free_port()
    file = serve_file(tmp_path / "serve.yaml", port, {}, haproxy=False)
    with Server(file, port, python=installed / "bin" / "python", **environment) as server:
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=chat("What is a KV cache?"), timeout=300).json()
        assert answer["choices"][0]["message"]["content"]
        log = server.log.read_text()
    assert "compiling" not in log
    assert "slower" not in log


PROVE = """
import sys
from raylm.native import build
from raylm.native.library import open_library
from raylm.native.proof import prove
print(build.instruction_set())
for name in sys.argv[1:]:
    try:
        prove(open_library(build.packaged(name)), build.packaged("plain", build.CPU))
        print(name, "is right")
    except build.NativeError as error:
        print(name, error)
"""


@pytest.mark.long
@pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="qemu-user is not installed")
@pytest.mark.parametrize(("processor", "chosen"), [("Haswell-v4", "avx2"), ("Westmere-v2", "plain")])
def test_an_emulated_processor(installed: Path, tmp_path: Path, processor: str, chosen: str) -> None:
    """qemu emulates AVX2, but no part of AVX-512. /proc/cpuinfo shows the host's processor to its programs."""
    command = ["qemu-x86_64", "-cpu", processor, installed / "bin" / "python", "-c", PROVE, chosen, "plain", "avx512"]
    environment = without_a_compiler(installed, tmp_path) | {"PATH": os.environ["PATH"]}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    refused = "avx512 the processor refuses one of their instructions"
    assert done.stdout.splitlines() == [chosen, f"{chosen} is right", "plain is right", refused], done.stderr
