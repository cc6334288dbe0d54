"""Every result names a command that exists and its valid options.

Every ratio has raw rows, and every headline figure is on its page.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from benchmarks import plot, rows
from benchmarks.rows import Report, Row

ROOT = Path(__file__).parents[2]
RESULTS = (ROOT / "benchmarks" / "RESULTS.md").read_text()
PAGES = {path.stem: path.read_text() for path in sorted((ROOT / "benchmarks" / "results").glob("*.md"))}
HEADLINES = [line.split(" | ") for line in RESULTS.splitlines() if line.startswith("| ")][1:]
COMMAND = re.compile(r"python -m (benchmarks[.\w]*)([^`]*)")
FIGURE = re.compile(r"\d[\d,.]*\d|\d")


def questions() -> dict[str, str]:
    """The sections of the pages, by question."""
    sections = [section for page in PAGES.values() for section in page.split("\n## ")[1:]]
    return {section.split(":")[0]: section for section in sections}


def commands(text: str) -> list[tuple[str, list[str]]]:
    """(module, options) of all commands in ``text``. A command may continue on the next line."""
    return [(name, re.findall(r"--[a-z-]+", rest)) for name, rest in COMMAND.findall(text.replace("\n", " "))]


def source(module: str) -> str:
    """The source of a benchmark and of the modules that it imports from. Empty if there is no such benchmark."""
    path = ROOT / module.replace(".", "/")
    path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    if not path.exists():
        return ""
    own = path.read_text()
    return own + "".join(
        source(other) for other in re.findall(r"^from (benchmarks\.(?:\w+\.\w+|rows)) import", own, re.M)
    )


@pytest.mark.parametrize(("question", "answer", "link"), HEADLINES, ids=str)
def test_a_headline_has_figures_of_the_page_that_it_links(question: str, answer: str, link: str) -> None:
    page = PAGES[re.findall(r"\(results/(\w+)\.md\)", link)[0]]
    assert question.endswith("?")
    assert [figure for figure in FIGURE.findall(answer) if figure not in FIGURE.findall(page)] == []


def test_there_are_ten_headlines_and_a_headline_for_each_page() -> None:
    assert len(HEADLINES) == 10
    assert [name for name in PAGES if f"(results/{name}.md)" not in RESULTS] == []


@pytest.mark.parametrize("question", questions())
def test_an_answer_has_a_command_and_rows(question: str) -> None:
    assert commands(questions()[question])
    found = rows.read(plot.RESULTS / f"{question}.jsonl")
    assert {row.question for row in found} == {question}
    ratios = {row.value for row in found if row.unit == "x"}
    assert [ratio for ratio in re.findall(r"([\d.]+)x\b", questions()[question]) if float(ratio) not in ratios] == []


def test_there_are_no_rows_of_other_questions() -> None:
    assert {path.stem for path in plot.RESULTS.glob("*.jsonl")} == set(questions())


@pytest.mark.parametrize("path", sorted(plot.RESULTS.glob("*.jsonl")), ids=lambda path: path.stem)
def test_rows_are_whole(path: Path) -> None:
    for line in path.read_text().splitlines():
        row = json.loads(line)
        assert list(row) == [field.name for field in fields(Row)]
        assert isinstance(row.pop("value"), int | float)
        assert all(text or name == "unit" for name, text in row.items())


NAMED = [found for page in PAGES.values() for found in commands(page)] + [
    found
    for path in sorted(plot.RESULTS.glob("*.jsonl"))
    for command in dict.fromkeys(row.command for row in rows.read(path))
    for found in commands(command)
]


@pytest.mark.parametrize(("module", "options"), NAMED, ids=str)
def test_a_command_knows_its_options(module: str, options: list[str]) -> None:
    text = source(module)
    assert text
    assert [option for option in options if f'"{option}"' not in text] == []


def test_the_pictures_are_of_questions() -> None:
    assert {path.stem for path in plot.RESULTS.glob("*.svg")} == set(plot.DRAWN) <= set(questions())


def test_what_is_reported_is_printed_kept_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    report = Report("speed", {"time": "ms", "ratio": "x"}, out)
    for time in (2.0, 4.0):
        report.add("a case", {"time": time, "ratio": 1.5}, "a note")
    report.add("another", {"time": 12345.6})
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["time,", "ms", "ratio,", "x"]
    assert [line.split() for line in lines] == [
        ["a", "case", "2", "1.5", "a", "note"], ["a", "case", "4", "1.5", "a", "note"], ["another", "12,346"],
    ]  # fmt: skip
    found = rows.read(out)
    assert [(row.case, row.metric, row.value, row.unit) for row in found[-3:]] == [
        ("a case", "time", 4.0, "ms"), ("a case", "ratio", 1.5, "x"), ("another", "time", 12345.6, "ms"),
    ]  # fmt: skip
    assert {row.question for row in found} == {"speed"}
    plot.draw(found, tmp_path / "rows.svg")
    assert "ratio, x" in (tmp_path / "rows.svg").read_text()


def run(name: str, *options: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *options],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_steps_are_timed_beside_busy_processes() -> None:
    said = run("model.forward", "--threads", "2", "--batch", "1", "--context", "16", "--prefill", "--steps", "2",
               "--busy", "0", "1", "--fixed-team")  # fmt: skip
    assert re.findall(r"^(decode .*?) {2,}", said, re.M) == [
        "decode 1 x 16", "decode 1 x 16, all threads", "decode 1 x 16, 1 busy", "decode 1 x 16, 1 busy, all threads",
    ]  # fmt: skip


def test_a_layer_is_timed_in_all_formats() -> None:
    said = run("model.linear", "--threads", "2", "--inputs", "256", "--outputs", "64", "--rows", "2", "--repeats", "1",
               "--calls", "1", "--mib", "1")  # fmt: skip
    assert re.findall(r"^(2 rows, .*?) {2,}[\d.,]+ +[\d.,]+ +\S+$", said, re.M) == [
        "2 rows, bfloat16", "2 rows, int8", "2 rows, int8, groups of 64", "2 rows, int4, groups of 32",
        "2 rows, int4 with zeros, groups of 32",
    ]  # fmt: skip
