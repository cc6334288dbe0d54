"""JSON values of the TypedDicts with which client libraries describe their requests."""

from __future__ import annotations

import typing
from collections.abc import Iterable
from functools import cache
from typing import Annotated, Any, Literal, NotRequired, Required, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st
from typing_extensions import is_typeddict

_DEPTH = 5  # of objects; below it optional fields and elements are omitted
_texts = st.sampled_from(["", "a", "{}", "call_1", "[1]"])
_scalars: dict[Any, st.SearchStrategy[Any]] = {
    str: _texts, int: st.integers(0, 9), float: st.just(0.5), bool: st.booleans(), type(None): st.none(),
}  # fmt: skip


@cache
def values_of(kind: Any, depth: int = _DEPTH) -> st.SearchStrategy[Any]:
    """Values of this type. Types that JSON does not have, such as files, become texts."""
    origin, args = get_origin(kind), get_args(kind)
    if kind in _scalars:
        return _scalars[kind]
    if is_typeddict(kind):
        return _objects(kind, depth - 1)
    if origin is Literal:
        return st.sampled_from(args)
    if origin in (Annotated, Required, NotRequired):
        return values_of(args[0], depth)
    if origin is Union or type(kind).__name__ == "UnionType":
        return st.one_of(
            [values_of(member, depth) for member in args if depth > 0 or not is_typeddict(member)] or [st.none()]
        )
    if origin in (dict, typing.Mapping) or kind is dict:
        return st.dictionaries(st.sampled_from(["a", "city"]), _texts, max_size=2)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Iterable):
        return st.lists(values_of(args[0], depth), max_size=2 if depth > 0 else 0)
    return _texts


def _objects(kind: Any, depth: int) -> st.SearchStrategy[Any]:
    hints = get_type_hints(kind, include_extras=True)
    fields = {name: values_of(hints[name], depth) for name in hints}
    required = {
        name: fields[name]
        for name, hint in hints.items()  # __required_keys__ does not see Required in annotations that are strings
        if get_origin(hint) is Required or (kind.__total__ and get_origin(hint) is not NotRequired)
    }
    optional = {name: fields[name] for name in fields.keys() - required.keys()} if depth > 0 else {}
    return st.fixed_dictionaries(required, optional=optional)
