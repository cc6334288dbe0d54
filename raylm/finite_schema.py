"""has_finite_value: whether a JSON schema that refers to itself can be satisfied by a value that ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any] | bool


def has_finite_value(schema: Schema) -> bool:
    """False only if every value that fits ``schema`` would contain itself; what is not understood is taken as finite.

    The references that have finite values are found as a least fixed point, from those that need no other one.
    """
    known: dict[str, bool] = {}
    targets = {"#": schema} | {ref: _resolved(schema, ref) for ref in _references(schema)}
    changed = True
    while changed:
        changed = False
        for ref, target in targets.items():
            if ref not in known and _ends(target, known):
                known[ref] = changed = True
    return "#" in known


def _references(schema: Any) -> Iterator[str]:
    left = [schema]
    while left:
        node = left.pop()
        if isinstance(node, dict):
            if isinstance(ref := node.get("$ref"), str):
                yield ref
            left.extend(node.values())
        elif isinstance(node, list):
            left.extend(node)


def _resolved(schema: Any, ref: str) -> Any:
    """The place in ``schema`` that a local reference names; True, which anything fits, for any other one."""
    if not ref.startswith("#/"):
        return schema if ref == "#" else True
    node = schema
    for part in ref[2:].split("/"):
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if not isinstance(node, dict) or key not in node:
            return True
        node = node[key]
    return node


def _ends(schema: Any, known: dict[str, bool]) -> bool:
    """Whether ``schema`` has a finite value, if the references ``known`` have one and the others have none."""
    if not isinstance(schema, dict) or "const" in schema or "enum" in schema:
        return True
    ref = schema.get("$ref")
    if isinstance(ref, str) and ref not in known:
        return False
    alternatives = [schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list) and schema[key]]
    if not all(any(_ends(option, known) for option in options) for options in alternatives):
        return False
    every = schema.get("allOf")
    if isinstance(every, list) and not all(_ends(part, known) for part in every):
        return False
    return _scalar_fits(schema) or all(_ends(part, known) for part in _required_parts(schema))


def _scalar_fits(schema: dict[str, Any]) -> bool:
    """Whether a value without parts may fit: one that is neither an object nor an array."""
    kinds = schema.get("type")
    if kinds is None:
        return not any(key in schema for key in ("properties", "required", "prefixItems", "items", "minItems"))
    return bool(set([kinds] if isinstance(kinds, str) else kinds) - {"object", "array"})


def _required_parts(schema: dict[str, Any]) -> Iterator[Any]:
    """What an object or an array of this schema cannot do without; nothing where it may be either."""
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) and len(kind) == 1 else kind
    properties, names = schema.get("properties"), schema.get("required")
    if kind == "object" and isinstance(properties, dict) and isinstance(names, list):
        yield from (properties[name] for name in names if isinstance(name, str) and name in properties)
    least = schema.get("minItems")
    if kind == "array" and isinstance(least, int) and least > 0:
        first = schema.get("prefixItems")
        leading = first[:least] if isinstance(first, list) else []
        yield from leading
        if len(leading) < least and "items" in schema:
            yield schema["items"]
