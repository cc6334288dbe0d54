"""Random attacks: bodies from /openapi.json, structured outputs, invalid HTTP, and clients that leave."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

JSON = dict[str, Any]
HI = [{"role": "user", "content": "Hi"}]
# A valid body for each path that generates text or vectors.
RIGHT: dict[str, JSON] = {
    "/v1/chat/completions": {"messages": HI, "max_tokens": 3},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 3},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 3},
    "/v1/messages": {"messages": HI, "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": HI},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [50, 51]},
}
_MOST_TOKENS = 40
_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens")
_DEPTH = 4


@dataclass(frozen=True)
class Attack:
    """The data of one connection, which is closed after ``read`` bytes of the answer, if given."""

    data: bytes
    read: int | None = None

    def as_json(self) -> JSON:
        return {"data": self.data.decode("latin-1"), "read": self.read}

    @classmethod
    def of_json(cls, found: JSON) -> Attack:
        return cls(found["data"].encode("latin-1"), found["read"])


def http(method: str, path: str, body: bytes = b"") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body


WEIRD = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from([0, -1, 2**31, 2**63, 2**64, -(2**63), 10**400, 1e308, -1e-300, float("nan"), float("inf")])
    | st.integers()
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["", "\0", "\ud800", "😀" * 50, "a" * 5000, "<|im_start|>", "{{ 7 * 7 }}", "../../x", "$ref"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def values(schema: Any, defs: JSON, depth: int = 0) -> st.SearchStrategy[Any]:
    """Values that mostly fit a schema of /openapi.json."""
    if not isinstance(schema, dict) or depth > _DEPTH:
        return WEIRD
    if "$ref" in schema:
        return st.deferred(lambda: values(defs.get(schema["$ref"].rsplit("/", 1)[1], {}), defs, depth + 1))
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return st.one_of([values(choice, defs, depth) for choice in choices])
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kind = schema.get("type")
    if kind == "object" or "properties" in schema:
        return objects(schema, defs, depth)
    if kind == "array":
        return st.lists(values(schema.get("items", {}), defs, depth + 1), max_size=3)
    plain: dict[Any, st.SearchStrategy[Any]] = {
        "string": st.text(max_size=20),
        "integer": st.integers(-2, 20) | st.integers(),
        "number": st.floats(-3, 3) | st.floats(),
        "boolean": st.booleans(),
        "null": st.none(),
    }
    return plain.get(kind, WEIRD)


def objects(schema: JSON, defs: JSON, depth: int) -> st.SearchStrategy[JSON]:
    fields = schema.get("properties", {})
    if not fields:
        return st.dictionaries(st.text(max_size=6), WEIRD, max_size=3)
    required = {name: values(fields[name], defs, depth + 1) for name in schema.get("required", ()) if name in fields}
    optional = {name: values(of, defs, depth + 1) for name, of in fields.items() if name not in required}
    some = st.sets(st.sampled_from(sorted(optional)), max_size=4) if optional else st.just(set())
    return some.flatmap(
        lambda names: st.fixed_dictionaries(required | {name: optional[name] for name in sorted(names)})
    )


@st.composite
def bodies(draw: st.DrawFn, document: JSON) -> Attack:
    """A valid body for any path, with some fields drawn from their schemas and some meaningless ones."""
    paths = document["paths"]
    path = draw(st.sampled_from(sorted(paths)))
    method = draw(st.sampled_from(sorted(paths[path])))
    content = paths[path][method].get("requestBody", {}).get("content", {})
    path = path.replace("{", "").replace("}", "")
    if not content:
        return Attack(http(method.upper(), path, draw(st.binary(max_size=20))))
    defs = document["components"]["schemas"]
    schema = content["application/json"]["schema"]
    fields = draw(values(schema, defs))
    body: Any = {"model": "embedded"} | RIGHT.get(path, {})
    if isinstance(fields, dict):
        right = draw(st.sets(st.sampled_from(sorted(body))))
        body = fields | {name: value for name, value in body.items() if name in right or name not in fields}
        for name in draw(st.sets(st.sampled_from(sorted(body)), max_size=1)):
            body[name] = draw(WEIRD)
        body = {name: _short(name, value) for name, value in body.items()}
    read = draw(st.none() | st.integers(0, 600))
    return Attack(http("POST", path, _encoded(body)), read)


def _short(name: str, value: Any) -> Any:
    """Limit the length of answers, so that more attacks fit into the time."""
    return min(value, _MOST_TOKENS) if name in _LENGTHS and type(value) is int else value


def _encoded(body: Any) -> bytes:
    return json.dumps(body, ensure_ascii=True).encode()


NAMES = st.sampled_from(["a", "b", "c", "$ref", "type", "", "é", "p" * 300])
PATTERNS = st.text("ab()[]{}|*+?.\\^$0129,-dws", max_size=20)


def _schemas(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["object", "array", "string", "integer", "number", "boolean", "null", "x"]),
            "properties": st.dictionaries(NAMES, inner, max_size=3),
            "required": st.lists(NAMES, max_size=3),
            "items": inner,
            "prefixItems": st.lists(inner, max_size=2),
            "anyOf": st.lists(inner, max_size=3),
            "oneOf": st.lists(inner, max_size=2),
            "allOf": st.lists(inner, max_size=2),
            "$defs": st.dictionaries(NAMES, inner, max_size=2),
            "$ref": st.sampled_from(["#", "#/$defs/a", "#/$defs/missing", "http://x/y", "#/properties/a"]),
            "additionalProperties": st.booleans() | inner,
            "minItems": st.integers(0, 5),
            "maxItems": st.integers(0, 10**6),
            "minLength": st.integers(0, 2000),
            "maxLength": st.integers(0, 10**9),
            "minimum": st.integers() | st.floats(),
            "maximum": st.integers() | st.floats(),
            "multipleOf": st.integers(0, 10) | st.floats(),
            "enum": st.lists(WEIRD, max_size=4),
            "const": WEIRD,
            "pattern": PATTERNS,
            "format": st.sampled_from(["date-time", "uuid", "ipv6", "email", "x"]),
        },
    )


SCHEMAS = st.recursive(st.booleans() | _schemas(st.just({})), _schemas, max_leaves=8)


@st.composite
def grammars(draw: st.DrawFn) -> str:
    """Rules in GBNF or Lark that refer to each other at random."""
    names, lark = ["root", "x", "y", "start", "A"], draw(st.booleans())
    atom = st.sampled_from([*names, '"a"', "[a-z]", "[^\\n]", '""', "/a+/", ".", "(", ")", "|", "*", "+", "?", "{2,9}"])
    lines = [
        f"{draw(st.sampled_from(names))} {':' if lark else '::='} {' '.join(draw(st.lists(atom, max_size=6)))}"
        for _ in range(draw(st.integers(1, 5)))
    ]
    return "\n".join((["%llguidance {}"] if lark and draw(st.booleans()) else []) + lines)


@st.composite
def forms(draw: st.DrawFn) -> Attack:
    """A request for a structured output with a few tokens."""
    spec = draw(
        st.fixed_dictionaries({"json": SCHEMAS | SCHEMAS.map(json.dumps)})
        | st.fixed_dictionaries({"regex": PATTERNS})
        | st.fixed_dictionaries({"choice": st.lists(st.text(max_size=30), max_size=5)})
        | st.fixed_dictionaries({"grammar": grammars()})
    )
    others = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "logprobs": st.booleans(),
                "n": st.integers(1, 3),
                "stream": st.booleans(),
                "min_tokens": st.integers(0, 6),
                "ignore_eos": st.booleans(),
                "allowed_token_ids": st.lists(st.integers(0, 6141), max_size=4),
                "temperature": st.floats(0, 2),
                "repetition_penalty": st.floats(0, 2, exclude_min=True),
                "logit_bias": st.dictionaries(st.integers(0, 6200).map(str), st.floats(-100, 100), max_size=2),
            },
        )
    )
    body = {"model": "embedded", "messages": HI, "max_tokens": draw(st.integers(1, 30)), "structured_outputs": spec}
    return Attack(http("POST", "/v1/chat/completions", _encoded(body | others)), draw(st.none() | st.integers(0, 600)))


@st.composite
def raw(draw: st.DrawFn) -> Attack:
    """A valid request with one change: a piece is cut out, doubled, or replaced by random bytes."""
    path = draw(st.sampled_from(sorted(RIGHT)))
    data = http("POST", path, _encoded({"model": "embedded"} | RIGHT[path]))
    if draw(st.booleans()):
        lengths = [b"0", b"-1", b"5", b"99999999999", b"+7", b"0x10", b"7, 8"]
        other = draw(st.sampled_from([
            b"Transfer-Encoding: chunked", b"Transfer-Encoding: x", b"Expect: 100-continue", b"Content-Encoding: gzip",
            b"Host: y", b"Upgrade: websocket", b"Authorization: " + b"x" * 9000, b"A: " + b"b" * 70000,
            b"x-api-key: \xff", b"x-request-id: \xff", b"traceparent: \xff", b"x-session-id: \xff",
            b"x-request-timeout-seconds: 0.001", b"x-request-disconnect-disabled: ?1",
            *(b"Content-Length: " + length for length in lengths),
        ]))  # fmt: skip
        data = data.replace(b"Host: x", b"Host: x\r\n" + other)
    start = draw(st.integers(0, len(data)))
    end = draw(st.integers(start, min(len(data), start + 20)))
    piece = draw(st.just(data[start:end]) | st.binary(max_size=20) | st.just(b""))
    return Attack(data[:start] + piece + data[end:], draw(st.none() | st.integers(0, 200)))


def attacks(document: JSON) -> st.SearchStrategy[Attack]:
    return st.one_of(bodies(document), forms(), raw(), bodies(document), forms())
