"""OpenAI's specification as validators, changed where OpenAI's own server contradicts it."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import jsonschema

_FILE = Path(__file__).parent.parent / "data" / "openai_schemas.json"


@lru_cache
def _specification() -> dict[str, Any]:
    """The extract of the specification, with four changes.

    A completion's finish_reason may be null, because every chunk but the last has null. An entry of logprobs may be
    null, because the first token of an echoed prompt has null. usage may be null, as the text on stream_options says.
    And an embedding may be a string, because encoding_format can be base64.
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
    """The violations of the schema ``name`` in ``value``."""
    return [f"{name} {error.json_path}: {error.message[:200]}" for error in _validator(name).iter_errors(value)]
