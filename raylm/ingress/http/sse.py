"""Server-sent events. The constant part of a stream's chunks is encoded once; each token's text is inserted into it."""

from __future__ import annotations

from typing import Any

import orjson

from raylm.ingress.http.answer import pieces_as_list

DONE = b"data: [DONE]\n\n"
WAITING = b": waiting\n\n"  # a comment, which clients ignore


def named_event(event: dict[str, Any]) -> bytes:
    """An event whose name is its ``type``, as in Anthropic's API and OpenAI's Responses API."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event))


class ChunkTemplate:
    """Makes the chunks of one stream. Each chunk is a whole event.

    Args:
        head: The fields of all chunks (id, object, created, model).
        text_key: The field of a choice for new text: "delta.content" for chat, "text" for completions.
        null_usage: Whether each chunk has ``"usage": null``, as OpenAI's do if the last chunk has the usage.
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
        """A chunk that contains only new text. Most chunks are of this kind."""
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
        """A chunk with any choices, and optionally ``usage`` and the top-level fields ``on_top``."""
        tail = self._usage if usage is None else b',"usage":' + orjson.dumps(usage)
        if on_top:
            tail += b"," + orjson.dumps(on_top)[1:-1]
        return self._head + orjson.dumps(choices, default=pieces_as_list) + tail + b"}\n\n"
