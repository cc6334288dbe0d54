"""The child process of `raylm serve` starts to compile the CPU kernels before it starts Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from raylm.cli.serve_process import session_members
from raylm.native import build


@pytest.mark.skipif(build._DRIVER.exists(), reason="where there is a GPU nothing is compiled beside the start")
@pytest.mark.ray
def test_kernels_compile_before_ray_starts(tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\n[ $1 = --version ] || exec sleep 60\n")
    compiler.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "raylm.cli.main", "run-serve"]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as child:
        assert child.stdout is not None
        first = child.stdout.readline()
        while members := session_members(child.pid):
            for pid in members:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    assert "compiling the CPU kernels" in first
