"""Synthetic conversations of a coding agent about the files of this repository: prompts and answers.

A turn is a read (a JSON call whose result is a part of a file), a quotation of the read text, an edit (a JSON call with
the old and the new text), or a remark whose text is in no prompt. The prompt of a turn contains all earlier turns. The
same seed gives the same conversations.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SYSTEM = "You are a coding agent. Answer with a call of read_file or edit_file in JSON, or with text.\n"
_LINES = 24  # lines of a file in the result of a call


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
