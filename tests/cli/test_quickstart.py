"""The wheel in a separate environment, outside the repository, has everything that serving needs."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
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
    """The command, installed from a wheel of the files in git. Other packages come from this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in run("git", "ls-files", "raylm", "pyproject.toml", "README.md", "LICENSE", cwd=ROOT).splitlines():
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


def test_the_first_ten_minutes_are_as_the_quickstart_has_them(raylm: Path, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "checkpoint")
    port = str(free_port())
    page = (ROOT / "docs" / "quickstart.md").read_text()
    (transcript,) = re.findall(r"```console\n(.*?)```", page, re.DOTALL)
    console = Console(raylm, tmp_path)
    try:
        for step in re.split(r"^(?=\$ |\^C)", transcript.replace("8000", port), flags=re.MULTILINE)[1:]:
            command, _, shown = step.partition("\n")
            said = console.enter(command, port)
            wanted = re.escape(" ".join(shown.split())).replace(re.escape("..."), ".*")
            assert re.search(wanted, " ".join(said.split())), f"{command}\n{said}"
    finally:
        console.end()


class Console:
    """A terminal: one server at a time in the foreground, and short commands in parallel."""

    def __init__(self, raylm: Path, folder: Path) -> None:
        self._folder, self._log = folder, folder / "log"
        self._environ = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "RAY_ADDRESS"}}
        self._environ["PATH"] = f"{raylm.parent}:{self._environ['PATH']}"
        self._server: subprocess.Popen[bytes] | None = None

    def enter(self, command: str, port: str) -> str:
        """Run a command. Returns its output; of a server until it is ready, and for ^C the output from then on."""
        if command == "^C":
            return self._stop()
        words = shlex.split(command.removeprefix("$ "))
        if words[:2] == ["pip", "install"]:
            return ""  # already installed from a wheel
        if words[:2] == ["raylm", "serve"]:
            return self._serve([*words, "--port", port])
        done = subprocess.run(words, cwd=self._folder, env=self._environ, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    def _serve(self, words: list[str]) -> str:
        with self._log.open("w") as log:
            self._server = subprocess.Popen(
                words, cwd=self._folder, env=self._environ, stdout=log, stderr=subprocess.STDOUT
            )
        deadline = time.monotonic() + LIMIT_S
        while " try " not in self._log.read_text() and self._server.poll() is None:
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.2)
        return self._log.read_text()

    def _stop(self) -> str:
        assert self._server is not None
        before = len(self._log.read_text())
        self._server.send_signal(signal.SIGINT)
        assert self._server.wait(300) == 0
        return self._log.read_text()[before:]

    def end(self) -> None:
        if self._server is not None and self._server.poll() is None:
            self._server.kill()
            self._server.wait()
