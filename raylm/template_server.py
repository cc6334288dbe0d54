"""The template server: a process whose children render chat templates, and may be ended in the middle of it.

``python -m raylm.template_server FD`` is a fork server. A child writes a byte when it is ready, and then answers jobs
one after the other until its connection is closed. A job is a pair of a name and its arguments in Python's ``marshal``;
both sides are the same Python. The sandbox of Jinja keeps a template from everything but its data. The limits of the
child bound the memory that a template takes, and the other side bounds the time.
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
"""Of a rendered text: four times the longest prompt."""
_SHOWN_CHARS = 300
_MAX_RSS_KIB = 256 * 1024  # a child that took more ends after its answer, and gives the memory back

Answer = tuple[str | None, str | None]  # the text, or what is wrong


def render(template: str, conversation: list[dict[str, Any]], fields: dict[str, Any]) -> Answer:
    """The text of one conversation."""
    try:
        rendered, _ = chat_template_utils.render_jinja_template([conversation], chat_template=template, **fields)
        text = str(rendered[0])
    except TemplateError as error:
        shown = str(error.message or type(error).__name__)[:_SHOWN_CHARS]
        return None, f"The chat template refused the messages: {shown}"
    except Exception as error:
        return None, f"The chat template could not render the messages ({type(error).__name__})."
    if len(text) > MAX_CHARS:
        return None, f"The chat template makes more than {MAX_CHARS} characters of the messages."
    return text, None


def check(template: str) -> Answer:
    """What is wrong with a template that cannot be compiled."""
    try:
        chat_template_utils._compile_jinja_template(template)
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"[:_SHOWN_CHARS]
    return "", None


JOBS: dict[str, Callable[..., Answer]] = {"render": render, "check": check}


def live(connection: socket.socket) -> None:
    """The life of a child."""
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
