"""Errors about a chat completion's fields, said in the names of the API whose request came down to it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from raylm.errors import InvalidRequestError


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Let errors about a chat completion's fields name those of another API that they came from.

    Raises:
        InvalidRequestError: what the block raises, with ``names`` put in.
    """
    try:
        yield
    except InvalidRequestError as error:
        head, rest = re.match(r"([^.\[]*)(.*)", error.param or "", re.DOTALL).groups()  # type: ignore[union-attr]
        if head not in names:
            raise
        message = re.sub(rf"\b{head}\b", names[head], error.message)
        raise type(error)(message, param=names[head] + rest) from None
