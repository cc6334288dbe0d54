"""The documents name files that exist, and the licence of every package that RayLM asks for."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    page
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")]
    if page.name != "CHANGELOG.md"
]
_MADE_UP = (
    "1_Pooling/config.json",
    "raylm/ingress/openai/count_words.py",
    "results/QUESTION.jsonl",
    "results/gpu.jsonl",
)
_PATH = re.compile(r"`((?:[\w.-]+/)+[\w.-]*|[\w-]+\.(?:py|h|cpp|yaml|md))`")
_LINK = re.compile(r"\]\((?!http)([^)#]+)")


def exists(path: str, page: Path) -> bool:
    """Whether a path in a page is one of the repository's; files may be named from raylm/ or from their folder."""
    if "*" in path or path in _MADE_UP:
        return True
    return any((start / path).exists() for start in (ROOT, page.parent)) or any(
        found for top in ("raylm", "tests", "benchmarks") for found in ROOT.glob(f"{top}/**/{path.rstrip('/')}")
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_path_in_a_page_exists(page: Path) -> None:
    text = page.read_text()
    named = _PATH.findall(text)
    assert [path for path in named if not exists(path, page)] == []
    assert [link for link in _LINK.findall(text) if not (page.parent / link).exists()] == []


def test_every_line_of_security_names_a_test_that_exists() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    lines = re.findall(r"^(?:- |\| (?!port or socket|---)).*(?:\n  .*)*", page, re.MULTILINE)
    assert len(lines) > 15
    named = [re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", line) for line in lines]
    assert [line for line, tests in zip(lines, named, strict=True) if not tests] == [
        "- decides what the model answers, and by its chat template what the model reads. Nothing prevents that."
    ]
    lost = [
        (file, name)
        for file, name in {one for tests in named for one in tests}
        if not re.search(rf"^(?:async )?def {name or 'test_'}", (ROOT / file).read_text(), re.MULTILINE)
    ]
    assert lost == []


def test_every_package_that_is_asked_for_has_its_licence_listed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    names = [re.split(r"[^\w.-]", one, maxsplit=1)[0] for one in asked]
    page = (ROOT / "docs" / "licenses.md").read_text()
    assert [name for name in names if not re.search(rf"\| {name} \| \S+ \| \S", page)] == []
