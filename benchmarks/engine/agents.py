"""Conversations of a coding agent with this repository's own files: what they ask, and what is answered.

A turn is one of a read (a call in JSON, whose result is a piece of a file), a quotation of what was read, an edit (a
call in JSON with the old and the new text), and a remark that stands in no prompt. The next turn's prompt has all turns
before. Same seed, same conversations.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SYSTEM = "You are a coding agent. Answer with a call of read_file or edit_file in JSON, or with text.\n"
_LINES = 24  # of a file that a call shows


def conversations(count: int, turns: int = 6, seed: int = 1) -> Iterator[list[tuple[str, str]]]:
    """(prompt, answer) of each turn of each conversation."""
    rng = random.Random(seed)
    files = sorted(path for path in (ROOT / "raylm").rglob("*.py") if len(path.read_text().splitlines()) > 2 * _LINES)
    remarks = re.findall(r'"""([^"]{80,400})"""', "".join(path.read_text() for path in files))
    for _ in range(count):
        yield list(_conversation(rng, rng.choice(files), remarks, turns))


def _conversation(rng: random.Random, path: Path, remarks: list[str], turns: int) -> Iterator[tuple[str, str]]:
    name, lines = str(path.relative_to(ROOT)), path.read_text().splitlines()
    begin = rng.randrange(len(lines) - _LINES)
    shown = "\n".join(lines[begin : begin + _LINES])
    text = f"{SYSTEM}user: Look at {name} from line {begin} on and make it better.\nassistant: "
    for turn in range(turns):
        kind = ("read", "quote", "edit", "remark")[turn % 4]
        if kind == "read":
            answer = _call("read_file", {"path": name, "first_line": begin, "num_lines": _LINES})
        elif kind == "quote":
            answer = f"These lines matter:\n```\n{shown[: rng.randrange(300, 700)]}\n```\n"
        elif kind == "edit":
            start = rng.randrange(0, len(shown) // 2)
            old = shown[start : start + 300]
            word = rng.choice(re.findall(r"\w{3,}", old) or ["x"])
            answer = _call("edit_file", {"path": name, "old": old, "new": old.replace(word, f"new_{word}")})
        else:
            answer = rng.choice(remarks)
        yield text, answer
        result = shown if kind == "read" else "ok"
        text += f"{answer}\ntool: {result}\nassistant: "


def _call(name: str, arguments: dict[str, object]) -> str:
    return json.dumps({"name": name, "arguments": arguments})
