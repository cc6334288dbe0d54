"""What handle calls give, checked where they come in: Python does not, and HTTP's bodies never see them."""

from __future__ import annotations

from typing import Any

from raylm.config import Config
from raylm.errors import InvalidRequestError
from raylm.ingress.openai.generation import check_priority
from raylm.params import PoolingParams, SamplingParams

_PRIORITIES = range(-(2**31), 2**31)


def check_prompt(prompt: object) -> None:
    """Raise InvalidRequestError unless ``prompt`` is a text or a list of token ids."""
    if isinstance(prompt, str):
        return
    if not isinstance(prompt, list) or any(type(token_id) is not int for token_id in prompt):
        raise _wrong("prompt", "a str or a list of int", prompt)


def check_messages(messages: object, tools: object, template_kwargs: object) -> None:
    """Raise InvalidRequestError unless the conversation's parts have their types."""
    for name, value in (("messages", messages), ("tools", tools)):
        if name == "tools" and value is None:
            continue
        if not isinstance(value, list) or any(not isinstance(entry, dict) for entry in value):
            raise _wrong(name, "a list of dict", value)
    if template_kwargs is not None and not isinstance(template_kwargs, dict):
        raise _wrong("template_kwargs", "a dict", template_kwargs)


def check_options(
    config: Config, params: object, cache_salt: object, priority: object = None, *, kind: type[Any] = SamplingParams
) -> None:
    """Raise InvalidRequestError unless the options have their types, and a priority its policy."""
    if params is not None and not isinstance(params, kind):
        raise _wrong("params", kind.__name__, params)
    if cache_salt is not None and not isinstance(cache_salt, str):
        raise _wrong("cache_salt", "a str", cache_salt)
    if priority is None:
        return
    if type(priority) is not int or priority not in _PRIORITIES:
        raise _wrong("priority", "an int of 32 bits", priority)
    check_priority(priority, config)


def check_pooling(config: Config, params: object, cache_salt: object) -> None:
    """As ``check_options``, for a vector."""
    check_options(config, params, cache_salt, kind=PoolingParams)


def _wrong(param: str, expected: str, value: object) -> InvalidRequestError:
    return InvalidRequestError(f"{param} must be {expected}, not {type(value).__name__}.", param=param)
