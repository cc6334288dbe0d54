"""`raylm chat`: turns from a pipe, and a terminal with commands, an interrupted answer and hostile text."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raylm.cli.conversation import COMMANDS, ChatState
from raylm.cli.main import app
from raylm.client import ServerError, clean
from raylm.errors import ConfigError
from tests.openai_server import OpenAIServer


def run(*words: str, lines: str, status: int = 0) -> str:
    found = CliRunner().invoke(app, ["chat", *words], input=lines)
    assert found.exit_code == status, found.output
    return found.output


def test_each_line_of_a_pipe_is_a_turn_behind_those_before() -> None:
    with OpenAIServer(answer="yes ") as server:
        server.thoughts = "let me see"
        said = run(server.url, "--system", "Be short.", "--max-tokens", "2", lines="one\n\n//two\n")
    assert said == "yes yes \nyes yes \n"  # plain, without reasoning
    roles = [message["role"] for message in server.bodies[1]["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    assert server.bodies[1]["messages"][-1]["content"] == "/two"
    assert (server.bodies[0]["model"], server.bodies[0]["max_tokens"]) == ("fake", 2)


def test_commands_change_what_is_asked(tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    lines = f"/set temperature 0.2\n/system Be kind.\nhello\n/retry\n/save {file}\n/clear\nagain\n/quit\nnever\n"
    with OpenAIServer() as server:
        run(server.url, lines=lines)
    first, retried, cleared = server.bodies
    assert first == retried
    assert (first["temperature"], first["messages"][0]["content"]) == (0.2, "Be kind.")
    assert [message["content"] for message in cleared["messages"]] == ["Be kind.", "again"]
    saved = json.loads(file.read_text())
    assert [message["role"] for message in saved["messages"]] == ["system", "user", "assistant"]


def test_what_fails_is_named_and_ends_a_pipe() -> None:
    with OpenAIServer(429, key="sesame") as server:
        assert "a wrong key (--api-key" in run(server.url, lines="hello\n", status=1)
        assert "429 refused with 429" in run(server.url, "--api-key", "sesame", lines="hello\nmore\n", status=1)
        assert len(server.bodies) == 1
        assert "there is no /nothing; /help" in run(server.url, lines="/nothing\n", status=2)
    assert "`raylm serve embedded` starts one" in run("127.0.0.1:1", lines="hello\n", status=1)


def test_a_question_that_failed_can_be_asked_again() -> None:
    talk = ChatState("m")
    talk.asks("first")
    talk.answers("answer")
    talk.asks("second")
    talk.answers("")
    assert [message["content"] for message in talk.messages] == ["first", "answer"]
    assert talk.command("/retry").ask
    assert [message["content"] for message in talk.messages] == ["first", "answer", "second"]
    talk.answers("at last")
    talk.command("/retry")
    assert [message["content"] for message in talk.messages] == ["first", "answer", "second"]


@pytest.mark.parametrize(
    "line",
    [
        "/retry",
        "/save",
        "/save /no/such/folder/file",
        "/save ~nobody-of-this-name/file",
        "/set stream false",
        "/set n 2",
        "/nothing",
    ],
)
def test_a_command_that_cannot_be_done_says_so(line: str) -> None:
    with pytest.raises(ConfigError, match=line.split()[0]):
        ChatState("m").command(line)


def test_calls_are_shown_and_leave_no_empty_turn() -> None:
    with OpenAIServer(answer="") as server:
        server.arguments = '{"q": 1}'
        assert run(server.url, lines="one\ntwo\n") == 'find({"q": 1})\n' * 2
        server.answer = "so "
        server.arguments = '{"q": 2}'
        assert run(server.url, "--max-tokens", "1", lines="three\nfour\n") == 'so \nfind({"q": 2})\n' * 2
    said = [[message["content"] for message in body["messages"]] for body in server.bodies]
    assert said == [["one"], ["two"], ["three"], ["three", "so ", "four"]]


def test_white_space_is_no_answer() -> None:
    talk = ChatState("m")
    talk.asks("first")
    talk.answers(" \n")
    assert talk.messages == []
    assert talk.command("/retry").ask


@pytest.mark.parametrize("locale", ["C.UTF-8", "C"])
def test_a_line_that_is_no_text_is_refused(locale: str) -> None:
    with OpenAIServer(answer="yes ") as server:
        command = [sys.executable, "-m", "raylm.cli.main", "chat", server.url, "--max-tokens", "2"]
        environment = os.environ | {"LC_ALL": locale, "PYTHONIOENCODING": ""}
        done = subprocess.run(
            command, input="é\n".encode() + b"caf\xe9\n", capture_output=True, timeout=300, check=False, env=environment
        )
    assert (done.returncode, done.stdout, done.stderr) == (2, b"yes yes \n", b"raylm: the line is not valid UTF-8.\n")
    assert [body["messages"][-1]["content"] for body in server.bodies] == ["é"]


def test_one_choice_may_be_set() -> None:
    talk = ChatState("m")
    talk.command("/set n 1")
    assert talk.body()["n"] == 1


def test_help_has_every_command() -> None:
    text = ChatState("m").command("/help").text
    assert [line.split()[0] for line in text.splitlines()] == list(COMMANDS)


def test_a_model_cannot_control_the_terminal() -> None:
    assert clean("a\x1b[2Jb\x9b1mc\r\nd\te\x07") == "a�[2Jb�1mc\nd\te�"
    assert ServerError("400", "\x1b]0;pwned\x07").message == str(ServerError("400", "\x1b]0;pwned\x07")) == "�]0;pwned�"


def test_lines_of_a_pipe_may_end_as_on_windows() -> None:
    with OpenAIServer(answer="yes ") as server:
        command = [sys.executable, "-m", "raylm.cli.main", "chat", server.url, "--max-tokens", "2"]
        done = subprocess.run(command, input=b"one\r\n/quit\r\n", capture_output=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, b"yes yes \n"), done.stderr
    assert server.bodies[0]["messages"][-1]["content"] == "one"


class Terminal:
    """The command on a new terminal."""

    def __init__(self, folder: Path, *words: str) -> None:
        self._screen, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "raylm.cli.main", "chat", *words],
            stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # make it the controlling terminal
            env=os.environ | {"XDG_STATE_HOME": str(folder), "TERM": "xterm", "COLUMNS": "100"},
        )  # fmt: skip
        os.close(theirs)
        self.said = ""

    def enter(self, text: str) -> None:
        os.write(self._screen, text.encode())

    def until(self, text: str) -> str:
        """Wait for ``text``. Returns the output before it."""
        deadline = time.monotonic() + 300
        while text not in self.said:
            assert time.monotonic() < deadline, self.said
            if select.select([self._screen], [], [], 0.1)[0]:
                self.said += os.read(self._screen, 65536).decode(errors="replace")
        before, _, self.said = self.said.partition(text)
        return before

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._screen)


def test_in_a_terminal_ctrl_c_stops_the_answer_and_not_the_program(tmp_path: Path) -> None:
    with OpenAIServer(answer="evil\x1b[2J ", pause_s=0.05) as server:
        server.thoughts = "well"
        terminal = Terminal(tmp_path, server.url)
        try:
            terminal.until("> ")
            terminal.enter("/set max_tokens 2\r")
            terminal.until("max_tokens is 2")
            terminal.enter("hello\r")
            shown = terminal.until("2 tokens")
            assert "evil\ufffd[2J evil\ufffd[2J " in shown
            assert "well" in shown
            terminal.enter("/set max_tokens 1000\r")
            terminal.until("max_tokens is 1000")
            terminal.enter("a long one\r")
            terminal.until("evil")
            terminal.enter("\x03")
            terminal.until("stopped; /retry asks again")
            terminal.enter("/set max_tokens 1\r")
            terminal.until("max_tokens is 1")
            terminal.enter("more\r")
            terminal.until("1 tokens")
            terminal.until("> ")  # before the prompt, the terminal itself would handle Ctrl-D
            terminal.enter("\x04")
            assert terminal.process.wait(300) == 0
        finally:
            terminal.close()
        assert server.left == 1
        kept = server.bodies[2]["messages"]
        assert [message["role"] for message in kept] == ["user", "assistant", "user", "assistant", "user"]
        assert kept[3]["content"].startswith("evil")
    assert "a long one" in (tmp_path / "raylm" / "chat_history").read_text()
