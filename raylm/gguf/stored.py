"""StoredTensor: where a tensor lies in GGUF files."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a file.

    ``shape`` is in torch's order, ``kind`` is ggml's name of its type ('Q4_1'). Its bytes are the ``nbytes`` from
    ``offset`` in part ``part`` of the model.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    part: int
    offset: int
    nbytes: int
