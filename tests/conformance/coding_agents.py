"""What Codex and Claude Code do, headless, against an ingress over a ScriptedEngine: tasks with their own tools.

They have the settings of docs/agents.md.

    python -m tests.conformance.coding_agents URL

Each task begins in a folder of its own, and ends with the files and the last message that it asks for.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.conformance.agents import JAVASCRIPT

_PAGE = Path(__file__).parents[2] / "docs" / "agents.md"
_TASK_S = 300  # an end of waiting alone
_SEED = "one\ntwo\n"
_PATCH = "*** Begin Patch\n*** Update File: seed.txt\n@@\n-two\n+2\n*** End Patch\n"
_MCP = """
import json, sys
from mcp.server import MCPServer
server = MCPServer("notes")
@server.tool()
def note(text: str) -> str:
    "Write a note."
    with open(sys.argv[1], "a") as file:
        file.write(text + "\\n")
    return "noted " + text
server.run("stdio")
"""
Turns = list[list[tuple[str, dict[str, Any]]]]


@dataclass(frozen=True)
class Task:
    """Calls, turn by turn, and the files that the folder then has. ``then`` is a second message of the session."""

    name: str
    turns: Turns
    files: dict[str, str] = field(default_factory=dict)
    then: Turns | None = None
    said: str = "Done."


def _run(command: list[str], folder: Path, env: dict[str, str]) -> str:
    found = subprocess.run(
        command, cwd=folder, env=os.environ | env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=_TASK_S, check=False,
    )  # fmt: skip
    assert found.returncode == 0, f"{command[0]} ended with {found.returncode}: {(found.stdout + found.stderr)[-1500:]}"
    return found.stdout


def _settings(language: str, url: str) -> str:
    """The page's block in this language, for this server."""
    (block,) = re.findall(rf"^```{language}\n(.*?)^```$", _PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return str(block).replace("http://localhost:8000", url)


def _play(turns: Turns) -> str:
    return f"PLAY {json.dumps(turns)}"


def _notes(folder: Path) -> list[str]:
    """The arguments of the MCP server, which writes into the task's folder."""
    return [str(folder.parent / "notes.py"), str(folder / "notes.txt")]


def _shell(command: str) -> tuple[str, dict[str, Any]]:
    return "exec_command", {"cmd": command}


CODEX = [
    Task("greeting", []),
    Task("read a file", [[_shell("cat seed.txt")]]),
    Task("run a command", [[_shell("wc -l < seed.txt > count.txt")]], {"count.txt": "2\n"}),
    Task("patch a file", [[_shell(f"apply_patch <<'EOF'\n{_PATCH}EOF")]], {"seed.txt": "one\n2\n"}),
    Task("write a file", [[_shell("printf 'a \"b\" ö\\n' > new.txt")]], {"new.txt": 'a "b" ö\n'}),
    Task("a command that fails", [[_shell("false")], [_shell("echo later > new.txt")]], {"new.txt": "later\n"}),
    Task("two calls at once", [[_shell("echo 1 > a.txt"), _shell("echo 2 > b.txt")]], {"a.txt": "1\n", "b.txt": "2\n"}),
    Task("many turns", [[_shell(f"echo {turn} >> log.txt")] for turn in range(6)], {"log.txt": "0\n1\n2\n3\n4\n5\n"}),
    Task("a second message", [[_shell("echo 1 > a.txt")]], {"a.txt": "1\n", "b.txt": "2\n"},
         [[_shell("echo 2 > b.txt")]]),
    Task("a tool of MCP, in a namespace", [[("mcp__notes__note", {"text": "once"})]], {"notes.txt": "once\n"}),
]  # fmt: skip


def codex(url: str) -> None:
    """Codex over the Responses API, with its reasoning sealed and nothing stored."""
    home = _settings("toml", url) + "request_max_retries = 0\nstream_max_retries = 0\n"
    home += f'[mcp_servers.notes]\ncommand = "{sys.executable}"\nrequired = true\n'
    program = str(JAVASCRIPT / "node_modules" / ".bin" / "codex")
    first = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]

    def run(folder: Path, task: Task) -> str:
        config = folder.parent / "home"
        config.mkdir()
        (config / "config.toml").write_text(home + f"args = {json.dumps(_notes(folder))}\n")
        env = {"CODEX_HOME": str(config), "RAYLM_API_KEY": "none"}
        last = folder.parent / "last"
        said = [*first, "--output-last-message", str(last)]
        _run([program, *said, _play(task.turns)], folder, env)
        if task.then is not None:
            _run([program, *said, "resume", "--last", _play(task.then)], folder, env)
        return last.read_text()

    _try(CODEX, run)


def _bash(command: str) -> tuple[str, dict[str, Any]]:
    return "Bash", {"command": command, "description": "Do it."}


def _file(name: str, **more: Any) -> dict[str, Any]:
    return {"file_path": f"FOLDER/{name}", **more}


CLAUDE = [
    Task("greeting", []),
    Task("read a file", [[("Read", _file("seed.txt"))]]),
    Task("run a command", [[_bash("wc -l < seed.txt > count.txt")]], {"count.txt": "2\n"}),
    Task("edit a file", [[("Read", _file("seed.txt"))],
                         [("Edit", _file("seed.txt", old_string="two", new_string="2"))]], {"seed.txt": "one\n2\n"}),
    Task("write a file", [[("Write", _file("new.txt", content='a "b" ö\n'))]], {"new.txt": 'a "b" ö\n'}),
    Task("a command that fails", [[_bash("false")], [_bash("echo later > new.txt")]], {"new.txt": "later\n"}),
    Task("two calls at once", [[_bash("echo 1 > a.txt"), _bash("echo 2 > b.txt")]], {"a.txt": "1\n", "b.txt": "2\n"}),
    Task("many turns", [[_bash(f"echo {turn} >> log.txt")] for turn in range(6)], {"log.txt": "0\n1\n2\n3\n4\n5\n"}),
    Task("a second message", [[_bash("echo 1 > a.txt")]], {"a.txt": "1\n", "b.txt": "2\n"},
         [[_bash("echo 2 > b.txt")]]),
    Task("a tool of MCP", [[("mcp__notes__note", {"text": "once"})]], {"notes.txt": "once\n"}),
]  # fmt: skip


def claude_code(url: str) -> None:
    """Claude Code over the Messages API."""
    program = str(JAVASCRIPT / "node_modules" / ".bin" / "claude")

    def run(folder: Path, task: Task) -> str:
        config = folder.parent / "home"
        config.mkdir()
        servers = {"notes": {"command": sys.executable, "args": _notes(folder)}}
        (folder.parent / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
        env = dict(re.findall(r"^export ([A-Z_]+)=(.*)$", _settings("sh", url), re.MULTILINE))
        env |= {"CLAUDE_CONFIG_DIR": str(config), "MCP_CONNECTION_NONBLOCKING": "0"}
        allowed = ["--allowedTools", "Bash,Read,Edit,Write,mcp__notes__note"]
        asked = [program, "--mcp-config", str(folder.parent / "mcp.json"), *allowed]
        said = _run([*asked, "-p", _play(task.turns).replace("FOLDER", str(folder))], folder, env)
        if task.then is not None:
            said = _run([*asked, "--continue", "-p", _play(task.then)], folder, env)
        return said

    _try(CLAUDE, run)


def _try(tasks: Iterable[Task], run: Any) -> None:
    for task in tasks:
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made).resolve() / "work"
            folder.mkdir()
            (folder / "seed.txt").write_text(_SEED)
            (folder.parent / "notes.py").write_text(_MCP)
            try:
                said = run(folder, task)
            except AssertionError as error:
                raise AssertionError(f"{task.name}: {error}") from error
            assert said.strip() == task.said, f"{task.name}: {said[-600:]}"
            for name, content in task.files.items():
                found = (folder / name).read_text() if (folder / name).exists() else None
                assert found == content, f"{task.name}: {name} is {found!r}"


def main() -> int:
    """Run both; 1 if one failed."""
    failed = False
    for agent in (codex, claude_code):
        try:
            agent(sys.argv[1])
            print(f"ok    javascript {agent.__name__}")
        except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
            failed = True
            print(f"FAIL  javascript {agent.__name__}: {str(error)[:2500]}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
