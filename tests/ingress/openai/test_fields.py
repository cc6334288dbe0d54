"""Parsing of bodies: unions selected by a field or by type, rules of objects, and paths in errors."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

import pytest
from pydantic import AfterValidator, Field, ValidationError
from typing_extensions import TypedDict

from raylm.errors import InvalidRequestError, UnsupportedFieldError
from raylm.frontend import LARGE
from raylm.ingress.openai.chat import ChatCompletionRequest
from raylm.ingress.openai.fields import Body, OneOf, StrictPart, closed, count_entries, refuse
from tests.ingress.harness import CHAT


@closed
class Circle(TypedDict):
    kind: NotRequired[Literal["circle", "disc"] | None]
    radius: float


@closed
class Text(TypedDict):
    kind: Literal["text"]
    lines: Annotated[
        str | Annotated[list[str], Field(fail_fast=True)],
        OneOf("expected a string or an array of strings, but got {got}"),
    ]


def _positive(circle: Circle) -> Circle:
    if circle["radius"] <= 0:
        raise refuse("expected more than 0", at="radius")
    return circle


class Pen(StrictPart):
    width: int | None = None


class Drawing(Body):
    shapes: Annotated[
        list[
            Annotated[
                Annotated[Circle, AfterValidator(_positive)] | Text,
                OneOf("shapes of kind {got} are not drawn.", key="kind", served=False, default="circle"),
            ]
        ],
        Field(fail_fast=True),
    ]
    pen: Pen | None = None


@pytest.mark.parametrize(
    ("shape", "param", "message"),
    [
        (5, "shapes[0]", "Invalid type for 'shapes[0]': expected an object, but got an integer."),
        ({"kind": "star"}, "shapes[0].kind", "'shapes[0].kind': shapes of kind 'star' are not drawn."),
        ({"kind": [1]}, "shapes[0].kind", "'shapes[0].kind': shapes of kind an array are not drawn."),
        ({"radius": "1"}, "shapes[0].radius", "type for 'shapes[0].radius': expected a number, but got a string."),
        ({"radius": 0}, "shapes[0].radius", "Invalid value for 'shapes[0].radius': expected more than 0."),
        ({"kind": "disc"}, "shapes[0].radius", "Missing required parameter: 'shapes[0].radius'."),
        ({"radius": 1, "text": 1}, "shapes[0].text", "'shapes[0].text': this field is not supported."),
        ({"kind": "text", "lines": 5}, "shapes[0].lines", "or an array of strings, but got an integer."),
        ({"kind": "text", "lines": ["a", 5]}, "shapes[0].lines[1]", "expected a string, but got an integer."),
    ],
)  # fmt: skip
def test_a_path_has_neither_tags_nor_names_of_models(shape: Any, param: str, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Drawing.parse({"shapes": [shape]})
    assert caught.value.param == param
    assert caught.value.message.endswith(message)


def test_what_is_right_stays_as_it_is() -> None:
    shapes = [{"radius": 1.5}, {"kind": "disc", "radius": 2.0}, {"kind": "text", "lines": ["a"]}]
    assert Drawing.parse({"shapes": shapes, "pen": {"width": 2}}).shapes == shapes


def num_errors(body: type[Body], data: dict[str, Any]) -> int:
    """The number of errors that pydantic creates in one call, which blocks all other threads."""
    with pytest.raises(ValidationError) as caught:
        body.model_validate(data)
    return caught.value.error_count()


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"shapes": [], "pen": {}}, "pen"),
        ({"shapes": [{}]}, "shapes[0]"),
    ],
)
def test_many_unknown_fields_are_refused_without_looking_at_each(wrong: dict[str, Any], param: str) -> None:
    """pydantic would create an error for each field, in one call that blocks all other threads."""
    holder = wrong["pen"] if param == "pen" else wrong["shapes"][0]
    holder |= {f"x{i}": 1 for i in range(200_000)}
    with pytest.raises(InvalidRequestError, match="at most") as caught:
        Drawing.parse(wrong)
    assert caught.value.param == param
    assert num_errors(Drawing, wrong) == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": "x"} | {f"x{i}": 1 for i in range(100_000)}]}, "messages[0]"),
        ({"tools": [{"type": "function", "function": {f"x{i}": 1 for i in range(100_000)}}]}, "tools[0].function"),
        ({"structured_outputs": {f"x{i}": 1 for i in range(100_000)}}, "structured_outputs"),
        ({"stream_options": {f"x{i}": 1 for i in range(100_000)}}, "stream_options"),
        ({"messages": [{"role": "user", "content": [5] * 100_000}]}, "messages[0].content[0]"),
    ],
)
def test_large_mistakes_are_refused_at_the_first_of_them(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ChatCompletionRequest.parse(CHAT | fields)
    assert caught.value.param == param
    assert num_errors(ChatCompletionRequest, CHAT | fields) <= 2


async def test_reading_on_a_thread_refuses_alike() -> None:
    many = [{"radius": 1.0}] * LARGE
    assert count_entries({"shapes": many}) > LARGE
    assert len((await Drawing.read({"shapes": many})).shapes) == LARGE
    with pytest.raises(UnsupportedFieldError):
        await Drawing.read({"shapes": [*many, {"kind": "star"}]})
