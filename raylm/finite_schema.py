"""has_finite_value: whether a finite JSON value can satisfy a recursive JSON schema."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any
from urllib.parse import unquote


def has_finite_value(schema: Any) -> bool:
    """Whether a finite value can satisfy ``schema``. Keywords that this function does not know count as satisfiable.

    Algorithm: the least fixed point of the references with finite values, beginning with references that depend on no
    other reference.
    """
    left = {"#": schema} | {ref: _resolved(schema, ref) for ref in _references(schema)}
    known: set[str] = set()
    while found := {ref for ref, target in left.items() if _ends(target, known)}:
        known |= found
        left = {ref: target for ref, target in left.items() if ref not in found}
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
    """The part of ``schema`` that a local reference names. True, which any value satisfies, for other references."""
    if not ref.startswith("#/"):
        return schema if ref == "#" else True
    node = schema
    for part in ref[2:].split("/"):
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if not isinstance(node, dict) or key not in node:
            return True
        node = node[key]
    return node


def _ends(schema: Any, known: set[str]) -> bool:
    """Whether ``schema`` has a finite value if only the references in ``known`` have one."""
    if not isinstance(schema, dict) or "const" in schema or "enum" in schema:
        return True
    if isinstance(ref := schema.get("$ref"), str) and ref not in known:
        return False
    options = [schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list) and schema[key]]
    needed = schema["allOf"] if isinstance(schema.get("allOf"), list) else []
    return all(any(_ends(option, known) for option in some) for some in options) and all(
        _ends(part, known) for part in chain(needed, _required_parts(schema))
    )


def _required_parts(schema: dict[str, Any]) -> Iterator[Any]:
    """The schemas of required properties and items. Nothing if the schema also allows values of other types."""
    kind = schema.get("type")
    properties, names = schema.get("properties"), schema.get("required")
    if kind in ("object", ["object"]) and isinstance(properties, dict) and isinstance(names, list):
        yield from (properties[name] for name in names if isinstance(name, str) and name in properties)
    least, first = schema.get("minItems"), schema.get("prefixItems")
    if kind in ("array", ["array"]) and isinstance(least, int) and least > 0:
        leading = first[:least] if isinstance(first, list) else []
        yield from leading
        yield from [schema["items"]] if len(leading) < least and "items" in schema else []
