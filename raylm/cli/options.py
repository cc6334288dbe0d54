"""Converts the arguments of `raylm serve` (a model or a file, and knobs as options) to a Serve configuration."""

from __future__ import annotations

import copy
import difflib
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from raylm.checkpoint import PACKAGED
from raylm.cli.serve_file import APPLICATION, BUILDER, SERVE_OPTIONS, ServedFile, check_tree, load_tree, our_places
from raylm.config import API_KEY_VARIABLE, Config, knob_named, knobs
from raylm.errors import ConfigError
from raylm.folders import in_home
from raylm.gguf import is_gguf
from raylm.strict_yaml import parse_yaml

_FILES = {".yaml", ".yml"}
_OF_THE_COMMAND = ("host", "port", "name", "route_prefix", "api_key", "print_config", "ready_timeout", "verbose")


@dataclass(frozen=True)
class Place:
    """Where a model is served. None keeps the value of the Serve file, or the default."""

    host: str | None = None
    port: int | None = None
    name: str | None = None
    route_prefix: str | None = None
    api_key: str | None = None


def served(words: Sequence[str], place: Place) -> ServedFile:
    """The configuration that `raylm serve` with these ``words`` serves: one model or Serve file, and knobs.

    Raises:
        ConfigError: an argument is invalid.
    """
    targets, options = split(words)
    if len(targets) != 1:
        said = f"{len(targets)} were given: {', '.join(targets)}" if targets else "none was given"
        raise ConfigError(f"serve takes one model or Serve file; {said}.")
    (target,) = targets
    if place.api_key is not None:
        if not place.api_key.isascii() or place.api_key.split() != [place.api_key]:
            raise ConfigError("--api-key: a key is plain ASCII without white space.")
        options["ingress.api_keys_env"] = API_KEY_VARIABLE
    from_words = _from_file if Path(target).suffix in _FILES else _from_model
    file = from_words(target, options, place)
    return _with_key(file) if os.environ.get(API_KEY_VARIABLE) and place.api_key is None else file


def _with_key(file: ServedFile) -> ServedFile:
    """Use the API key of the environment for every model without another source of keys."""
    tree = copy.deepcopy(file.tree)
    for place in our_places(tree):
        arguments = tree["applications"][place]["args"] = tree["applications"][place].get("args") or {}
        ingress = arguments["ingress"] = arguments.get("ingress") or {}
        if not ingress.get("api_keys_file") and not ingress.get("api_keys_env"):
            ingress["api_keys_env"] = API_KEY_VARIABLE
    return check_tree(tree, file.source)


def split(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """(positional arguments, knobs by dotted name). ConfigError names an unknown option."""
    alone: list[str] = []
    options: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            alone.append(word)
            continue
        written, equals, value = word.partition("=")
        name, given = _knob(written)
        if given is not None:
            if equals:
                raise ConfigError(f"{written}: it takes no value.")
            options[name] = given
        elif equals or (rest and not (_kinds()[name] is bool and not _is_bool(rest[0]))):
            options[name] = _value(name, value if equals else rest.pop(0))
        elif _kinds()[name] is bool:
            options[name] = True
        else:
            raise ConfigError(f"{written}: a value is missing.")
    return alone, options


def _knob(written: str) -> tuple[str, bool | None]:
    """(dotted name of the knob, False if the option is written ``--no-NAME``, else None)."""
    name = written.removeprefix("--").replace("-", "_")
    if name.startswith("no_"):
        with suppress(ConfigError):
            positive = knob_named(name.removeprefix("no_"))
            if _kinds()[positive] is bool:
                return positive, False
    same = [f"--{knob.replace('_', '-')}" for knob in _kinds() if knob.rpartition(".")[2] == name]
    if len(same) > 1 and name not in _kinds():
        raise ConfigError(f"{written}: ambiguous; did you mean {' or '.join(same)}?")
    try:
        return knob_named(name), None
    except ConfigError as error:
        if near := difflib.get_close_matches(name, _OF_THE_COMMAND, n=1, cutoff=0.7):
            raise ConfigError(f"{written}: unknown option; did you mean '--{near[0].replace('_', '-')}'?") from None
        raise ConfigError(f"{written}: {error.message}") from None


def _kinds() -> dict[str, Any]:
    return {name: _annotation(name) for name, _, _ in knobs()}


def _annotation(name: str) -> Any:
    node: Any = Config
    for part in name.split("."):
        node = node.model_fields[part].annotation
    return node


def _is_bool(word: str) -> bool:
    with suppress(ConfigError):
        return isinstance(_parsed(word), bool)
    return False


def _value(name: str, text: str) -> Any:
    """Parse a value as YAML; the text itself if the knob is a string."""
    kind = _kinds()[name]
    if kind in (str, str | None):
        return text
    try:
        return _parsed(text)
    except ConfigError as error:
        raise ConfigError(f"--{name.replace('_', '-')}: {error.message}") from None


def _parsed(text: str) -> Any:
    try:
        return parse_yaml(text)
    except yaml.YAMLError:
        return text


def _from_model(model: str, options: dict[str, Any], place: Place) -> ServedFile:
    if "model" in options:
        raise ConfigError(f"--model: the model is {model!r} already.")
    path = in_home(model, "model")
    if path.is_file() and not is_gguf(path):
        raise ConfigError(
            f"{model}: it is a file; a model is a GGUF file, a directory with a checkpoint, a hub id or 'embedded', "
            "and a Serve file ends in .yaml or .yml."
        )
    if path.exists() and model not in ("embedded", *PACKAGED):
        # Actors have other working directories, so the path becomes absolute. Clients use the given name, as in vLLM.
        options = {"model": os.path.abspath(path), "served_model_name": model} | options
    else:
        options = {"model": model} | options
    entry = {"name": APPLICATION, "import_path": BUILDER, "route_prefix": "/", "args": {}}
    tree = {"applications": [entry]} | copy.deepcopy(SERVE_OPTIONS)
    _override(tree, entry, options, place)
    return check_tree(tree, model)


def _from_file(name: str, options: dict[str, Any], place: Place) -> ServedFile:
    path = Path(name)
    tree = load_tree(path)
    if options or place != Place():
        check_tree(tree, str(path))
        ours = our_places(tree)
        if len(ours) != 1 and (options or place.name or place.route_prefix):
            raise ConfigError(
                f"{path} has {len(ours)} RayLM applications, so options are ambiguous; change the file instead."
            )
        _override(tree, tree["applications"][ours[0]], options, place)
    return check_tree(tree, str(path))


def _override(tree: dict[str, Any], entry: dict[str, Any], options: dict[str, Any], place: Place) -> None:
    http = {"host": place.host, "port": place.port}
    tree["http_options"] = (tree.get("http_options") or {}) | {k: v for k, v in http.items() if v is not None}
    where = {"name": place.name, "route_prefix": place.route_prefix}
    entry |= {key: value for key, value in where.items() if value is not None}
    if options:
        entry["args"] = entry.get("args") or {}
    for name, value in options.items():
        *parents, last = name.split(".")
        node = entry["args"]
        for parent in parents:
            node[parent] = node = dict(node.get(parent) or {})
        node[last] = value


def to_yaml(file: ServedFile) -> str:
    """The Serve file, ready for `serve run` and `serve deploy`."""
    head = f"# raylm serve, {file.source}\n"
    if any(config.ingress.api_keys_env == API_KEY_VARIABLE for config in file.configs()):
        head += f"# The environment of the Ray cluster must have the API key as {API_KEY_VARIABLE}.\n"
    return head + str(yaml.safe_dump(file.tree, sort_keys=False, allow_unicode=True))
