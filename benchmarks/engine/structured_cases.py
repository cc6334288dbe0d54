"""Random structured outputs: schemas, prompts that ask for them, and checks of the answers."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jsonschema

WORDS = "red kite harbour lamp Oslo seven tiger plan café bread 12 north Ada river key 東京 moon"
ASKS = [
    "Tell me about {}.", "Give me the fields of {} as JSON.", "{}?", "Please fill in {} with anything.",
    "Call a tool for {}.", "I have {}, what now?", "Write {} for Ada, 34, from Oslo.", "Use {}: yes = {}.",
]  # fmt: skip
PATTERNS = ["^[a-z]{2,6}$", "^[A-Z][a-z]{1,5} \\d{1,3}$", "^(ab|cd){1,3}$", "^#[0-9a-f]{6}$", "^\\w{3}-\\w{3}$"]
FORMATS = ["date", "uuid", "ipv4"]  # without "time", which allows any number of digits
Schema = dict[str, Any]


def word(rng: random.Random) -> str:
    return (
        rng.choice(WORDS.split())
        if rng.random() < 0.5
        else "".join(rng.choices("abcdefghijklmnop_é", k=rng.randint(2, 9)))
    )


def scalar(rng: random.Random) -> Schema:
    """A schema of a short value."""
    low = rng.randint(-50, 1000)
    return rng.choice([
        {"type": "string", "maxLength": rng.randint(1, 24)},
        {"type": "string", "minLength": 2, "maxLength": 12, "description": word(rng)},
        {"type": "string", "pattern": rng.choice(PATTERNS)},
        {"type": "string", "format": rng.choice(FORMATS)},
        {"enum": [word(rng), rng.randint(0, 9), None, word(rng)]},
        {"const": word(rng)},
        {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 5000)},
        {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 100, "multipleOf": 5},
        {"type": "boolean"},
        {"type": ["boolean", "null"]},
        {"type": "null"},
    ])  # fmt: skip


def value(rng: random.Random, depth: int) -> Schema:
    kind = rng.random()
    if depth and kind < 0.2:
        return obj(rng, depth - 1)
    if depth and kind < 0.4:
        low = rng.randint(0, 2)
        return {"type": "array", "items": value(rng, depth - 1), "minItems": low, "maxItems": low + rng.randint(0, 2)}
    if depth and kind < 0.5:
        return {"anyOf": [scalar(rng), scalar(rng)]}
    return scalar(rng)


def obj(rng: random.Random, depth: int) -> Schema:
    """A schema of an object: of the kind that strict mode requires, or with optional properties."""
    keys = list(dict.fromkeys(word(rng) for _ in range(rng.randint(1, 5))))
    required = keys if rng.random() < 0.6 else rng.sample(keys, rng.randint(0, len(keys)))
    schema: Schema = {"type": "object", "properties": {key: value(rng, depth) for key in keys}}
    return schema | {"required": required, "additionalProperties": False}


def regex(rng: random.Random) -> str:
    parts = ["[a-d]{1,4}", "[0-9]{2,3}", "(yes|no)", "-", "x?", '[^ \n"]{1,5}', " ", "(a|bc){2}", "[é-ü]"]
    return "".join(rng.choices(parts, k=rng.randint(1, 6)))


def tool(rng: random.Random, place: int) -> Schema:
    name = f"{rng.choice(('get', 'set', 'find'))}_{''.join(rng.choices('abcdef', k=4))}_{place}"
    function = {"name": name, "description": word(rng), "parameters": obj(rng, 1)}
    return {"type": "function", "function": function}


@dataclass(frozen=True)
class Case:
    """A request body, and a check that describes the error in a finished choice of its answer."""

    body: dict[str, Any]
    fault: Callable[[dict[str, Any]], str | None]


def _body(rng: random.Random, **fields: Any) -> dict[str, Any]:
    ask = rng.choice(ASKS).format(*[word(rng)] * 2)
    messages = [{"role": "user", "content": ask}]
    return {
        "messages": messages,
        "temperature": 1.0,
        "top_p": 1.0,
        "max_tokens": 1500,
        "seed": rng.getrandbits(31),
    } | fields


def schema_fault(text: str, schema: Schema) -> str | None:
    """The reason why a text is not JSON that matches the schema, or None."""
    try:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    except (json.JSONDecodeError, jsonschema.ValidationError) as error:
        return f"{text[:80]!r}: {str(error).splitlines()[0]}"
    return None


def json_schema(rng: random.Random) -> Case:
    schema = obj(rng, 2)
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": rng.random() < 0.5}}
    compact = re.compile(r'^([^"\s]|"(\\.|[^"\\])*")*$', re.S)

    def fault(choice: dict[str, Any]) -> str | None:
        text = choice["message"]["content"]
        return schema_fault(text, schema) or (None if compact.match(text) else f"{text[:80]!r} is not compact")

    return Case(_body(rng, response_format=asked), fault)


def json_object(rng: random.Random) -> Case:
    schema = {"type": "object"}
    return Case(
        _body(rng, response_format={"type": "json_object"}, max_tokens=500),
        lambda choice: schema_fault(choice["message"]["content"], schema),
    )


def by_regex(rng: random.Random) -> Case:
    pattern = regex(rng)

    def fault(choice: dict[str, Any]) -> str | None:
        text = choice["message"]["content"]
        return None if re.fullmatch(pattern, text) else f"{text!r} does not match {pattern}"

    return Case(_body(rng, structured_outputs={"regex": pattern}), fault)


def by_choice(rng: random.Random) -> Case:
    choices = list({word(rng) + rng.choice(("", ' "x"', "\n")) for _ in range(rng.randint(1, 6))})

    def fault(choice: dict[str, Any]) -> str | None:
        text = choice["message"]["content"]
        return None if text in choices else f"{text!r} is none of {choices}"

    return Case(_body(rng, structured_outputs={"choice": choices}), fault)


def _call_fault(choice: dict[str, Any], schemas: dict[str, Schema], most: int) -> str | None:
    calls = choice["message"].get("tool_calls") or []
    if not 1 <= len(calls) <= most or choice["message"]["content"] or choice["finish_reason"] != "tool_calls":
        return f"{len(calls)} calls, {choice['finish_reason']}, {str(choice['message'])[:200]}"
    for call in calls:
        function = call["function"]
        if function["name"] not in schemas:
            return f"there is no {function['name']!r}"
        if fault := schema_fault(function["arguments"], schemas[function["name"]]):
            return fault
    return None


def required_call(rng: random.Random) -> Case:
    tools = [tool(rng, place) for place in range(rng.randint(1, 3))]
    schemas = {t["function"]["name"]: t["function"]["parameters"] for t in tools}
    parallel = rng.random() < 0.5
    body = _body(rng, tools=tools, tool_choice="required", parallel_tool_calls=parallel, max_tokens=4000)
    return Case(body, lambda choice: _call_fault(choice, schemas, 16 if parallel else 1))


def named_call(rng: random.Random) -> Case:
    tools = [tool(rng, place) for place in range(rng.randint(1, 3))]
    chosen = rng.choice(tools)["function"]
    body = _body(rng, tools=tools, tool_choice={"type": "function", "function": {"name": chosen["name"]}})
    return Case(body, lambda choice: _call_fault(choice, {chosen["name"]: chosen["parameters"]}, 1))


KINDS: dict[str, Callable[[random.Random], Case]] = {
    "json_schema": json_schema,
    "json_object": json_object,
    "regex": by_regex,
    "choice": by_choice,
    "required": required_call,
    "named": named_call,
}


def case(kind: str, seed: int) -> Case:
    return KINDS[kind](random.Random(f"{kind} {seed}"))


def free(made: Case) -> Case:
    """The same prompt without the structured output, to prove that the check finds errors."""
    body = {key: value for key, value in made.body.items() if key not in ("response_format", "structured_outputs")}
    return Case(body | ({"tool_choice": "auto"} if "tools" in body else {}), made.fault)
