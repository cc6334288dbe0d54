"""Checks of what handle calls give: Python does not check types, and HTTP's bodies never see them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field, InstanceOf, TypeAdapter, ValidationError

from raylm.errors import InvalidRequestError
from raylm.params import PoolingParams, SamplingParams

_KINDS: dict[str, tuple[str, Any]] = {
    "prompt": ("a str or a list of int", str | list[int]),
    "messages": ("a list of dict", list[dict[Any, Any]]),
    "tools": ("a list of dict", list[dict[Any, Any]] | None),
    "template_kwargs": ("a dict", dict[Any, Any] | None),
    "sampling": ("SamplingParams", InstanceOf[SamplingParams] | None),
    "pooling": ("PoolingParams", InstanceOf[PoolingParams] | None),
    "cache_salt": ("a str", str | None),
    "priority": ("an int of 32 bits", Annotated[int, Field(ge=-(2**31), lt=2**31)] | None),
}
_ADAPTERS = {name: TypeAdapter[Any](kind, config=ConfigDict(strict=True)) for name, (_, kind) in _KINDS.items()}


def check_arguments(**arguments: object) -> None:
    """Check arguments by their names; ``sampling`` and ``pooling`` are two kinds of ``params``.

    Raises:
        InvalidRequestError: one has a wrong type; ``param`` is its name.
    """
    for name, value in arguments.items():
        try:
            _ADAPTERS[name].validate_python(value)
        except ValidationError:
            param = "params" if name in ("sampling", "pooling") else name
            message = f"{param} must be {_KINDS[name][0]}, not {type(value).__name__}."
            raise InvalidRequestError(message, param=param) from None
