"""`raylm chat`: a conversation with any OpenAI-compatible server, in the terminal or turn by turn from a pipe."""

from __future__ import annotations

import asyncio
import io
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raylm.errors import ConfigError
from raylm.folders import user_folder

if TYPE_CHECKING:
    from rich.console import Console

    from raylm.cli.conversation import ChatState
    from raylm.client import Answer, Connection, ServerError

KEY_VARIABLE = "OPENAI_API_KEY"
_HISTORY = 1000
_PROMPT = "> "


def chat(
    target: Annotated[
        str | None,
        typer.Argument(metavar="[URL|MODEL]", help="A server's address, or a model of http://127.0.0.1:8000."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="By default the first one that the server lists.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar=KEY_VARIABLE, help="Sent with each request.")] = None,
    system: Annotated[str, typer.Option(help="The system prompt.")] = "",
    temperature: Annotated[float | None, typer.Option(help="As /set temperature does.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="As /set max_tokens does.")] = None,
) -> None:
    """Chat with any OpenAI-compatible server. Ctrl-C stops an answer, Ctrl-D ends; in a pipe each line is a turn.

    For example: raylm chat http://localhost:8000 --system "Answer in one sentence."
    """
    from rich.console import Console

    from raylm.cli.conversation import ChatState, valid
    from raylm.client import ServerError, is_address

    given = {"temperature": temperature, "max_tokens": max_tokens}
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # lines with such bytes are refused
    if sys.stdin.isatty():  # a shell that starts this process in the background ignores SIGINT for it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with asyncio.Runner() as runner:
        try:
            is_url = target is not None and is_address(target)
            if target is not None and not is_url and model is not None:
                raise ConfigError(f"--model: the model is {target!r} already.")
            connection = runner.run(_connect(target if is_url else None, api_key))
            try:
                named = model or (None if is_url else target) or runner.run(connection.first_model())
                kept = {name: value for name, value in given.items() if value is not None}
                talk = ChatState(named, valid("--system", system), kept)
                if sys.stdin.isatty():
                    status = ChatSession(runner, connection, talk, Console(highlight=False)).run()
                else:
                    status = _piped(runner, connection, talk)
            finally:
                runner.run(connection.__aexit__(None, None, None))
        except ConfigError as error:
            print(f"raylm: {error.message}", file=sys.stderr)
            status = 2
        except ServerError as error:
            print(f"raylm: {no_server(error)}", file=sys.stderr)
            status = 1
        except KeyboardInterrupt:
            status = 130
    raise typer.Exit(status)


def no_server(error: ServerError) -> str:
    """The error of a server, and a remedy if there is a known one."""
    if error.kind == "connection":
        return f"{error.message}; `raylm serve embedded` starts one."
    if error.kind in ("401", "403"):
        return f"{error.message} (--api-key, or {KEY_VARIABLE})"
    return error.message


def speed(answer: Answer) -> str:
    """Text with tokens, time to the first token, and tokens per second after it, as far as they are known."""
    parts = [f"{answer.tokens:,} tokens"] if answer.tokens else []
    if answer.chunks:
        parts.append(f"the first after {answer.ttft:.2f} s")
    if answer.tokens > 1 and answer.last > answer.ttft:
        parts.append(f"{1 / answer.itl:,.1f} a second")
    if answer.finish not in ("", "stop"):
        parts.append({"length": "cut off at max_tokens"}.get(answer.finish, answer.finish))
    return ", ".join(parts)


async def _connect(url: str | None, key: str | None) -> Connection:
    from raylm.client import Connection

    return Connection(url, key) if url is not None else Connection(key=key)


class _Writer:
    """Writes the parts of one answer as they arrive. Reasoning is dimmed in a terminal and left out in a pipe."""

    def __init__(self, screen: Console | None) -> None:
        self._screen, self._thinking = screen, False
        self.text = ""

    def write(self, text: str, thoughts: str) -> None:
        from raylm.client import clean

        if thoughts and self._screen is not None:
            self._thinking = True
            self._screen.out(clean(thoughts), style="dim italic", end="")
        if text:
            if self._thinking and self._screen is not None:
                self._screen.out("\n")
                self._thinking = False
            self.text += text
            if self._screen is None:
                print(clean(text), end="", flush=True)
            else:
                self._screen.out(clean(text), end="")


async def _answer(connection: Connection, talk: ChatState, screen: Console | None) -> Answer:
    """Request the next answer and write it as it arrives; calls of tools are written at its end.

    A partial answer is kept if the stream ends early.
    """
    import time

    from raylm.client import Answer, delta_of

    writer, answer = _Writer(screen), Answer(sent=time.perf_counter())
    try:
        async for event in connection.stream("/v1/chat/completions", talk.body()):
            answer.take(event)
            delta = delta_of(event)
            writer.write(delta.text, delta.thoughts)
    finally:
        talk.answers(writer.text)
        for place, arguments in sorted(answer.calls.items()):
            writer.write(f"{chr(10) if writer.text else ''}{answer.functions[place]}({arguments})", "")
        if answer.chunks:
            print(flush=True)
    return answer


def _piped(runner: asyncio.Runner, connection: Connection, talk: ChatState) -> int:
    """Answer each line of stdin as a turn, on stdout. The first failure ends the command with status 1."""
    for line in sys.stdin:
        text = line.rstrip("\r\n")
        if text.startswith("/") and not text.startswith("//"):
            reply = talk.command(text)
            if reply.quit:
                break
            if not reply.ask:
                continue
        elif text.strip():
            talk.asks(text.removeprefix("/") if text.startswith("//") else text)
        else:
            continue
        runner.run(_answer(connection, talk, None))
    return 0


class ChatSession:
    """Reads lines with editing and history, and answers them until the end."""

    def __init__(self, runner: asyncio.Runner, connection: Connection, talk: ChatState, screen: Console) -> None:
        self._runner, self._connection, self._talk, self._screen = runner, connection, talk, screen

    def run(self) -> int:
        """Run until Ctrl-D or /quit. Returns the exit status."""
        self._say(f"{self._talk.model} at {self._connection.url}   (/help, Ctrl-D ends)")
        for text in self._lines():
            try:
                if text.startswith("/") and not text.startswith("//"):
                    reply = self._talk.command(text)
                    if reply.quit:
                        break
                    if reply.text:
                        self._say(reply.text)
                    if not reply.ask:
                        continue
                else:
                    self._talk.asks(text.removeprefix("/") if text.startswith("//") else text)
                self._ask()
            except ConfigError as error:
                self._complain(error.message)
        return 0

    def _ask(self) -> None:
        from raylm.client import ServerError

        try:
            self._say(speed(self._runner.run(_answer(self._connection, self._talk, self._screen))))
        except KeyboardInterrupt:
            self._say("stopped; /retry asks again")
        except ServerError as error:
            self._complain(no_server(error))

    def _lines(self) -> Iterator[str]:
        """Yield the entered turns without empty ones. A line that ends in a backslash continues in the next line."""
        history = _read_history()
        begun = ""
        while True:
            try:
                line = input(". " if begun else _PROMPT)
            except KeyboardInterrupt:
                begun = ""
                print()
                continue
            except EOFError:
                print()
                break
            if line.endswith("\\"):
                begun += line[:-1] + "\n"
                continue
            text, begun = (begun + line).strip(), ""
            if text:
                yield text
        _write_history(history)

    def _say(self, text: str) -> None:
        from raylm.client import clean

        if text:
            self._screen.out(clean(text), style="dim")

    def _complain(self, text: str) -> None:
        from raylm.client import clean

        self._screen.out(clean(text), style="red")


def _read_history() -> Path | None:
    """Set up line editing, completion of commands, and the history."""
    from raylm.cli.conversation import COMMANDS

    try:
        import readline
    except ImportError:  # without readline, plain lines are read
        return None
    names = list(COMMANDS)

    def complete(text: str, state: int) -> str | None:
        found: list[Any] = [name for name in names if name.startswith(text)] if text.startswith("/") else []
        return found[state] if state < len(found) else None

    readline.set_completer(complete)
    readline.set_completer_delims(" ")
    readline.parse_and_bind("tab: complete")
    try:
        path = user_folder("XDG_STATE_HOME", "~/.local/state") / "chat_history"
    except ConfigError:
        return None
    with suppress(OSError):
        readline.read_history_file(path)
    return path


def _write_history(path: Path | None) -> None:
    """Write the history, readable only by its owner. If it cannot be written, the next start has no history."""
    if path is None:
        return
    import readline

    readline.set_history_length(_HISTORY)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        readline.write_history_file(path)
