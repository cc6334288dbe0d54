"""OpenAI's specification as validators, with the few nulls put in that its own server sends against it."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import jsonschema

_FILE = Path(__file__).parent.parent / "data" / "openai_schemas.json"


@lru_cache
def _specification() -> dict[str, Any]:
    """The extract of the specification.

    It types a completion's finish_reason as never null (yet every chunk but the last has null), the logprobs' entries
    as numbers (yet the first one of an echoed prompt is null), usage as an object (yet its own text on stream_options
    says that chunks before the last have null), and an embedding as numbers (yet its own encoding_format has base64).
    """
    spec: dict[str, Any] = json.loads(_FILE.read_text())
    schemas = spec["components"]["schemas"]
    response = schemas["CreateCompletionResponse"]["properties"]
    response["usage"] = _or(response["usage"], "null")
    choice = response["choices"]["items"]["properties"]
    choice["finish_reason"] = _or(choice["finish_reason"], "null")
    columns = choice["logprobs"]["anyOf"][0]["properties"]
    for name in ("token_logprobs", "top_logprobs"):
        columns[name]["items"] = _or(columns[name]["items"], "null")
    embedding = schemas["Embedding"]["properties"]
    embedding["embedding"] = _or(embedding["embedding"], "string")
    return spec


def _or(schema: dict[str, Any], kind: str) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": kind}]}


@lru_cache
def _validator(name: str) -> jsonschema.Draft202012Validator:
    components = _specification()["components"]
    assert name in components["schemas"], f"the extract has no {name}"
    return jsonschema.Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": components})


def violations(value: Any, name: str) -> list[str]:
    """What ``value`` breaks of the schema ``name``, empty if nothing."""
    return [f"{name} {error.json_path}: {error.message[:200]}" for error in _validator(name).iter_errors(value)]
