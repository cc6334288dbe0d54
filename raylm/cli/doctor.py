"""`raylm doctor`: what serving here would use and why, and what would keep it from starting."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

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
            screen.print(f"{finding.state:8}", style=_STYLES[finding.state], end="")
            screen.print(f"{finding.name:14} {finding.text}", markup=False, soft_wrap=True)
            if finding.cure:
                screen.print(f"{'':8}{'':14} cure: {finding.cure}", style="cyan", markup=False, soft_wrap=True)
    problems = sum(finding.state == "problem" for finding in findings)
    if as_json:
        print(json.dumps({"ok": not problems, "findings": [asdict(finding) for finding in findings]}, indent=1))
    else:
        screen.print(f"{problems} problem{'s' * (problems != 1)}" if problems else "nothing would keep it from serving")
    raise typer.Exit(int(bool(problems)))
