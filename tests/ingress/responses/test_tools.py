"""Tools of /v1/responses: custom tools, namespaces, allowed tools, and tools that OpenAI's servers run."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from raylm.frontend import RequiredTool
from raylm.frontend.answers.answer_format import AnswerFormat
from raylm.frontend.answers.tool_calls import TOOL_PARSERS
from raylm.ingress.openai.chat import ChatCompletionRequest
from raylm.ingress.responses.body import ResponsesRequest
from raylm.ingress.responses.tools import callables, chosen
from tests.ingress.fake_llm import FakeAsyncLLM
from tests.ingress.refused import error_of
from tests.ingress.responses.test_responses import BODY, PATH, create, stream

FUNCTION: dict[str, Any] = {"type": "function", "name": "close", "description": "Close it.", "parameters": {}}
CUSTOM: dict[str, Any] = {"type": "custom", "name": "patch", "description": "Patch files."}
NAMESPACE: dict[str, Any] = {
    "type": "namespace", "name": "agents", "description": "Other agents.", "tools": [FUNCTION, CUSTOM],
}  # fmt: skip
IGNORED = "x-raylm-ignored-fields"


def let_call(llm: FakeAsyncLLM, *calls: tuple[str, dict[str, Any]]) -> None:
    llm.reply = "".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>\n"
        for name, arguments in calls
    )
    names = {name: {} for name, _ in calls}
    llm.answer_format = AnswerFormat(reasoning=None, thinking=None, tool_parser=TOOL_PARSERS["hermes"], tools=names)


def as_chat(body: ResponsesRequest) -> ChatCompletionRequest:
    return body.as_chat([{"role": "user", "content": "Hi"}], *chosen(body.tool_choice, callables(body.tools)), None)


def functions(llm: FakeAsyncLLM) -> list[dict[str, Any]]:
    return [tool["function"] for tool in llm.rendered[-1].tools or ()]


@pytest.mark.parametrize("step", [1, 7, 500])
async def test_a_custom_tool_is_called_with_text(client: httpx.AsyncClient, llm: FakeAsyncLLM, step: int) -> None:
    text = 'line "1"\n\tö \\ 🙂'
    let_call(llm, ("patch", {"input": text}))
    llm.step = step
    (call,) = (await create(client, tools=[CUSTOM]))["output"]
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "patch", text)
    parameters = functions(llm)[0]["parameters"]
    assert parameters["properties"] == {"input": {"type": "string"}}
    events = await stream(client, tools=[CUSTOM])
    deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    (done,) = [event["input"] for event in events if event["type"] == "response.custom_tool_call_input.done"]
    assert "".join(deltas) == done == text
    assert events[-1]["response"]["output"][0]["input"] == text


async def test_a_custom_tools_call_and_output_are_read_back(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    let_call(llm, ("patch", {"input": "a\nb"}))
    first = await create(client, tools=[CUSTOM])
    call = first["output"][0]
    output = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "done"}
    for fields in (
        {"input": [output], "previous_response_id": first["id"]},
        {"input": [{"role": "user", "content": "Hi"}, call, output]},
    ):
        await create(client, tools=[CUSTOM], **fields)
        _, turn, result = llm.rendered[-1].messages
        (said,) = turn["tool_calls"]
        assert said["function"] == {"name": "patch", "arguments": {"input": "a\nb"}}
        assert (result["tool_call_id"], result["content"]) == (said["id"], "done")


async def test_a_regex_holds_a_custom_tools_text(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    let_call(llm, ("patch", {"input": "12"}))
    form = {"type": "grammar", "syntax": "regex", "definition": "[0-9]+"}
    await create(client, tools=[CUSTOM | {"format": form}])
    (function,) = functions(llm)
    assert function["strict"] is True
    assert function["parameters"]["properties"]["input"] == {"type": "string", "pattern": "^(?:[0-9]+)$"}


async def test_a_namespace_is_expanded_and_named_in_its_calls(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    let_call(llm, ("agents__close", {"a": 1}), ("agents__patch", {"input": "x"}), ("close", {}))
    response = await create(client, tools=[FUNCTION, NAMESPACE])
    assert [function["name"] for function in functions(llm)] == ["close", "agents__close", "agents__patch"]
    assert functions(llm)[1]["description"] == "Other agents.\nClose it."
    assert [(item["type"], item["name"], item.get("namespace")) for item in response["output"]] == [
        ("function_call", "close", "agents"), ("custom_tool_call", "patch", "agents"), ("function_call", "close", None),
    ]  # fmt: skip
    assert [tool["type"] for tool in response["tools"]] == ["function", "namespace"]
    results = [
        {"type": item["type"] + "_output", "call_id": item["call_id"], "output": "R"} for item in response["output"]
    ]
    await create(client, input=results, previous_response_id=response["id"], tools=[FUNCTION, NAMESPACE])
    turn = llm.rendered[-1].messages[1]
    assert [call["function"]["name"] for call in turn["tool_calls"]] == ["agents__close", "agents__patch", "close"]


async def test_tools_that_openai_runs_are_unavailable_and_named(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    search = {"type": "web_search", "external_web_access": False}
    answer = await client.post(PATH, json=BODY | {"tools": [search, FUNCTION]})
    assert answer.status_code == 200, answer.text
    assert answer.headers[IGNORED] == "tools[].web_search"
    assert [tool["name"] for tool in answer.json()["tools"]] == ["close"]
    assert [function["name"] for function in functions(llm)] == ["close"]
    forced = {"tools": [search, FUNCTION], "tool_choice": {"type": "web_search"}}
    assert error_of(await client.post(PATH, json=BODY | forced))["param"] == "tool_choice.type"


@pytest.mark.parametrize(
    ("choice", "names", "tool_choice"),
    [
        ({"type": "custom", "name": "patch"}, ["close", "patch", "agents__close"], RequiredTool("patch")),
        ({"type": "function", "name": "agents__close"}, ["close", "patch", "agents__close"],
         RequiredTool("agents__close")),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "agents__close"}]},
         ["agents__close"], "required"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "patch"}]}, ["patch"], "auto"),
    ],
)  # fmt: skip
def test_choices(choice: dict[str, Any], names: list[str], tool_choice: object) -> None:
    namespace = NAMESPACE | {"tools": [FUNCTION]}
    body = ResponsesRequest.parse(BODY | {"tools": [FUNCTION, CUSTOM, namespace], "tool_choice": choice})
    asked = as_chat(body).chat_request(any_length=True)
    assert [tool["function"]["name"] for tool in asked.tools or ()] == names
    assert asked.tool_choice == tool_choice


def test_the_only_tool_of_a_name_is_chosen_by_it() -> None:
    choice = {"type": "function", "name": "close"}
    body = ResponsesRequest.parse(BODY | {"tools": [NAMESPACE], "tool_choice": choice})
    asked = as_chat(body).chat_request(any_length=True)
    assert asked.tool_choice == RequiredTool("agents__close")


LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "a" start "b" | "c"'}
ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "computer"}]}, "tools[0].type"),
    ({"tools": [{"type": "custom"}]}, "tools[0].name"),
    ({"tools": [CUSTOM | {"format": LARK}]}, "tools[0].format.definition"),
    ({"tools": [CUSTOM | {"format": LARK | {"syntax": "gbnf"}}]}, "tools[0].format.syntax"),
    ({"tools": [CUSTOM | {"format": LARK | {"definition": "x" * 2**19}}]}, "tools[0].format.definition"),
    ({"tools": [CUSTOM | {"format": {"type": "json"}}]}, "tools[0].format.type"),
    ({"tools": [NAMESPACE | {"tools": []}]}, "tools[0].tools"),
    ({"tools": [NAMESPACE | {"tools": [{"type": "web_search"}]}]}, "tools[0].tools[0].type"),
    ({"tools": [FUNCTION | {"zzz": 1}]}, "tools[0].zzz"),
    ({"tools": [FUNCTION, CUSTOM | {"name": "close"}]}, "tools[1].name"),
    ({"tools": [NAMESPACE, FUNCTION | {"name": "agents__close"}]}, "tools[0].tools[0].name"),
    ({"tools": [FUNCTION], "tool_choice": ALLOWED}, "tool_choice.tools[0].name"),
    ({"tools": [FUNCTION], "tool_choice": ALLOWED | {"mode": "none"}}, "tool_choice.mode"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.function.name"),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
async def test_refusals(client: httpx.AsyncClient, fields: dict[str, Any], param: str) -> None:
    assert error_of(await client.post(PATH, json=BODY | fields))["param"] == param


async def test_what_a_client_says_of_itself_changes_nothing(client: httpx.AsyncClient) -> None:
    answer = await client.post(PATH, json=BODY | {"client_metadata": {"thread_id": "t"}})
    assert answer.status_code == 200
    assert IGNORED not in answer.headers


async def test_an_output_that_no_model_asked_for(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    """Codex sends the objective of a goal in this form."""
    output = {"type": "function_call_output", "name": "goal_objective", "namespace": "agent", "output": "Write."}
    made = await create(client, input=[{"role": "user", "content": "Hi"}, output], store=True)
    assert llm.rendered[-1].messages[-1] == {"role": "system", "content": "agent.goal_objective: Write."}
    listed = (await client.get(f"{PATH}/{made['id']}/input_items?order=asc")).json()["data"]
    assert {name: listed[1][name] for name in output} == output
    assert "call_id" not in listed[1]
    del output["name"]
    answer = await client.post(PATH, json=BODY | {"input": [{"role": "user", "content": "Hi"}, output]})
    assert error_of(answer, 400)["param"] == "input[1].call_id"
