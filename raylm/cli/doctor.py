"""`raylm doctor`: shows how a model would be served on this machine and why, and problems that would prevent it."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from raylm.cli.examination import Finding

_INDENT = " " * 23
_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


def doctor(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL_OR_FILE] [--KNOB VALUE]...", help="As of `raylm serve`; 'embedded' without."),
    ] = None,
    host: Annotated[str | None, typer.Option(help="As of `raylm serve`.")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="As of `raylm serve`.")] = None,
    compile_kernels: Annotated[bool, typer.Option("--compile", help="Compile the CPU kernels if need be.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Look at this machine and a model: what serving it would choose, and what to change. Status 1 if it would fail.

    For example: raylm doctor /models/Llama-3.2-1B-Instruct --max-model-len 8192
    """
    from rich.console import Console

    from raylm.cli.examination import Finding, examine
    from raylm.cli.options import Place

    screen, findings = Console(highlight=False), list[Finding]()
    given = words or ["embedded"]
    if given[0].startswith("-"):
        given = ["embedded", *given]
    for finding in examine(given, Place(host, port), compile_kernels=compile_kernels):
        findings.append(finding)
        if not as_json:
            _show(screen, finding)
    problems = sum(finding.state == "problem" for finding in findings)
    if as_json:
        print(json.dumps({"ok": not problems, "findings": [asdict(finding) for finding in findings]}, indent=1))
    else:
        screen.print(f"{problems} problem{'s' * (problems != 1)}" if problems else "no problems found")
    raise typer.Exit(int(bool(problems)))


def _show(screen: Console, finding: Finding) -> None:
    """Print a finding on one line, wrapped only in a terminal, and its cure below."""
    from rich.text import Text

    width = screen.width if screen.is_terminal else 1 << 16
    line = textwrap.fill(f"{finding.state:8}{finding.name:14} {finding.text}", width, subsequent_indent=_INDENT)
    shown = Text(line)
    shown.stylize(_STYLES[finding.state], 0, len(finding.state))
    screen.print(shown, soft_wrap=True)
    if finding.cure:
        cure = textwrap.fill(f"cure: {finding.cure}", width, initial_indent=_INDENT, subsequent_indent=_INDENT)
        screen.print(Text(cure, "cyan"), soft_wrap=True)
