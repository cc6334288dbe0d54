"""The wheel in an environment of its own, away from the repository: it has all that serving needs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import httpx
import pytest

from tests.serving import ROOT, free_port

pytestmark = pytest.mark.ray

LIMIT_S = 180


def run(*command: str | Path, cwd: Path) -> str:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def raylm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command, installed from a wheel of a copy of what git knows; other packages are this environment's."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in run("git", "ls-files", "raylm", "pyproject.toml", "README.md", cwd=ROOT).splitlines():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source, cwd=folder)
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    (wheel,) = folder.glob("*.whl")
    run(*pip, "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "venv" / "bin" / "raylm"


def test_the_wheel_is_what_is_imported(raylm: Path, tmp_path: Path) -> None:
    code = "import raylm.cli.main as m; print(m.__file__)"
    assert str(raylm.parents[1]) in run(raylm.parent / "python", "-c", code, cwd=tmp_path)


def test_it_serves_the_embedded_model_and_answers_as_told(raylm: Path, tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "log"
    environ = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "RAY_ADDRESS"}}
    with log.open("w") as file:
        server = subprocess.Popen(
            [raylm, "serve", "embedded", "--port", str(port), "--num-blocks", "512", "--served-model-name", "mine"],
            cwd=tmp_path,
            env=environ,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + LIMIT_S
        while " try " not in log.read_text():
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        assert f"mine at http://127.0.0.1:{port}/v1" in log.read_text()
        (curl,) = (line.split(" try ")[1].strip() for line in log.read_text().splitlines() if " try " in line)
        answer = json.loads(run("sh", "-c", f"{curl} -s", cwd=tmp_path))
        assert "attention" in answer["choices"][0]["message"]["content"]
        assert httpx.get(f"http://127.0.0.1:{port}/v1/models").json()["data"][0]["id"] == "mine"
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.wait()
