"""``make pictures``: what `raylm chat`, `raylm bench` and `raylm doctor` show, as SVG files below docs/pictures/."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tests.embedded_server import EmbeddedServer

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "pictures"
MOST_BYTES = 100_000
WIDTH = 104
_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)  # the browser would fetch these fonts from another site
_OTHER_THAN_COLOUR = re.compile(r"\x1b\[\??[0-9;]*[A-Za-ln-z]|\x1b\][^\x07]*\x07|\x07")
LIMIT_S = 300


def shown(words: list[str], *entered: tuple[str, str], status: int = 0) -> str:
    """The output of a command on a terminal. Each of ``entered`` is (text to wait for, text to type then)."""
    screen, theirs = pty.openpty()
    environ = os.environ | {"TERM": "xterm-256color", "COLUMNS": str(WIDTH), "COLORTERM": "truecolor"}
    process = subprocess.Popen(
        [sys.executable, "-m", "raylm.cli.main", *words], stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL,
        env=environ,
    )  # fmt: skip
    os.close(theirs)
    said, seen, todo, deadline = b"", 0, list(entered), time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if select.select([screen], [], [], 0.1)[0]:
            try:
                said += os.read(screen, 65536)
            except OSError:  # the terminal's other side was closed
                break
        if todo and todo[0][0].encode() in said[seen:]:
            seen, text = len(said), todo.pop(0)[1]
            time.sleep(0.3)
            os.write(screen, text.encode())
    assert process.wait(300) == status, said.decode()
    os.close(screen)
    return _OTHER_THAN_COLOUR.sub("", said.decode()).replace("\r", "")


def save(name: str, command: str, text: str) -> None:
    """Write one picture: the command line and its output."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text(f"$ {command}", style="bold"))
    console.print(Text.from_ansi(text.rstrip()))
    path = FOLDER / f"command-{name}.svg"
    path.write_text(_FONTS.sub("", console.export_svg(title=command.split(" http")[0])))
    size = path.stat().st_size
    print(f"{path.name}: {size:,} bytes")
    assert size <= MOST_BYTES


def main() -> None:
    with EmbeddedServer() as url:
        chat = shown(
            ["chat", url], ("> ", "What is a KV cache?\r"), ("a second", "/set temperature 0.2\r"),
            ("temperature is", "What does the scheduler do?\r"), ("a second", "/retry\r"), ("a second", "\x04"),
        )  # fmt: skip
        save("chat", "raylm chat", chat.replace(url, "http://127.0.0.1:8000"))
        words = ["--rate", "2,8", "--requests", "40", "--prefix-tokens", "256", "--prefixes", "4"]
        save("bench", " ".join(["raylm bench", *words]), shown(["bench", url, *words]))
        found = shown(["doctor", "--port", url.rpartition(":")[2]], status=1)  # this process holds the port
        for ours, shorter in ((str(ROOT), "/srv"), (sys.prefix, "/srv/.venv"), (url.rpartition(":")[2], "8000")):
            found = found.replace(ours, shorter)
        save("doctor", "raylm doctor", found)


if __name__ == "__main__":
    main()
