"""Changes to bodies before validation: fills in the model, and drops fields that are not supported."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, cached_property
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, NotRequired, Required, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from typing_extensions import is_typeddict

from raylm.errors import InvalidRequestError
from raylm.frontend import LARGE, offload
from raylm.ingress.http.body import JSONObject
from raylm.ingress.http.errors import clip, logger
from raylm.ingress.openai.fields import Body, OneOf, count_entries, plain_name
from raylm.stages import about

if TYPE_CHECKING:
    from raylm.frontend import AsyncLLM

MAX_TOLD = 256  # names that are logged
AGENTS_CONTEXT = 32_768  # tokens; the first prompts of agents have 10,000 to 25,000
_AGENT = re.compile(r"\b(claude-cli|codex[\w-]*|crush|gemini-?cli|goose|opencode|openhands|qwen-?code)/", re.IGNORECASE)


class IncomingFields:
    """Prepares a body for validation: fills in the model's name if only one model is served.

    Remembers which dropped fields and which agents are already in the log, so that each is logged once.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._told: set[str] = set()

    async def prepare(self, body: type[BaseModel], data: JSONObject) -> tuple[JSONObject, list[str]]:
        """Returns ``data`` for the handler, and the names of fields that were dropped from it.

        Raises:
            InvalidRequestError: no model is named, and several are served.
        """
        model = body.model_fields.get("model")
        if model is not None and model.default == "" and data.get("model") is None:
            data = data | {"model": self._only_model()}
        return data, []

    def meet(self, user_agent: str) -> None:
        """Log a warning, once for each agent, if the model's context is too small for the agent's usual prompts."""
        if (found := _AGENT.search(user_agent)) is None or self._llm.max_model_len >= AGENTS_CONTEXT:
            return
        agent = found[1].lower()
        if agent not in self._told and len(self._told) < MAX_TOLD:
            self._told.add(agent)
            logger.warning(
                "the agent %s sends requests; its prompts may not fit in the context of %d tokens, use at least %d",
                agent,
                self._llm.max_model_len,
                AGENTS_CONTEXT,
                extra=about("agent.context", agent=agent),
            )

    def _only_model(self) -> str:
        if others := tuple(self._llm.adapters.known):
            names = ", ".join(f"'{clip(name, 100)}'" for name in (self._llm.model_name, *others[:3]))
            message = f"Missing required parameter: 'model'; this server has {1 + len(others)} models, as {names}."
            raise InvalidRequestError(message, param="model")
        return self._llm.model_name

    def tell(self, names: Iterable[str]) -> None:
        """Log each name that was not logged before."""
        for name in names:
            if name not in self._told and len(self._told) < MAX_TOLD:
                self._told.add(name)
                logger.warning(
                    "a client sent the field %s, which is not supported and was ignored",
                    name,
                    extra=about("field.ignored", field=name),
                )


class KnownFields(IncomingFields):
    """Implements ``ingress.unknown_fields: warn``: drops fields that are not supported."""

    async def prepare(self, body: type[BaseModel], data: JSONObject) -> tuple[JSONObject, list[str]]:
        assert issubclass(body, Body)
        data, names = await offload(lambda: self._leave_out(body, data), _size(data))
        self.tell(names)
        data, _ = await super().prepare(body, data)
        return data, names

    def _leave_out(self, body: type[Body], data: JSONObject) -> tuple[JSONObject, list[str]]:
        """Drop unsupported fields. Keeps other servers' names of fields, so that the error names the field."""
        left_out: dict[str, None] = {}
        asked = {
            name: value
            for name, value in data.items()
            if name in body.served_by or (value is None and name in body.unserved)
        }
        rest = {name: value for name, value in data.items() if name not in asked}
        rest = _shape(body).known_part(rest, "", left_out)
        calls_tools, reasons = self._llm.calls_tools, self._llm.reasons
        for path in (() if calls_tools else body.of_tools) + (() if reasons else body.of_reasoning):
            rest = _without(rest, path, left_out)
        return asked | rest, [plain_name(path) for path in left_out]


def _size(data: JSONObject) -> int:
    count = count_entries(data)
    return 0 if count <= LARGE else 2 * count


def _without(data: JSONObject, path: str, left_out: dict[str, None]) -> JSONObject:
    """``data`` without the field at a dotted path, if it is there and not null."""
    name, _, rest = path.partition(".")
    value = data.get(name)
    if value is None or (rest and not (isinstance(value, dict) and value.get(rest) is not None)):
        return data
    left_out[path] = None
    if not rest:
        return {key: item for key, item in data.items() if key != name}
    return data | {name: {key: item for key, item in value.items() if key != rest}}


class _Shape:
    """The arrays and objects that a type allows. It is computed once, because resolving type hints is slow."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind

    @cached_property
    def item(self) -> _Shape | None:
        """The shape of an array's entries; None if the type allows no array."""
        return next((_Shape(get_args(kind)[0]) for kind, _ in _members(self._kind) if get_origin(kind) is list), None)

    def fields(self, value: JSONObject) -> Mapping[str, _Shape] | None:
        """The shapes of an object's fields by name; None if any fields are allowed."""
        return next((fields for find in self._objects if (fields := find(value))), None)

    @cached_property
    def _objects(self) -> tuple[Callable[[JSONObject], Mapping[str, _Shape] | None], ...]:
        """For each object type, and each union with a key: a function from a value to its fields."""
        return tuple(_reader(kind, rule) for kind, rule in _members(self._kind, whole=True))

    def known_part(self, value: Any, path: str, left_out: dict[str, None]) -> Any:
        """``value`` without the fields that its type lacks, at any depth. Other errors are kept.

        Appends their paths, without indexes of arrays, to ``left_out``.
        """
        if isinstance(value, list):
            item = self.item
            return value if item is None else [item.known_part(entry, f"{path}[]", left_out) for entry in value]
        if not isinstance(value, dict) or (known := self.fields(value)) is None:
            return value
        kept = {}
        for name, entry in value.items():
            inner = f"{path}.{name}" if path else name
            if name in known:
                kept[name] = known[name].known_part(entry, inner, left_out)
            else:
                left_out[inner] = None
        return kept


_shape = cache(_Shape)  # of a class


def _members(kind: Any, *, whole: bool = False) -> Iterator[tuple[Any, OneOf | None]]:
    """The types of a union, or ``kind`` itself. With ``whole``, a union with a key is one entry with its OneOf."""
    origin = get_origin(kind)
    if origin is Annotated:
        kind, *rules = get_args(kind)
        rule = next((rule for rule in rules if isinstance(rule, OneOf) and rule.key), None) if whole else None
        if rule is not None:
            yield kind, rule
        else:
            yield from _members(kind, whole=whole)
    elif origin in (Union, UnionType):
        for member in get_args(kind):
            yield from _members(member, whole=whole)
    elif origin in (NotRequired, Required):
        yield from _members(get_args(kind)[0], whole=whole)
    else:
        yield kind, None


def _reader(kind: Any, rule: OneOf | None) -> Callable[[JSONObject], Mapping[str, _Shape] | None]:
    if rule is None:
        fields = _fields(kind) if isinstance(kind, type) else None
        return lambda value: fields
    shapes = {tag: _Shape(member) for tag, member in rule.members(kind).items()}
    other = shapes.get("")

    def read(value: JSONObject) -> Mapping[str, _Shape] | None:
        tag = rule.tag_of(value)
        shape = shapes.get(tag, other) if isinstance(tag, str) else None
        return None if shape is None else shape.fields(value)

    return read


@cache
def _fields(kind: type) -> Mapping[str, _Shape] | None:
    """The shapes of an object's fields by name; None if the type is not an object or allows any fields."""
    if is_typeddict(kind):
        return {name: _Shape(hint) for name, hint in get_type_hints(kind, include_extras=True).items()}
    if issubclass(kind, BaseModel):
        hints = get_type_hints(kind, include_extras=True)
        return {info.alias or name: _Shape(hints[name]) for name, info in kind.model_fields.items()}
    return None
