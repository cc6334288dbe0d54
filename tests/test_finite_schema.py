"""has_finite_value against values that jsonschema accepts, and schemas whose every value would contain itself."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from raylm.finite_schema import has_finite_value

ENDLESS_ITEM = {"type": "array", "items": {"$ref": "#/$defs/a~1b"}, "minItems": 2}
SELF: dict[str, Any] = {"$ref": "#"}
NODE: dict[str, Any] = {"$ref": "#/$defs/node"}


def node(schema: dict[str, Any]) -> dict[str, Any]:
    return {"$ref": "#/$defs/node", "$defs": {"node": schema}}


FINITE: list[tuple[dict[str, Any], Any]] = [
    ({}, 1),
    ({"type": ["array", "null"], "items": SELF, "minItems": 1}, None),
    ({"type": "object", "properties": {"a": SELF}}, {}),
    ({"type": "object", "properties": {"a": {"anyOf": [SELF, {"type": "null"}]}}, "required": ["a"]}, {"a": None}),
    ({"type": ["object", "null"], "properties": {"a": SELF}, "required": ["a"]}, None),
    ({"properties": {"a": SELF}, "required": ["a"]}, 1),
    ({"type": "array", "items": SELF}, []),
    ({"type": "array", "prefixItems": [{"type": "null"}], "items": SELF, "minItems": 1}, [None]),
    (node({"type": "object", "properties": {"next": NODE, "v": {"const": 1}}, "required": ["v"]}), {"v": 1}),
    ({"enum": [1], "$defs": {"a": {"type": "array", "items": SELF, "minItems": 1}}}, 1),
    ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"oneOf": [ENDLESS_ITEM, {"type": "null"}]}}}, None),
]  # fmt: skip
ENDLESS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": SELF}, "required": ["a"]},
    {"type": "array", "items": SELF, "minItems": 1},
    {"type": "array", "prefixItems": [{"type": "null"}, SELF], "minItems": 2},
    {"anyOf": [{"type": "array", "items": SELF, "minItems": 1}, SELF]},
    {"allOf": [{"type": "object"}, {"type": "object", "properties": {"a": SELF}, "required": ["a"]}]},
    node({"type": "object", "properties": {"left": NODE, "right": {"type": "null"}}, "required": ["left", "right"]}),
    {
        "$ref": "#/$defs/a",
        "$defs": {
            "a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}, "required": ["b"]},
            "b": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1},
        },
    },
]


@pytest.mark.parametrize(("schema", "value"), FINITE)
def test_what_a_value_fits_is_finite(schema: dict[str, Any], value: Any) -> None:
    jsonschema.validate(value, schema)
    assert has_finite_value(schema)


@pytest.mark.parametrize("schema", ENDLESS)
def test_what_requires_itself_is_not(schema: dict[str, Any]) -> None:
    assert not has_finite_value(schema)
