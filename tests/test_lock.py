"""requirements.lock has an exact version, with hashes, of every package that serving needs."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
LOCK = (ROOT / "requirements.lock").read_text()
LOCKED = {
    canonicalize_name(name): (version, re.findall(r"--hash=sha256:[0-9a-f]{64}", rest))
    for name, version, rest in re.findall(r"^([\w.-]+)==(\S+)((?: \\\n    --hash=\S+)*)", LOCK, re.MULTILINE)
}
ASKED = [Requirement(text) for text in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]]


@pytest.mark.parametrize("asked", [asked for asked in ASKED if asked.name != "torch"], ids=lambda asked: asked.name)
def test_what_is_asked_for_is_locked(asked: Requirement) -> None:
    version, _ = LOCKED[canonicalize_name(asked.name)]
    assert asked.specifier.contains(version)


def test_each_line_has_hashes_and_no_place_to_fetch_from() -> None:
    assert len(LOCKED) == len(re.findall("^[^#\\s]", LOCK, re.MULTILINE))
    assert all(hashes for _, hashes in LOCKED.values())
    assert "://" not in LOCK
    assert "torch" not in LOCKED


def test_what_locked_packages_ask_for_is_locked_too() -> None:
    """Checks the packages that are installed in their locked version. In CI these are all packages of the lock."""
    waiting = [(asked.name, extra) for asked in ASKED if asked.name != "torch" for extra in ("", *asked.extras)]
    seen = set(waiting)
    while waiting:
        name, extra = waiting.pop()
        found, (version, _) = distribution(name), LOCKED[canonicalize_name(name)]
        if found.version != version:
            continue
        for asked in map(Requirement, found.requires or ()):
            if asked.marker is not None and not asked.marker.evaluate({"extra": extra}):
                continue
            assert canonicalize_name(asked.name) in LOCKED, f"{name} {version} asks for {asked}"
            assert asked.specifier.contains(LOCKED[canonicalize_name(asked.name)][0], prereleases=True), (name, asked)
            new = {(asked.name, further) for further in ("", *asked.extras)} - seen
            seen |= new
            waiting += new
    assert len(seen) > 2 * len(ASKED), "too few packages are installed in their locked version"
