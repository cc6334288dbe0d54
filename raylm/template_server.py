"""The template server: a fork server whose children render chat templates. A child can be ended while it renders.

``python -m raylm.template_server FD`` starts it. A child writes a byte when it is ready, and then answers jobs one
after another until its connection is closed. A job is a pair of a name and its arguments in Python's ``marshal``
format; both sides use the same Python. Jinja's sandbox allows a template only to read its data. The limits of the child
bound the memory of a template. The other side bounds its time.
"""

from __future__ import annotations

import marshal
import resource
import socket
import sys
from collections.abc import Callable
from typing import Any

from jinja2 import TemplateError
from transformers.utils import chat_template_utils

from raylm.fork_server import die_with, frame, outlive, read_frame, serve, take_signals

READY = b"\0"
MAX_CHARS = 16 * 2**20
"""Limit of a rendered text: four times the longest prompt."""
_SHOWN_CHARS = 300
_MAX_RSS_KIB = 256 * 1024  # a child that used more ends after its answer, to free the memory

Answer = tuple[str | None, str | None]  # (text, or None; what is wrong, or None)


def render(template: str, conversation: list[dict[str, Any]], fields: dict[str, Any]) -> Answer:
    """Render one conversation."""
    try:
        rendered, _ = chat_template_utils.render_jinja_template([conversation], chat_template=template, **fields)
        text = str(rendered[0])
    except TemplateError as error:
        shown = str(error.message or type(error).__name__)[:_SHOWN_CHARS]
        return None, f"The chat template refused the messages: {shown}"
    except Exception as error:
        return None, f"The chat template could not render the messages ({type(error).__name__})."
    if len(text) > MAX_CHARS:
        return None, f"The rendered messages have more than {MAX_CHARS} characters."
    return text, None


def check(template: str) -> Answer:
    """Compile a template. The second value says what is wrong with it."""
    try:
        chat_template_utils._compile_jinja_template(template)
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"[:_SHOWN_CHARS]
    return "", None


JOBS: dict[str, Callable[..., Answer]] = {"render": render, "check": check}


def live(connection: socket.socket) -> None:
    """Run a child."""
    connection.sendall(READY)
    while (body := read_frame(connection)) is not None:
        die_with(connection)
        name, arguments = marshal.loads(body)
        answer = frame(marshal.dumps(JOBS[name](*arguments)))
        outlive(connection)
        connection.sendall(answer)
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > _MAX_RSS_KIB:
            return


if __name__ == "__main__":
    take_signals()
    serve(int(sys.argv[1]), live)
