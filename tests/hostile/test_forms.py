"""Structured outputs that overflow stacks, take long or are invalid, on a running server beside honest streams."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.hostile.conftest import Beside
from tests.serving import chat

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.asyncio(loop_scope="session")]

SMALL = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def chain(rules: int) -> str:
    lines = [f'r{i}: "a" r{i + 1}' for i in range(rules)]
    return "\n".join(["%llguidance {}", "start: r0", *lines, f'r{rules}: "b"'])


def gbnf(rules: int, last: str = "b") -> str:
    return "\n".join(["root ::= r0", *(f"r{i} ::= [a] r{i + 1}" for i in range(rules)), f"r{rules} ::= [{last}]"])


def references(definitions: int) -> dict[str, Any]:
    chained: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(definitions)}
    return {"$ref": "#/$defs/d0", "$defs": chained | {f"d{definitions}": {"type": "string"}}}


def objects(definitions: int) -> dict[str, Any]:
    def one(i: int) -> dict[str, Any]:
        return {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}, "required": ["a"]}

    defined: dict[str, Any] = {f"d{i}": one(i) for i in range(definitions)}
    return {"$ref": "#/$defs/d0", "$defs": defined | {f"d{definitions}": {"type": "string"}}}


def form(**spec: Any) -> dict[str, Any]:
    return chat("What is the weather?", max_tokens=40, structured_outputs=spec)


def tool(parameters: dict[str, Any]) -> dict[str, Any]:
    function = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    return chat("What is the weather?", max_tokens=40, tools=[function], tool_choice="required")


def schema(of: dict[str, Any]) -> dict[str, Any]:
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": of}}
    return chat("What is the weather?", max_tokens=40, response_format=asked)


# name -> (body, the field that the error names)
KILLERS: dict[str, tuple[dict[str, Any], str]] = {
    "3,500 rules": (form(grammar=chain(3500)), "structured_outputs.grammar"),
    "1,900 rules": (form(grammar=chain(1900)), "structured_outputs.grammar"),
    "1,500 references": (schema(references(1500)), "response_format.json_schema.schema"),
    "1,000 objects": (schema(objects(1000)), "response_format.json_schema.schema"),
    "a tool's 1,500 references": (tool({"properties": {"a": references(1500)}}), "tools[0].function.parameters"),
    "10,000 rules of GBNF": (form(grammar=gbnf(10_000)), "structured_outputs.grammar"),
    "1,900 rules of GBNF": (form(grammar=gbnf(1900)), "structured_outputs.grammar"),
}
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no root": (form(grammar='other ::= "a"'), "structured_outputs.grammar"),
    "an undefined rule": (form(grammar="root ::= missing"), "structured_outputs.grammar"),
    "an empty grammar": (form(grammar=""), "structured_outputs.grammar"),
    "an endless schema": (
        schema({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}),
        "response_format.json_schema.schema",
    ),
    "a constant of 250,000 characters": (schema({"const": "a" * 250_000}), "response_format.json_schema.schema"),
    "2,000 properties": (
        schema({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}}),
        "response_format.json_schema.schema",
    ),
    "30,000 values": (schema({"enum": list(range(30_000))}), "response_format.json_schema.schema"),
    "nested 300 deep": (form(json='{"not":' * 300 + "{}" + "}" * 300), "structured_outputs.json"),
    "long masks": (
        form(grammar="start: A\nA: " + " ".join(['"' + "a" * 4000 + '"'] * 60)),
        "structured_outputs.grammar",
    ),
}


async def refused(client: httpx.AsyncClient, body: dict[str, Any], param: str) -> None:
    """Check for a 400 that names ``param``. A 429 with Retry-After is repeated."""
    answer = await client.post("/v1/chat/completions", json=body)
    while answer.status_code == 429:
        await asyncio.sleep(int(answer.headers["Retry-After"]))
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].replace(".properties.a", "") == param


@pytest.mark.parametrize("name", KILLERS)
async def test_what_overflows_a_stack_harms_nobody(client: httpx.AsyncClient, beside: Beside[Any], name: str) -> None:
    """Ten clients send the form, a hundred times in all."""
    body, param = KILLERS[name]

    async def send() -> None:
        for _ in range(10):
            await refused(client, body, param)

    await beside(asyncio.gather(*(send() for _ in range(10))))


@pytest.mark.parametrize("name", MISTAKES)
async def test_a_mistake_is_named(client: httpx.AsyncClient, beside: Beside[Any], name: str) -> None:
    await beside(asyncio.gather(*(refused(client, *MISTAKES[name]) for _ in range(3))))
    answer = await client.post("/v1/chat/completions", json=form(json_object=True) | {"max_tokens": 2})
    assert answer.status_code == 200  # an earlier refusal does not affect other forms


async def test_small_forms_pass_large_ones(client: httpx.AsyncClient, beside: Beside[Any]) -> None:
    """Sixty different forms that take two seconds each, and a form with one field."""
    heavy = [asyncio.ensure_future(client.post("/v1/chat/completions", json=form(grammar=gbnf(1900, f"b{i}"))))
             for i in range(60)]  # fmt: skip
    await asyncio.wait(heavy, return_when=asyncio.FIRST_COMPLETED)
    answer = await client.post("/v1/chat/completions", json=schema(SMALL))
    assert json.loads(answer.json()["choices"][0]["message"]["content"]) == {"city": "Paris"}
    assert sum(task.done() for task in heavy) < 60
    told = [task.result() for task in heavy if task.done()]
    assert {found.status_code for found in told} <= {400, 429}
    assert all(found.headers["Retry-After"] for found in told if found.status_code == 429)
    for task in heavy:
        task.cancel()
    await asyncio.gather(*heavy, return_exceptions=True)
    await beside(client.post("/v1/chat/completions", json=schema(SMALL)))


async def test_wide_forms_are_served_beside_others(client: httpx.AsyncClient, beside: Beside[Any]) -> None:
    """These forms are within the limits. Each matcher is created before its first step."""
    wide = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(300)}}
    answers = await beside(
        asyncio.gather(*(client.post("/v1/chat/completions", json=schema(wide | {"title": f"{i}"})) for i in range(8)))
    )
    assert [answer.status_code for answer in answers] == [200] * 8
