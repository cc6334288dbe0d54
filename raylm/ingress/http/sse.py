"""Server-sent events: the constant part of a stream's chunks is built once, a token's text is spliced into it."""

from __future__ import annotations

from typing import Any

import orjson

from raylm.ingress.http.answer import pieces_as_list

DONE = b"data: [DONE]\n\n"
WAITING = b": waiting\n\n"  # a comment, which clients leave out


def named_event(event: dict[str, Any]) -> bytes:
    """An event whose name is its ``type``, as Anthropic's clients and those of OpenAI's responses read them."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event))


class ChunkTemplate:
    """Makes the chunks of one stream, each a whole event.

    ``head`` holds the fields that all chunks share (id, object, created, model). ``text_key`` is where a choice keeps
    its new text: "delta.content" for chat, "text" for completions. With ``null_usage`` each chunk carries
    ``"usage": null``, as OpenAI's do when a last chunk with the usage is to follow.
    """

    def __init__(self, head: dict[str, Any], text_key: str, *, null_usage: bool) -> None:
        self._head = b"data: " + orjson.dumps(head)[:-1] + b',"choices":'
        self._usage = b',"usage":null' if null_usage else b""
        *outer, last = text_key.split(".")
        opening = "".join(f'"{key}":{{' for key in outer) + f'"{last}":'
        self._opening = opening.encode()
        self._suffix = b"}" * len(outer) + b',"logprobs":null,"finish_reason":null}]' + self._usage + b"}\n\n"
        self._prefixes: dict[int, bytes] = {}

    def text(self, index: int, text: str) -> bytes:
        """The chunk of new text and nothing else: the hot path."""
        prefix = self._prefixes.get(index)
        if prefix is None:
            prefix = self._prefixes[index] = self._head + b'[{"index":%d,' % index + self._opening
        return prefix + orjson.dumps(text) + self._suffix

    def choices(
        self,
        choices: list[dict[str, Any]],
        usage: dict[str, Any] | None = None,
        on_top: dict[str, Any] | None = None,
    ) -> bytes:
        """A chunk of any shape; ``usage`` and the fields ``on_top`` if this chunk is to carry them."""
        tail = self._usage if usage is None else b',"usage":' + orjson.dumps(usage)
        if on_top:
            tail += b"," + orjson.dumps(on_top)[1:-1]
        return self._head + orjson.dumps(choices, default=pieces_as_list) + tail + b"}\n\n"
