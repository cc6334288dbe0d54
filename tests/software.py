"""``make software``: the programs of the distribution that tests drive. As root they are installed, else named."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

PROGRAMS = {  # by Debian's package, the names that one of them may have
    "chromium": ("chromium", "chromium-browser", "google-chrome"),
    "prometheus": ("prometheus",),
    "postgresql": ("pg_ctlcluster", "initdb"),
    "redis-server": ("redis-server",),
}
_NO_SERVICES = {"RUNLEVEL": "1", "DEBIAN_FRONTEND": "noninteractive"}  # only the program is wanted


def missing() -> list[str]:
    """Packages of which no program is found."""
    return [package for package, names in PROGRAMS.items() if not any(map(shutil.which, names))]


def main() -> int:
    """The exit status, 1 where something is missing in the end."""
    packages = missing()
    if packages and os.geteuid() == 0 and shutil.which("apt-get"):
        print(f"make: installing {', '.join(packages)}", flush=True)
        for words in (["update"], ["install", "--yes", "--no-install-recommends", *packages]):
            subprocess.run(["apt-get", "--quiet=2", *words], env=os.environ | _NO_SERVICES, check=False)
        packages = missing()
    if packages:
        print(f"make: the tests need {' and '.join(packages)}: sudo apt-get install {' '.join(packages)}")
    return int(bool(packages))


if __name__ == "__main__":
    sys.exit(main())
