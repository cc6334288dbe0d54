"""BoundedEnvironment: Jinja's sandbox, in which no single operation of a template builds more than a budget allows."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator
from jinja2.sandbox import ImmutableSandboxedEnvironment

BUDGET = 128 * 2**20
"""Characters and items that one rendering may build in all its operations, 32 times the longest prompt."""
_MAX_BITS = 4_096  # of a whole number
_MAX_WIDTH = 1_024  # of what is padded, indented or repeated
_WIDTH = re.compile(r"[%:][^A-Za-z}]*(?:\d{4}|\*|\{)")  # in a format: a width of four digits, or one from a value
_PADS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes", "generate_lorem_ipsum"})
_PADDING_FILTERS = frozenset({"center", "indent", "wordwrap", "batch", "slice", "round", "tojson"})

_spent = threading.local()


def begin() -> None:
    """Give the rendering that this thread begins the whole budget."""
    _spent.size = 0


def _spend(size: int) -> None:
    _spent.size = getattr(_spent, "size", 0) + size
    if _spent.size > BUDGET:
        raise TemplateError(f"it builds more than {BUDGET} characters.")


def _size(value: Any) -> int:
    return len(value) if isinstance(value, (str, bytes, list, tuple, dict)) else 1


def _check_width(values: Iterable[Any]) -> int:
    """The largest whole number of ``values``, of which none may be a width above the bound."""
    widest = max((abs(value) for value in values if isinstance(value, int)), default=1)
    if widest > _MAX_WIDTH:
        raise TemplateError(f"it pads or repeats to more than {_MAX_WIDTH} characters.")
    return widest


def _check_format(text: Any) -> None:
    if isinstance(text, str) and _WIDTH.search(text):
        raise TemplateError("it has a format with a width of four digits or more, or with one from a value.")


def _before(name: str, owner: Any, args: tuple[Any, ...]) -> None:
    """Spend what ``name`` builds of its owner and arguments where that is more than a small multiple of them."""
    if name == "replace" and isinstance(owner, str) and len(args) > 1 and isinstance(args[0], str):
        _spend(owner.count(args[0]) * _size(args[1]))
    elif name in ("format", "strftime_now"):
        _check_format(owner if isinstance(owner, str) else next(iter(args), None))


class _CodeGenerator(CodeGenerator):
    """Has ``~`` done by the environment, as it has the other operators."""

    def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:  # noqa: N802
        self.write("environment.join_values([")
        for child in node.nodes:
            self.visit(child, frame)
            self.write(", ")
        self.write("])")


class _Filters(dict[str, Callable[..., Any]]):
    """Filters that spend before and after they work; those that are added later do too."""

    def __setitem__(self, name: str, function: Callable[..., Any]) -> None:
        first = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            subject, rest = args[first] if len(args) > first else None, args[first + 1 :]
            if name in _PADDING_FILTERS:
                _spend(_size(subject) * _check_width((*rest, *kwargs.values())))
            if name == "join" and isinstance(subject, (str, list, tuple, dict)):
                _spend(len(subject) * _size((*rest, *kwargs.values(), "")[0]))
                _spend(sum(map(_size, subject)))
            _before(name, subject, (*rest, *kwargs.values()))
            result = function(*args, **kwargs)
            _spend(_size(result))
            return result

        super().__setitem__(name, bounded)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Operators, filters, calls and the joining of output spend from the budget of the thread's rendering.

    What is left takes time in proportion to values within the budget, so that an interrupt of the thread between two
    operations ends a template soon.
    """

    code_generator_class = _CodeGenerator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        filters = _Filters()
        for name, function in self.filters.items():
            filters[name] = function
        self.filters = filters
        self.concat = self._concat  # type: ignore[method-assign]

    def _concat(self, pieces: Iterable[str]) -> str:
        """The output of a template, a macro or a block."""
        kept = []
        for piece in pieces:
            _spend(len(piece) + 1)
            kept.append(piece)
        return "".join(kept)

    def join_values(self, values: list[Any]) -> str:
        texts = list(map(str, values))
        _spend(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * (max(right, 0) if operator == "**" else 1)
            if (operator == "**" and bits > _MAX_BITS) or (operator == "*" and bits + right.bit_length() > _MAX_BITS):
                raise TemplateError(f"it computes a number of more than {_MAX_BITS} bits.")
        elif operator == "*":
            count = right if isinstance(right, int) else left
            _spend(_size(left) * _size(right) * (max(count, 1) if isinstance(count, int) else 1))
        elif operator == "%":
            _check_format(left)
        else:
            _spend(_size(left) + _size(right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        name, owner = getattr(called, "__name__", ""), getattr(called, "__self__", None)
        if name in _PADS:
            _spend(_size(owner) * _check_width((*args, *kwargs.values())))
        elif name == "join" and isinstance(owner, str) and args:
            items = list(args[0])
            _spend(len(items) * len(owner) + sum(map(_size, items)))
            args = (items, *args[1:])
        else:
            wrapped = getattr(called, "__wrapped__", called)  # str.format is wrapped by the sandbox
            _before(name, getattr(wrapped, "__self__", None), (*args, *kwargs.values()))
        result = super().call(context, called, *args, **kwargs)
        _spend(_size(result))
        return result
