"""Conversation: the state of `raylm chat` between turns, and the commands that change it. Uses no terminal."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from raylm.errors import ConfigError
from raylm.folders import in_home


def valid(what: str, text: str) -> str:
    """Return a text that a request can hold. ConfigError if it has bytes that are no characters of the terminal."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{what} is not valid UTF-8.") from None
    return text


@dataclass(frozen=True)
class Reply:
    """The result of a command: a line to show, a repetition of the last question, or the end of the chat."""

    text: str = ""
    ask: bool = False
    quit: bool = False


@dataclass
class ChatState:
    """Owns the messages, the system prompt and the other fields of each request."""

    model: str
    system: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)
    question: str = ""  # the last question, answered or not
    answered: bool = False

    def body(self) -> dict[str, Any]:
        """The request for the next answer, streamed."""
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": self.model, "messages": self.all_messages()} | self.fields | streamed

    def all_messages(self) -> list[dict[str, str]]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.messages]

    def asks(self, text: str) -> None:
        self.question, self.answered = valid("the line", text), False
        self.messages.append({"role": "user", "content": text})

    def answers(self, text: str) -> None:
        """Add a complete or stopped answer. If it has no text but white space, its question is removed."""
        self.answered = bool(text.strip())
        if self.answered:
            self.messages.append({"role": "assistant", "content": text})
        else:
            self.messages.pop()

    def command(self, line: str) -> Reply:
        """Run a command, a line that begins with a slash. ConfigError if it fails."""
        name, _, rest = valid("the line", line).partition(" ")
        if name not in COMMANDS:
            raise ConfigError(f"there is no {name}; /help lists the commands, and // begins a text with a slash.")
        return COMMANDS[name][0](self, rest.strip())

    def _help(self, rest: str) -> Reply:
        width = max(len(usage) for _, usage, _ in COMMANDS.values())
        return Reply("\n".join(f"{usage:{width}}  {what}" for _, usage, what in COMMANDS.values()))

    def _system(self, rest: str) -> Reply:
        self.system = rest
        return Reply("the system prompt is set" if rest else "there is no system prompt")

    def _set(self, rest: str) -> Reply:
        name, _, text = rest.partition(" ")
        if not name:
            return Reply(
                "\n".join(f"{name} {json.dumps(value)}" for name, value in self.fields.items()) or "none is set"
            )
        if name in ("messages", "stream", "stream_options"):
            raise ConfigError(f"/set {name}: the chat sets this field itself.")
        if not text:
            self.fields.pop(name, None)
            return Reply(f"{name} is the server's default")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        if name == "n" and value != 1:
            raise ConfigError("/set n: the chat shows one answer, so it must be 1.")
        self.fields[name] = value
        return Reply(f"{name} is {json.dumps(self.fields[name])}")

    def _clear(self, rest: str) -> Reply:
        self.messages.clear()
        self.question, self.answered = "", False
        return Reply("a new conversation" + (", the system prompt stays" if self.system else ""))

    def _retry(self, rest: str) -> Reply:
        if not self.question:
            raise ConfigError("/retry: there is no question yet.")
        if self.answered:
            del self.messages[-2:]
        self.asks(self.question)
        return Reply(ask=True)

    def _save(self, rest: str) -> Reply:
        """Save the conversation as a request that can be sent again, or as Markdown."""
        if not rest:
            raise ConfigError("/save needs a file, such as chat.json or chat.md.")
        path = in_home(rest, "/save")
        if path.suffix == ".md":
            text = "\n\n".join(f"**{message['role']}**\n\n{message['content']}" for message in self.all_messages())
        else:
            request = {"model": self.model, "messages": self.all_messages()} | self.fields
            text = json.dumps(request, indent=1, ensure_ascii=False)
        try:
            path.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"/save {rest}: {error.strerror}.") from None
        return Reply(f"{len(self.messages)} messages are in {path}")

    def _quit(self, rest: str) -> Reply:
        return Reply(quit=True)


# By name: the method, the usage, the purpose.
COMMANDS: dict[str, tuple[Callable[[ChatState, str], Reply], str, str]] = {
    "/system": (ChatState._system, "/system TEXT", "set the system prompt; without TEXT there is none"),
    "/set": (ChatState._set, "/set NAME VALUE", "a field of each request, as temperature 0.2; alone it lists them"),
    "/clear": (ChatState._clear, "/clear", "begin a new conversation"),
    "/retry": (ChatState._retry, "/retry", "ask the last question again"),
    "/save": (ChatState._save, "/save FILE", "write the conversation: a request as JSON, or text into a .md"),
    "/help": (ChatState._help, "/help", "this list"),
    "/quit": (ChatState._quit, "/quit", "end, as Ctrl-D does"),
}
