"""``make software``: programs of the distribution that the tests need.

Root installs them; other users get their names.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

PROGRAMS = {  # Debian package -> names of a program in it
    "chromium": ("chromium", "chromium-browser", "google-chrome"),
    "prometheus": ("prometheus",),
    "postgresql": ("pg_ctlcluster", "initdb"),
    "redis-server": ("redis-server",),
}
_NO_SERVICES = {"RUNLEVEL": "1", "DEBIAN_FRONTEND": "noninteractive"}  # do not start the service


def missing() -> list[str]:
    """The packages without an installed program."""
    return [package for package, names in PROGRAMS.items() if not any(map(shutil.which, names))]


def main() -> int:
    """The exit status: 1 if a program is still missing at the end."""
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
