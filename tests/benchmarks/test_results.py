"""Every result names a command, and every command that is named exists and knows the options it is given."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = (ROOT / "benchmarks" / "RESULTS.md").read_text()
COMMAND = re.compile(r"`(?:python (?:-m )?)?(?:benchmarks[/.])?(\w+)(?:\.py)?((?: [^`]*)?)`")
OTHERS = "Other people's clients"  # theirs are the commands


def commands(text: str) -> list[tuple[str, list[str]]]:
    """(benchmark, options) of all commands in ``text``, whose lines may end within one."""
    found = COMMAND.findall(text.replace("\n", " "))
    return [(name, re.findall(r"--[a-z-]+", rest)) for name, rest in found if source(name) is not None]


def source(name: str) -> str | None:
    """The text of a benchmark and of those whose parts it uses, None if there is none of this name."""
    path = ROOT / "benchmarks" / f"{name}.py"
    if not path.exists():
        return None
    own = path.read_text()
    return own + "".join(source(other) or "" for other in re.findall(r"^from (\w+) import", own, re.M))


@pytest.mark.parametrize("section", RESULTS.split("\n## ")[1:], ids=lambda section: section[:24])
def test_a_section_has_a_command_that_exists(section: str) -> None:
    assert commands(section) or section.startswith(OTHERS)
    named = re.findall(r"benchmarks[/.](\w+)", section)
    assert [name for name in named if source(name) is None] == []


@pytest.mark.parametrize(("name", "options"), commands(RESULTS), ids=str)
def test_a_command_knows_its_options(name: str, options: list[str]) -> None:
    text = source(name) or ""
    assert [option for option in options if f'"{option}"' not in text] == []


def run(name: str, *options: str) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *options],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_steps_are_timed_beside_busy_processes() -> None:
    said = run("forward", "--threads", "2", "--batch", "1", "--context", "16", "--prefill", "--steps", "2",
               "--busy", "0", "1", "--fixed-team")  # fmt: skip
    assert re.findall(r"^(decode .*?) {2,}", said, re.M) == [
        "decode 1 x 16", "decode 1 x 16, all threads", "decode 1 x 16, 1 busy", "decode 1 x 16, 1 busy, all threads",
    ]  # fmt: skip


def test_a_layer_is_timed_in_all_formats() -> None:
    said = run("linear", "--threads", "2", "--inputs", "256", "--outputs", "64", "--rows", "2", "--repeats", "1",
               "--calls", "1", "--mib", "1")  # fmt: skip
    assert len(re.findall(r"\d ms, ", said)) == 4
