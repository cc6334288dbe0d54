"""Run a command against the embedded model, with the server's address in place of {url} in its arguments."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.serving import ARGS, Server, free_port, serve_file


def main() -> int:
    """Serve with `raylm serve` on a free port while the command runs. Returns the command's exit status."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        path = serve_file(Path(folder) / "serve.yaml", port, ARGS)
        with Server(path, port) as server:
            return subprocess.run([part.replace("{url}", server.url) for part in sys.argv[1:]], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
