"""Run the conformance tests: python -m tests.conformance [URL].

Without a URL, this process serves the embedded model.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext

import httpx

from tests.conformance.run import run
from tests.embedded_server import EmbeddedServer


def main() -> int:
    """Print what was checked and all violations. The exit status is 1 if there is a violation."""
    given = sys.argv[1] if len(sys.argv) > 1 else None
    with nullcontext(given) if given else EmbeddedServer() as url, httpx.Client(base_url=url, timeout=300) as client:
        report = run(client)
    for schema, count in sorted(report.checked.items()):
        print(f"{count:6}  {schema}")
    print(f"{report.checked.total():6}  objects checked, {len(report.faults)} violations")
    for fault in report.faults:
        print(f"        {fault}")
    return int(bool(report.faults))


if __name__ == "__main__":
    sys.exit(main())
