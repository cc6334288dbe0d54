"""The documents name files that exist, and list the licence of every package that RayLM needs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
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
    """Whether a path in a page exists in the repository.

    Paths may be relative to raylm/ or to the file's own folder.
    """
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


def site(folder: Path) -> tuple[int, str]:
    """Build the site from a copy of docs/ in ``folder``. Returns the exit status and mkdocs' output."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in {Path(line).parts[0] for line in tracked.splitlines()} - {"docs", "mkdocs.yml"}:
        (folder / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "mkdocs.yml", folder)
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder / "site")]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=env)
    return done.returncode, done.stderr


def test_the_site_has_all_pages_and_the_python_interface(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    status, said = site(tmp_path)
    assert status == 0, said
    pages = {path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")}
    built = {path.parent.relative_to(tmp_path / "site") for path in (tmp_path / "site").rglob("index.html")}
    assert {path.parent if path.name in ("index", "README") else path for path in pages} == built
    assert 'id="raylm.llm.LLM.generate"' in (tmp_path / "site" / "python" / "index.html").read_text()
    assert "blob/main/SECURITY.md" in (tmp_path / "site" / "security" / "index.html").read_text()


@pytest.mark.parametrize("link", ["nowhere.md", "../nowhere.md", "quickstart.md#no-such-heading"])
def test_a_broken_link_is_an_error(tmp_path: Path, link: str) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    with (tmp_path / "docs" / "index.md").open("a") as index:
        index.write(f"\n[a link]({link})\n")
    status, said = site(tmp_path)
    assert status != 0
    assert link.partition("#")[0] in said


def test_an_image_is_small_and_has_no_root() -> None:
    """Check the rules of an image linter. No test builds an image from the file."""
    lines = re.sub(r"\\\n", " ", (ROOT / "deploy" / "Containerfile").read_text()).splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    stages = [at for at, (name, _) in enumerate(steps) if name == "FROM"]
    assert len(stages) == 2
    assert all(re.fullmatch(r"python:3\.11-slim-bookworm( AS \w+)?", steps[at][1]) for at in stages)
    last = dict(map(tuple, steps[stages[1] :]))
    assert last["USER"] not in ("root", "0")
    assert "/health" in last["HEALTHCHECK"]
    assert {name for name, _ in steps} <= {
        "FROM", "RUN", "COPY", "WORKDIR", "ENV", "USER", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD",
    }  # fmt: skip
    for name, text in steps:
        if name == "RUN" and "apt-get install" in text:
            assert "--no-install-recommends" in text
            assert "rm -rf /var/lib/apt/lists" in text
        if name == "RUN" and "pip install" in text:
            assert "--no-cache-dir" in text
        if name == "COPY" and "--from" not in text:
            assert all((ROOT / source).exists() for source in text.split()[:-1])
