"""All commands have help with an example, and shell completion of names, options and knobs."""

from __future__ import annotations

import re

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from raylm.cli.main import app
from raylm.config import knobs

COMMANDS = [name for name, command in get_command(app).commands.items() if not command.hidden]  # type: ignore[attr-defined]


def completed(line: str) -> list[str]:
    """The shell completions of the last word of a line."""
    env = {"_RAYLM_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    return CliRunner().invoke(app, [], prog_name="raylm", env=env).output.split()


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("config", "version")])
def test_help_has_an_example_of_that_command(name: str) -> None:
    said = CliRunner().invoke(app, [name, "--help"]).output
    assert re.search(rf"For example:\s+raylm {name} ", said), said


def test_commands_are_completed() -> None:
    assert completed("raylm ") == COMMANDS
    assert completed("raylm do") == ["doctor"]
    assert "--prompt-tokens" in completed("raylm bench --pr")
    assert {"--install-completion", "--show-completion"} <= set(completed("raylm --"))


@pytest.mark.parametrize("name", ["serve", "doctor"])
def test_knobs_are_completed_by_both_of_their_names(name: str) -> None:
    assert completed(f"raylm {name} embedded --max-num-s") == ["--max-num-seqs"]
    assert "--scheduler.max-num-seqs" in completed(f"raylm {name} --sch")
    found = completed(f"raylm {name} --")
    assert {f"--{dotted.replace('_', '-')}" for dotted, *_ in knobs()} | {"--port"} <= set(found)
    assert len(found) == len(set(found))
