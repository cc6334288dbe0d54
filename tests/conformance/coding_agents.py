"""Codex and Claude Code, headless, against an ingress with a ScriptedEngine: tasks with the agents' own tools.

They use the settings of docs/agents.md.

    python -m tests.conformance.coding_agents URL PLAYED
    python -m tests.conformance.coding_agents URL PLAYED codex "a plan"

PLAYED is the address of ``GET /played``. Each task starts in a new folder, and must end with its expected files and
last message. It runs twice. In the second run, the engine of each answer, or the ingress, is lost in the middle of the
answer, and the model must see the same conversation.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.conformance.agents import JAVASCRIPT
from tests.conformance.plays import CUT, SAY, WAIT

_PAGE = Path(__file__).parents[2] / "docs" / "agents.md"
_TASK_S = 300  # a limit for waiting only
_SEED = "one\ntwo\n"
_PATCH = "*** Begin Patch\n*** Update File: seed.txt\n@@\n-two\n+2\n*** End Patch\n"
# Values that differ from run to run: ids, times, and counts of tokens and seconds.
_MASKED = re.compile(
    r"Chunk ID: \w+|Wall time: [\d.]+|tool-results/\w+|\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"
    r'|"(?:\w+At|\w+Used\w*)":\d+|"completionBudgetReport":(?:null|"[^"]*")'
)
_MCP = """
import sys
from mcp.server import MCPServer
server = MCPServer("notes")
@server.tool()
def note(text: str) -> str:
    "Write a note."
    with open(sys.argv[1], "a") as file:
        file.write(text + "\\n")
    return "noted " + text
@server.tool()
def fail() -> str:
    "Fail."
    raise ValueError("It failed.")
server.run("stdio")
"""
_PATCHES = (
    "*** Begin Patch\n*** Add File: added.txt\n+new\n"
    "*** Update File: seed.txt\n*** Move to: moved.txt\n@@\n-two\n+2\n*** End Patch\n"
)
Turns = list[list[tuple[str, Any]]]
Run = Callable[[Path, "Task"], str]


@dataclass(frozen=True)
class Task:
    """Calls, turn by turn, and the folder's files at the end (None: the file does not exist).

    ``then`` is a second message of the session. The first message may be ``cancelled`` by the user while it waits. Or
    it ``fails``: Claude Code ends when its connection is cut in an answer, while Codex sends the request again.
    """

    name: str
    turns: Turns
    files: dict[str, str | None] = field(default_factory=dict)
    then: Turns | None = None
    said: str = "Done."
    cancelled: bool = False
    fails: bool = False


def _played(played: str, options: str = "") -> dict[str, Any]:
    with urllib.request.urlopen(f"{played}/played{options}") as answer:
        return dict(json.load(answer))


def _cancel(command: list[str], folder: Path, env: dict[str, str], played: str) -> None:
    """Interrupt a command while it waits for its model. Then the server must end the request."""
    process = subprocess.Popen(
        command, cwd=folder, env=os.environ | env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    until = time.monotonic() + _TASK_S
    try:
        _until(lambda: _played(played)["held"] > 0, until)
        process.send_signal(signal.SIGINT)
        process.wait(_TASK_S)
        _until(lambda: _played(played)["aborted"] > 0, until)
    finally:
        process.kill()
        process.wait()


def _until(holds: Callable[[], bool], end: float) -> None:
    while not holds():
        assert time.monotonic() < end, "the awaited state was not reached"
        time.sleep(0.05)


def _run(command: list[str], folder: Path, env: dict[str, str], *, fails: bool = False) -> str:
    found = subprocess.run(
        command, cwd=folder, env=os.environ | env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=_TASK_S, check=False,
    )  # fmt: skip
    assert bool(found.returncode) == fails, (
        f"{command[0]} ended with {found.returncode}: {(found.stdout + found.stderr)[-1500:]}"
    )
    return found.stdout


def _settings(language: str, url: str) -> str:
    """The page's code block in this language, with this server's address."""
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
    Task("a tool of MCP that fails", [[("mcp__notes__fail", {})], [("mcp__notes__note", {"text": "later"})]],
         {"notes.txt": "later\n"}),
    Task("a patch of three files", [[_shell(f"apply_patch <<'EOF'\n{_PATCHES}EOF")]],
         {"added.txt": "new\n", "seed.txt": None, "moved.txt": "one\n2\n"}),
    Task("a patch that does not fit", [[_shell(f"apply_patch <<'EOF'\n{_PATCH.replace('-two', '-six')}EOF")],
                                       [_shell(f"apply_patch <<'EOF'\n{_PATCH}EOF")]], {"seed.txt": "one\n2\n"}),
    Task("a plan", [[("create_goal", {"objective": "Write a file."})], [_shell("echo 1 > a.txt")],
                    [("update_goal", {"status": "complete"})]], {"a.txt": "1\n"}),
    Task("a question back", [[(SAY, "Which file?")]], {"a.txt": "1\n"}, [[_shell("echo 1 > a.txt")]]),
    Task("a tool that does not exist", [[("write_poem", {"lines": 4})], [_shell("echo 1 > a.txt")]], {"a.txt": "1\n"}),
    Task("arguments that do not fit", [[("exec_command", {"command": 4})], [_shell("echo 1 > a.txt")]],
         {"a.txt": "1\n"}),
    Task("a long output", [[_shell("seq 1 20000")], [_shell("echo 1 > a.txt")]], {"a.txt": "1\n"}),
    Task("a cancelled turn", [[_shell("echo 1 > a.txt")], [(WAIT, None)]], {"a.txt": "1\n", "b.txt": "2\n"},
         [[_shell("echo 2 > b.txt")]], cancelled=True),
    Task("a turn that is cut", [[_shell("echo 1 >> a.txt")],
                                [(CUT, None), (SAY, "I go on."), _shell("echo 2 >> a.txt")]], {"a.txt": "1\n2\n"}),
]  # fmt: skip


def codex(url: str, played: str, named: list[str]) -> None:
    """Codex with the Responses API, encrypted reasoning, and nothing stored."""
    home = _settings("toml", url) + "request_max_retries = 0\nstream_max_retries = 1\n"
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
        if task.cancelled:
            _cancel([program, *said, _play(task.turns)], folder, env, played)
        else:
            _run([program, *said, _play(task.turns)], folder, env)
        if task.then is not None:
            _run([program, *said, "resume", "--last", _play(task.then)], folder, env)
        return last.read_text()

    _try(CODEX, run, played, named)


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
    Task("a tool of MCP that fails", [[("mcp__notes__fail", {})], [("mcp__notes__note", {"text": "later"})]],
         {"notes.txt": "later\n"}),
    Task("edit every place", [[("Read", _file("seed.txt"))],
                              [("Edit", _file("seed.txt", old_string="o", new_string="0", replace_all=True))]],
         {"seed.txt": "0ne\ntw0\n"}),
    Task("an edit that does not fit", [[("Read", _file("seed.txt"))],
                                       [("Edit", _file("seed.txt", old_string="six", new_string="6"))],
                                       [("Edit", _file("seed.txt", old_string="two", new_string="2"))]],
         {"seed.txt": "one\n2\n"}),
    Task("read a part, and a file that is missing", [[("Read", _file("seed.txt", offset=2, limit=1))],
                                                     [("Read", _file("missing.txt"))]]),
    Task("a plan", [[("TaskCreate", {"subject": "Write", "description": "Write a file.", "activeForm": "Writing"})],
                    [_bash("echo 1 > a.txt")], [("TaskUpdate", {"taskId": "1", "status": "completed"})],
                    [("TaskList", {})]], {"a.txt": "1\n"}),
    Task("a question back", [[(SAY, "Which file?")]], {"a.txt": "1\n"}, [[_bash("echo 1 > a.txt")]]),
    Task("a tool that does not exist", [[("WritePoem", {"lines": 4})], [_bash("echo 1 > a.txt")]], {"a.txt": "1\n"}),
    Task("a long output", [[_bash("seq 1 20000")], [_bash("echo 1 > a.txt")]], {"a.txt": "1\n"}),
    Task("a cancelled turn", [[_bash("echo 1 > a.txt")], [(WAIT, None)]], {"a.txt": "1\n", "b.txt": "2\n"},
         [[_bash("echo 2 > b.txt")]], cancelled=True),
    Task("a turn that is cut", [[_bash("echo 1 >> a.txt")],
                                [(CUT, None), (SAY, "I go on."), _bash("echo lost >> a.txt")]],
         {"a.txt": "1\n2\n"}, [[_bash("echo 2 >> a.txt")]], fails=True),
]  # fmt: skip


def claude_code(url: str, played: str, named: list[str]) -> None:
    """Claude Code with the Messages API. It ends when its connection is cut, so its ingress is never lost."""
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
        first, said = [*asked, "-p", _play(task.turns).replace("FOLDER", str(folder))], ""
        if task.cancelled:
            _cancel(first, folder, env, played)
        else:
            said = _run(first, folder, env, fails=task.fails)
        if task.then is not None:
            said = _run([*asked, "--continue", "-p", _play(task.then)], folder, env)
        return said

    _try(CLAUDE, run, played, named, "&ingress=0")


def _try(tasks: Iterable[Task], run: Run, played: str, named: list[str], options: str = "") -> None:
    """Run tasks. Tasks with an answer that never comes, or with a cut connection, need a ScriptedEngine."""
    can_wait = "held" in _played(played)
    for task in tasks:
        if named and task.name not in named:
            continue
        words = {name for turn in task.turns for name, _ in turn}
        if not can_wait and words & {WAIT, CUT}:
            continue
        with tempfile.TemporaryDirectory() as made:
            place = Path(made).resolve() / "task"
            calm, lossy = (_seen(task, run, played, place, f"?lose={lose}{options}") for lose in (0, 1))
        assert calm == lossy, f"{task.name}: the conversations differ:\n{calm}\n{lossy}"
        print(f"ok    {task.name}: {len(calm)} turns", flush=True)


def _seen(task: Task, run: Run, played: str, place: Path, options: str) -> list[str]:
    """Run a task once. Returns what the model saw in each turn."""
    _played(played, options)
    folder = place / "work"
    folder.mkdir(parents=True)
    (folder / "seed.txt").write_text(_SEED)
    (place / "notes.py").write_text(_MCP)
    try:
        said = run(folder, task)
    except AssertionError as error:
        raise AssertionError(f"{task.name}: {error}") from error
    assert said.strip() == task.said, f"{task.name}: {said[-600:]}"
    for name, content in task.files.items():
        text = (folder / name).read_text() if (folder / name).exists() else None
        assert text == content, f"{task.name}: {name} is {text!r}"
    shutil.rmtree(place)
    found = _played(played)
    assert bool(found["lost"]) == ("lose=1" in options), f"{task.name}: {found['lost']} were lost"
    return [_MASKED.sub("", text) for text in found["seen"]]


def main() -> int:
    """Run all tasks of both agents, or of the named agent, or its named tasks. The exit status is 1 if one failed."""
    url, played, *named = sys.argv[1:]
    failed = False
    for agent in (codex, claude_code):
        if named and agent.__name__ != named[0]:
            continue
        try:
            agent(url, played, named[1:])
            print(f"ok    javascript {agent.__name__}")
        except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
            failed = True
            print(f"FAIL  javascript {agent.__name__}: {str(error)[:2500]}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
