"""GrammarCompiler: what is wrong is said, what is a bomb is bounded, what was seen is not compiled again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from raylm.checkpoint import EMBEDDED
from raylm.errors import InvalidRequestError
from raylm.frontend.answers import grammar_compiler
from raylm.frontend.answers.grammar_compiler import MAX_KEPT, GrammarCompiler
from raylm.params import StructuredOutputs
from tests.frontend.cancelling import cancel_in_every_turn


@pytest.fixture
async def compiler() -> AsyncIterator[GrammarCompiler]:
    compiler = GrammarCompiler(EMBEDDED, (2, 0))
    yield compiler
    compiler.close()


WRONG: list[dict[str, Any]] = [
    {"regex": "(a"}, {"regex": "(?=a)b"}, {"json": "{"}, {"json": {"type": "nope"}}, {"json": False},
    {"json": {"type": "array", "uniqueItems": True}}, {"json": {"$ref": "#/nowhere"}}, {"json": {"$ref": "#"}},
    {"json": {"$ref": "http://localhost/x"}}, {"json": {"pattern": "(", "type": "string"}}, {"grammar": "xx"},
    {"json": {"type": "string", "format": "nonsense"}}, {"grammar": "start: missing"}, {"grammar": 'root ::= "a'},
    {"json": {"type": "integer", "minimum": 3, "maximum": 2}}, {"grammar": "start: start"},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
async def test_what_is_wrong_is_said_twice(compiler: GrammarCompiler, wrong: dict[str, Any]) -> None:
    for _ in range(2):
        with pytest.raises(InvalidRequestError) as refused:
            await compiler.compile(StructuredOutputs(**wrong, param="response_format.json_schema.schema"))
        assert refused.value.param == "response_format.json_schema.schema"
        assert len(refused.value.message) < 300


BOMBS: dict[str, dict[str, Any]] = {
    "a huge enum": {"json": {"enum": [f"v{i}" for i in range(200_000)]}},
    "many properties": {"json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(30_000)}}},
    "combinations": {
        "json": {"allOf": [{"anyOf": [{"properties": {f"k{i}{j}": {"const": j}}} for j in range(8)]} for i in range(9)]}
    },
    "intersections": {"json": {"allOf": [{"type": "string", "pattern": f".*{c * 3}.*"} for c in "abcdefghij"]}},
    "a large number": {"json": {"type": "integer", "multipleOf": 999_983, "minimum": 5, "maximum": 10**18}},
    "repetition": {"regex": "a{1000000}b"},
}


@pytest.mark.parametrize("name", BOMBS)
async def test_a_bomb_ends_and_others_are_served_meanwhile(compiler: GrammarCompiler, name: str) -> None:
    await compiler.compile(StructuredOutputs(regex="a"))
    bomb = asyncio.create_task(compiler.compile(StructuredOutputs(**BOMBS[name])))
    assert await compiler.compile(StructuredOutputs(regex="b+"))
    (ended,) = await asyncio.gather(bomb, return_exceptions=True)
    if isinstance(ended, BaseException):  # it may also be bearable
        assert isinstance(ended, InvalidRequestError)
        assert ended.param == "structured_outputs"
    else:
        assert ended


async def test_what_takes_too_long_is_refused(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_compiler, "COMPILE_LIMIT_S", 0.05)
    monkeypatch.setattr(compiler, "_judge", lambda spec: time.sleep(0.3) or ("", None))
    with pytest.raises(InvalidRequestError, match=r"not compiled within 0\.05 s"):
        await compiler.compile(StructuredOutputs(regex="a"))


async def test_a_cancellation_is_never_lost(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_judge", lambda spec: ("a grammar", None))
    await cancel_in_every_turn(lambda: compiler.compile(StructuredOutputs(regex="a")))


async def test_a_form_is_compiled_once_and_the_oldest_are_forgotten(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str | None] = []
    judge = compiler._judge

    def noted(spec: StructuredOutputs) -> Any:
        compiled.append(spec.regex)
        return judge(spec)

    monkeypatch.setattr(compiler, "_judge", noted)
    first = await compiler.compile(StructuredOutputs(regex="a"))
    assert await compiler.compile(StructuredOutputs(regex="a", param="other")) == first
    assert compiled == ["a"]
    for i in range(MAX_KEPT):
        await compiler.compile(StructuredOutputs(regex=f"b{i}"))
    assert len(compiler._verdicts) == MAX_KEPT
    await compiler.compile(StructuredOutputs(regex="a"))
    assert compiled.count("a") == 2


async def test_a_model_without_an_end_token_cannot() -> None:
    compiler = GrammarCompiler(EMBEDDED, ())
    with pytest.raises(InvalidRequestError, match="no token that ends"):
        await compiler.compile(StructuredOutputs(regex="a"))
    compiler.close()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"regex": "a", "json": {}},
        {"choice": ()},
        {"choice": ("a", "")},
        {"regex": "a" * 2**19},
        {"choice": ("a",) * 2000},
    ],
)
def test_exactly_one_form_within_bounds(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        StructuredOutputs(**fields)
    assert refused.value.param == "structured_outputs"
