"""A Postgres server of the distribution, on a free port, with a new folder."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.serving import free_port

_USER = "postgres"


def programs() -> Path | None:
    """The folder with the programs of the newest version. None if Postgres is not installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda one: float(one.parts[-3]))
    if found:
        return found[-1].parent
    there = shutil.which("initdb")
    return None if there is None else Path(there).parent


def lacking() -> str | None:
    """The reason why no server can start here. None if one can."""
    return "Postgres is not installed (apt-get install postgresql)" if programs() is None else None


class Postgres:
    """A server. Postgres refuses to run as root, so root runs it as the user of the distribution's package."""

    def __init__(self, host: str = "127.0.0.1", inside: Sequence[str] = ()) -> None:
        """Start the server at an address. ``inside`` is the command prefix that enters its network."""
        found = programs()
        assert found is not None
        self._programs, self._inside = found, list(inside)
        self.folder = Path(tempfile.mkdtemp(prefix="raylm-postgres-", dir="/tmp"))
        if os.geteuid() == 0:
            shutil.chown(self.folder, _USER)
            self._inside += ["setpriv", f"--reuid={_USER}", f"--regid={_USER}", "--clear-groups"]
        self.host, self.port = host, free_port()
        self._run("initdb", "--no-sync", "--auth=trust", "--username=raylm", "--encoding=UTF8", "-D", self._data)
        with (self.folder / "data" / "pg_hba.conf").open("a") as clients:
            clients.write("host all all all trust\n")
        self.start()

    @property
    def _data(self) -> str:
        return str(self.folder / "data")

    @property
    def url(self) -> str:
        return f"postgresql://raylm@{self.host}:{self.port}/postgres"

    def start(self) -> None:
        """Start the server, and wait until it accepts connections."""
        options = f"-h {self.host} -p {self.port} -k '' -F"
        log = str(self.folder / "log")
        self._run("pg_ctl", "start", "--wait", "-D", self._data, "-o", options, "-l", log)

    def stop(self) -> None:
        """Stop the server immediately. Its clients see closed connections."""
        with suppress(subprocess.CalledProcessError):
            self._run("pg_ctl", "stop", "--mode=immediate", "-D", self._data)

    def freeze(self, *, frozen: bool = True) -> None:
        """Stop (SIGSTOP) or continue all its processes. The kernel still acknowledges packets."""
        first = int((self.folder / "data" / "postmaster.pid").read_text().split()[0])
        children = Path(f"/proc/{first}/task/{first}/children").read_text().split()
        for pid in (first, *map(int, children)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP if frozen else signal.SIGCONT)

    def remove(self) -> None:
        self.freeze(frozen=False)
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self, program: str, *arguments: str) -> None:
        command = [*self._inside, str(self._programs / program), *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=self.folder)
