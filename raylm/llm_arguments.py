"""Arguments of LLM: knobs by short names, parameters by keyword, and the accepted forms of prompts."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from os import PathLike, fspath
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from raylm.config import Config, faults, knob_named, knobs
from raylm.errors import ConfigError, InvalidRequestError
from raylm.params import PoolingParams, SamplingParams

P = TypeVar("P", SamplingParams, PoolingParams)
Prompt = str | list[int]
Conversation = list[dict[str, Any]]

_SERVERS = ("ingress.", "engine.replicas", "engine.num_cpus", "tool_parser", "reasoning_parser", "log_format")
_VLLM_ARGUMENTS = {
    "sampling_params": "params",
    "pooling_params": "params",
    "use_tqdm": "progress",
    "lora_request": "adapters",
    "chat_template_kwargs": "template_kwargs",
    "guided_decoding": "structured_outputs",
    "guided_json": "structured_outputs={'json': ...}",
    "guided_regex": "structured_outputs={'regex': ...}",
    "guided_choice": "structured_outputs={'choice': ...}",
    "guided_grammar": "structured_outputs={'grammar': ...}",
    "best_of": "n",
}


def local_config(model: str | PathLike[str], given: Mapping[str, Any]) -> Config:
    """The configuration of an engine in this process, from sections of ``Config`` and knobs by short names.

    Raises:
        ConfigError: a name or value is invalid, a knob is given twice, or a knob has an effect only in a server.
    """
    tree: dict[str, Any] = {"model": fspath(model) if isinstance(model, PathLike) else model}
    for name, value in given.items():
        if name in Config.model_fields:
            section = value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value
            tree[name] = dict(section) if isinstance(section, Mapping) else section
    for name, value in given.items():
        if name not in Config.model_fields:
            _set(tree, knob_named(name), value, name)
    try:
        asked = Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(faults(error)) from None
    _check_local(asked)
    return asked.model_copy(update={"engine": asked.engine.model_copy(update={"executor": "local"})})


def _set(tree: dict[str, Any], dotted: str, value: Any, name: str) -> None:
    section, _, last = dotted.rpartition(".")
    node = tree.setdefault(section, {}) if section else tree
    if isinstance(node, dict):  # validation rejects anything else later
        if last in node:
            raise ConfigError(f"{dotted}: set twice, also as {name!r}.")
        node[last] = value


def _check_local(asked: Config) -> None:
    engine = asked.engine
    if "executor" in engine.model_fields_set and engine.executor != "local":
        raise ConfigError("engine.executor: LLM runs in one process; only 'local' is possible here.")
    if engine.tensor_parallel_size != 1:
        raise ConfigError("engine.tensor_parallel_size: LLM runs in one process, and each rank needs its own.")
    if engine.pipeline_parallel_size != 1:
        raise ConfigError("engine.pipeline_parallel_size: LLM runs in one process, and each stage needs its own.")
    for name, _, default in knobs():
        value: Any = asked
        for part in name.split("."):
            value = getattr(value, part)
        if name.startswith(_SERVERS) and value != default:
            raise ConfigError(f"{name}: this knob is for servers and has no effect in LLM.")


def params_of(kind: type[P], params: Any, keywords: Mapping[str, Any], defaults: Mapping[str, Any]) -> Any:
    """Return ``params`` if given, else a ``kind`` made of ``defaults`` and ``keywords``, which take precedence.

    Raises:
        InvalidRequestError: both are given, or a keyword is unknown or has an invalid value.
    """
    known: list[str] = [each.name for each in fields(kind)]
    for name in keywords:
        if name not in known:
            near, *_ = difflib.get_close_matches(name, [*known, "params", "progress"], 1, 0.5) or [""]
            near = _VLLM_ARGUMENTS.get(name, near)
            hint = f"did you mean {near}?" if near else f"{kind.__name__} has {', '.join(known)}."
            raise InvalidRequestError(f"unknown parameter {name!r}; {hint}", param=name)
    if params is not None and keywords:
        message = f"params and {', '.join(keywords)} cannot be combined; set them in params."
        raise InvalidRequestError(message, param="params")
    return kind(**{**defaults, **keywords}) if params is None else params


def sampling_each(params: Any, count: int) -> list[SamplingParams]:
    """A list of SamplingParams, one for each of ``count`` prompts; InvalidRequestError if ``params`` do not fit."""
    one = isinstance(params, SamplingParams)
    if not one and not (isinstance(params, Sequence) and all(isinstance(each, SamplingParams) for each in params)):
        raise InvalidRequestError("params must be SamplingParams, or a list of them.", param="params")
    return _one_each("params", params, count, shared=one)


def adapters_each(adapters: Any, count: int) -> list[str | None]:
    """A list of adapter names or None, one for each of ``count`` prompts; InvalidRequestError if they do not fit."""
    one = isinstance(adapters, str | None)
    if not one and not (isinstance(adapters, Sequence) and all(isinstance(each, str | None) for each in adapters)):
        raise InvalidRequestError("adapters must be a name, or a list of names and None.", param="adapters")
    return _one_each("adapters", adapters, count, shared=one)


def _one_each(name: str, given: Any, count: int, *, shared: bool) -> list[Any]:
    listed = [given] * count if shared else list(given)
    if len(listed) != count:
        raise InvalidRequestError(f"{name} has {len(listed)} entries for {count} prompts.", param=name)
    return listed


def as_prompts(prompts: Any) -> list[Prompt]:
    """Convert one or several prompts to a list of texts and lists of token ids; InvalidRequestError for other types."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InvalidRequestError(f"prompts must be a list, not {type(prompts).__name__}.", param="prompts")
    listed = [prompts] if prompts and isinstance(prompts[0], int) else prompts
    for place, prompt in enumerate(listed):
        is_ids = isinstance(prompt, list | tuple) and all(type(token) is int for token in prompt)
        if not (is_ids or isinstance(prompt, str)):
            raise InvalidRequestError(f"prompts[{place}] must be a str or a list of int.", param="prompts")
    return [prompt if isinstance(prompt, str) else list(prompt) for prompt in listed]


def as_conversations(messages: Any) -> list[Conversation]:
    """Convert one or several conversations to a list. A str becomes a conversation with one message of the user.

    Raises:
        InvalidRequestError: a value has another type.
    """
    if isinstance(messages, str):
        return [_user(messages)]
    if not isinstance(messages, Sequence):
        raise InvalidRequestError(f"messages must be a str or a list, not {type(messages).__name__}.", param="messages")
    listed = [messages] if messages and isinstance(messages[0], dict) else messages
    for place, conversation in enumerate(listed):
        whole = isinstance(conversation, list | tuple) and all(isinstance(message, dict) for message in conversation)
        if not (whole or isinstance(conversation, str)):
            raise InvalidRequestError(f"messages[{place}] must be a str or a list of dict.", param="messages")
    return [_user(each) if isinstance(each, str) else list(each) for each in listed]


def _user(text: str) -> Conversation:
    return [{"role": "user", "content": text}]


def names_of(prompts: list[Prompt], one: str, many: str) -> list[str]:
    """The name of each prompt in error messages."""
    return [one] if len(prompts) == 1 else [f"{many}[{place}]" for place in range(len(prompts))]


def check_template_fields(tools: Any, template_kwargs: Any) -> None:
    """Raise InvalidRequestError for arguments that no chat template accepts."""
    listed = isinstance(tools, list | tuple | None) and all(isinstance(tool, dict) for tool in tools or ())
    if not listed:
        raise InvalidRequestError("tools must be a list of dict, or None.", param="tools")
    if not (template_kwargs is None or isinstance(template_kwargs, dict)):
        raise InvalidRequestError("template_kwargs must be a dict, or None.", param="template_kwargs")
