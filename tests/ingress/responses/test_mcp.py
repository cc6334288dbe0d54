"""Tools of MCP servers, called for the model: items, events, approvals, refusals, and no repeated calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest

from raylm.config import Config
from raylm.errors import ConfigError
from raylm.frontend import AsyncLLM
from raylm.ingress import build_asgi_app
from raylm.ingress.responses.create import CreateResponse
from raylm.ingress.responses.mcp.servers import McpServers
from raylm.messages import EngineCoreRequest, FinishReason
from tests.conformance.plays import answer_to
from tests.ingress.harness import client_of, served, typed_events, until
from tests.ingress.openai.test_openai_schema import check
from tests.ingress.refused import error_of
from tests.ingress.responses.mcp_server import Notes, mcp_server
from tests.ingress.responses.test_background import PausingEngine, Replica, end_leases, status, texts
from tests.ingress.writing_engine import TOKENIZER

PATH = "/v1/responses"
NOTE = ("notes__note", {"text": "once"})


class PlayingEngine(PausingEngine):
    """Makes the calls in the prompt's last line ``PLAY``, turn by turn, and then repeats what it read."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.prompts: list[str] = []
        self.pause: tuple[int, int] | None = (
            None  # number of a sequence, and of its outputs before the engine is silent
        )

    def add(self, request: EngineCoreRequest) -> None:
        self.prompts.append(TOKENIZER.decode(list(request.prompt_token_ids), skip_special_tokens=False))
        if self.pause is not None and len(self.prompts) == self.pause[0]:
            self.quota = self.pause[1]
        super().add(request)

    def _ends(self, request: EngineCoreRequest) -> tuple[dict[int, FinishReason], dict[int, list[int]]]:
        prompt = TOKENIZER.decode(list(request.prompt_token_ids), skip_special_tokens=False)
        ids = [*TOKENIZER.encode(answer_to(prompt), add_special_tokens=False).ids, request.eos_token_ids[0]]
        limit = request.params.max_tokens or 0
        return {0: "stop" if len(ids) <= limit else "length"}, {0: ids[:limit]}


class McpReplica(Replica):
    """An ingress that may call one server."""

    def __init__(self, path: Path | str, notes: Notes, seed: int = 0, **knobs: Any) -> None:
        knobs = {"store": str(path), "mcp_servers": [notes.url]} | knobs
        config = Config.model_validate({"model": "embedded", "ingress": knobs})
        self.llm, self.playing = AsyncLLM(config), PlayingEngine(seed)
        self.engine = self.playing
        self.llm.add_engine(self.engine)
        app = build_asgi_app(self.llm, config)
        take_over, _ = app.state.jobs
        self.responses: CreateResponse = take_over.__self__
        self.client = client_of(app)
        self.app = app


@pytest.fixture
async def notes() -> AsyncIterator[Notes]:
    async with mcp_server() as found:
        yield found


@pytest.fixture
async def replica(notes: Notes) -> AsyncIterator[McpReplica]:
    found = McpReplica(":memory:", notes)
    yield found
    await found.end()


def tool(notes: Notes, **options: Any) -> dict[str, Any]:
    return {"type": "mcp", "server_label": "notes", "server_url": notes.url, "require_approval": "never"} | options


def play(*turns: list[tuple[str, dict[str, Any]]]) -> str:
    return f"PLAY {json.dumps(turns)}"


async def create(replica: Replica, status: int = 200, **fields: Any) -> dict[str, Any]:
    answer = await replica.client.post(PATH, json={"model": "embedded"} | fields, timeout=300)
    assert answer.status_code == status, answer.text
    found: dict[str, Any] = answer.json()
    if status == 200:
        check(found, "Response")
    return found


async def stream(replica: Replica, **fields: Any) -> list[dict[str, Any]]:
    answer = await replica.client.post(PATH, json={"model": "embedded", "stream": True} | fields, timeout=300)
    assert answer.status_code == 200, answer.text
    events = typed_events(answer.text.replace(": waiting\n\n", ""))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        check(event, "ResponseStreamEvent")
    return events


def kinds(response: dict[str, Any]) -> list[str]:
    return [item["type"] for item in response["output"]]


async def test_a_call_is_made_and_the_model_goes_on(replica: McpReplica, notes: Notes) -> None:
    response = await create(replica, input=play([NOTE]), tools=[tool(notes)])
    assert response["status"] == "completed"
    assert kinds(response) == ["mcp_list_tools", "mcp_call", "message"]
    listed, call, message = response["output"]
    assert [found["name"] for found in listed["tools"]] == ["note", "read", "fail", "long"]
    assert listed["tools"][1]["annotations"] == {"readOnlyHint": True}
    expected = {"server_label": "notes", "name": "note", "output": "noted once", "error": None, "status": "completed"}
    assert expected.items() <= call.items()
    assert json.loads(call["arguments"]) == {"text": "once"}
    assert message["content"][0]["text"] == "Done."
    assert notes.noted == ["once"]
    first, second = replica.playing.prompts
    assert '"notes__note"' in first
    assert "noted once" in second
    assert response["usage"]["output_tokens"] > len(TOKENIZER.encode("Done.").ids) + 10  # of both sequences
    assert len(replica.engine.added) == 2
    assert len({request.request_id for request in replica.engine.added}) == 2


async def test_events_come_in_order(replica: McpReplica, notes: Notes) -> None:
    events = await stream(replica, input=play([NOTE, ("notes__read", {})]), tools=[tool(notes)])
    seen = [event["type"].removeprefix("response.") for event in events]
    in_order = [kind for kind, before in zip(seen, ["", *seen], strict=False) if kind != before]  # merges deltas
    call = ["output_item.added", "mcp_call.in_progress", "mcp_call_arguments.delta", "mcp_call_arguments.done"]
    assert in_order == [
        "created", "in_progress",
        "output_item.added", "mcp_list_tools.in_progress", "mcp_list_tools.completed", "output_item.done",
        *call, *call,
        "mcp_call.completed", "output_item.done", "mcp_call.completed", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    assert [event["output_index"] for event in events if event["type"] == "response.mcp_call.completed"] == [1, 2]
    done = {event["output_index"]: event["item"] for event in events if event["type"] == "response.output_item.done"}
    assert [done[place] for place in range(4)] == events[-1]["response"]["output"]
    assert texts(events)[1, "response.mcp_call_arguments.delta"] == done[1]["arguments"]
    assert done[2]["output"] == "once"


async def test_several_rounds_and_their_limits(replica: McpReplica, notes: Notes) -> None:
    three = play(*([("notes__note", {"text": str(number)})] for number in range(3)))
    response = await create(replica, input=three, tools=[tool(notes)], tool_choice="required")
    assert kinds(response) == ["mcp_list_tools", *["mcp_call"] * 3, "message"]
    assert notes.noted == ["0", "1", "2"]
    four = play([("notes__note", {"text": str(number)}) for number in range(4)])
    response = await create(replica, input=four, tools=[tool(notes)], max_tool_calls=2)
    assert [item["status"] for item in response["output"][1:]] == ["completed"] * 2 + ["failed"] * 2 + ["completed"]
    assert "max_tool_calls" in response["output"][3]["error"]["message"]
    assert notes.noted == ["0", "1", "2", "0", "1"]
    assert '"notes__note"' not in replica.playing.prompts[-1].split("PLAY")[0]
    cut = play([("notes__note", {"text": "x " * 200})])
    short = await create(replica, input=cut, tools=[tool(notes)], max_output_tokens=60)
    assert short["status"] == "incomplete"
    assert kinds(short)[:2] == ["mcp_list_tools", "mcp_call"]
    assert short["output"][1]["status"] == "incomplete"
    assert notes.noted[5:] == []


async def test_the_next_turn_reads_calls_and_asks_no_list(replica: McpReplica, notes: Notes) -> None:
    first = await create(replica, input=play([NOTE]), tools=[tool(notes)])
    asked = len(notes.headers)
    second = await create(replica, input="And?", tools=[tool(notes)], previous_response_id=first["id"])
    assert kinds(second) == ["message"]
    assert len(notes.headers) == asked
    stateless = [{"role": "user", "content": play([NOTE])}, *first["output"], {"role": "user", "content": "And?"}]
    await create(replica, input=stateless, tools=[tool(notes)])
    assert len(notes.headers) == asked
    *_, chained, replayed = replica.playing.prompts
    assert chained == replayed
    assert "noted once" in chained
    assert notes.noted == ["once"]


async def test_a_function_of_the_client_beside_a_call(replica: McpReplica, notes: Notes) -> None:
    function = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    both = play([NOTE, ("f", {"a": 1})])
    response = await create(replica, input=both, tools=[tool(notes), function])
    assert kinds(response) == ["mcp_list_tools", "mcp_call", "function_call"]
    assert notes.noted == ["once"]
    assert len(replica.engine.added) == 1
    call_id = response["output"][2]["call_id"]
    result = [{"type": "function_call_output", "call_id": call_id, "output": "f's result"}]
    after = await create(replica, input=result, tools=[tool(notes), function], previous_response_id=response["id"])
    assert kinds(after) == ["message"]
    assert "noted once" in replica.playing.prompts[-1]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("stateless", [False, True])
async def test_an_approved_call_is_made_once(
    replica: McpReplica, notes: Notes, streamed: bool, stateless: bool
) -> None:
    always = tool(notes, require_approval=None)
    if streamed:
        events = await stream(replica, input=play([NOTE]), tools=[always])
        first = events[-1]["response"]
        assert [event["type"] for event in events[-3:]] == [
            "response.output_item.added", "response.output_item.done", "response.completed",
        ]  # fmt: skip
    else:
        first = await create(replica, input=play([NOTE]), tools=[always])
    assert kinds(first) == ["mcp_list_tools", "mcp_approval_request"]
    asked = first["output"][1]
    assert asked.keys() == {"id", "type", "server_label", "name", "arguments"}
    assert notes.noted == []
    answer = {"type": "mcp_approval_response", "approval_request_id": asked["id"], "approve": True}
    given = [{"role": "user", "content": play([NOTE])}, *first["output"], answer] if stateless else [answer]
    more = {"tools": [always], "input": given} | ({} if stateless else {"previous_response_id": first["id"]})
    if streamed:
        events = await stream(replica, **more)
        assert [event["type"].removeprefix("response.") for event in events[:8]] == [
            "created", "in_progress", "output_item.added", "mcp_call.in_progress", "mcp_call_arguments.delta",
            "mcp_call_arguments.done", "mcp_call.completed", "output_item.done",
        ]  # fmt: skip
        second = events[-1]["response"]
    else:
        second = await create(replica, **more)
    assert kinds(second) == ["mcp_call", "message"]
    assert second["output"][0]["approval_request_id"] == asked["id"]
    assert second["output"][0]["output"] == "noted once"
    assert notes.noted == ["once"]
    again = await create(replica, **more)  # as a client that repeats its request
    assert again["output"][0]["status"] == "failed"
    assert notes.noted == ["once"]
    await create(replica, input="And?", tools=[always], previous_response_id=second["id"])
    whole = [*(given if stateless else []), *second["output"], {"role": "user", "content": "And?"}]
    if stateless:
        assert kinds(await create(replica, input=whole, tools=[always])) == ["message"]
    assert notes.noted == ["once"]


async def test_a_refused_call_is_not_made_and_the_model_reads_why(replica: McpReplica, notes: Notes) -> None:
    always = tool(notes, require_approval="always")
    first = await create(replica, input=play([NOTE]), tools=[always])
    answer = {"type": "mcp_approval_response", "approval_request_id": first["output"][1]["id"], "approve": False}
    more = {"tools": [always], "previous_response_id": first["id"], "input": [answer | {"reason": "Not today."}]}
    assert kinds(await create(replica, **more)) == ["message"]
    assert "did not approve this call. Not today." in replica.playing.prompts[-1]
    assert notes.noted == []


@pytest.mark.parametrize(
    ("rule", "asks"),
    [
        ({"never": {"read_only": True}}, {"note", "fail", "long"}),
        ({"always": {"tool_names": ["read"]}}, {"note", "read", "fail", "long"}),
        ({"never": {"tool_names": ["note", "read"]}}, {"fail", "long"}),
        ({"always": {"tool_names": ["read"]}, "never": {"read_only": True}}, {"note", "read", "fail", "long"}),
    ],
)
async def test_rules_for_approval(replica: McpReplica, notes: Notes, rule: dict[str, Any], asks: set[str]) -> None:
    for name in ("note", "read", "fail", "long"):
        arguments = {"note": {"text": "once"}, "fail": {"reason": "because"}}.get(name, {})
        response = await create(
            replica, input=play([(f"notes__{name}", arguments)]), tools=[tool(notes, require_approval=rule)]
        )
        assert (kinds(response)[1] == "mcp_approval_request") == (name in asks), name


@pytest.mark.parametrize(
    ("allowed", "names"),
    [(["note"], ["note"]), ({"read_only": True}, ["read"]), ({"tool_names": ["read", "fail"]}, ["read", "fail"])],
)
async def test_allowed_tools(replica: McpReplica, notes: Notes, allowed: Any, names: list[str]) -> None:
    response = await create(replica, input="Hi", tools=[tool(notes, allowed_tools=allowed)])
    assert [found["name"] for found in response["output"][0]["tools"]] == names


async def test_choices(replica: McpReplica, notes: Notes) -> None:
    for choice in (
        {"type": "mcp", "server_label": "notes", "name": "read"},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp", "server_label": "notes", "name": "read"}]},
    ):
        response = await create(replica, input=play([("notes__read", {})]), tools=[tool(notes)], tool_choice=choice)
        assert kinds(response) == ["mcp_list_tools", "mcp_call", "message"]
        offered = replica.playing.prompts[-2].split("PLAY")[0]
        assert "notes__read" in offered
        assert "notes__note" not in offered
    for choice, param in (
        ({"type": "mcp", "server_label": "other"}, "tool_choice.server_label"),
        ({"type": "mcp", "server_label": "notes", "name": "other"}, "tool_choice.name"),
    ):
        error = (await create(replica, 400, input="Hi", tools=[tool(notes)], tool_choice=choice))["error"]
        assert error["param"] == param


async def test_what_goes_wrong_in_a_call_is_the_models_to_read(replica: McpReplica, notes: Notes) -> None:
    for name, arguments, kind, text in (
        ("fail", {"reason": "no ink"}, "mcp_tool_execution_error", "no ink"),
        ("note", {}, "mcp_tool_execution_error", "text"),
        ("long", {}, "mcp_protocol_error", "2,000,000"),
    ):
        events = await stream(replica, input=play([(f"notes__{name}", arguments)]), tools=[tool(notes)])
        assert "response.mcp_call.failed" in {event["type"] for event in events}
        call = events[-1]["response"]["output"][1]
        assert (call["status"], call["error"]["type"], call["output"]) == ("failed", kind, None)
        assert text in orjson.dumps(call["error"]).decode()
        assert "Error: " in replica.playing.prompts[-1]


async def test_what_only_the_server_may_read_is_sent_to_it_alone(replica: McpReplica, notes: Notes) -> None:
    secret = tool(notes, authorization="sesame", headers={"x-team": "blue"})
    response = await create(replica, input=play([NOTE]), tools=[secret])
    assert {(found["authorization"], found["x-team"]) for found in notes.headers} == {("Bearer sesame", "blue")}
    stored = (await replica.client.get(f"{PATH}/{response['id']}")).text
    for shown in (orjson.dumps(response).decode(), stored):
        assert "sesame" not in shown
        assert "blue" not in shown
    assert response["tools"][0]["server_url"] == notes.url


async def test_the_official_client(replica: McpReplica, notes: Notes) -> None:
    async with client_of(replica.app) as http:
        api = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=http)
        response = await api.responses.create(model="embedded", input=play([NOTE]), tools=[tool(notes)])  # type: ignore[list-item]
        assert [item.type for item in response.output] == ["mcp_list_tools", "mcp_call", "message"]
        assert response.output_text == "Done."


def urls(url: str) -> list[str]:
    """URLs that are not allowed if ``url`` is allowed."""
    base = url.removesuffix("/mcp")
    port = base.rpartition(":")[2]
    return [
        f"{base}/mcp2", f"{base}/", base, f"{base}/admin", "http://127.0.0.1:1/mcp", f"https://127.0.0.1:{port}/mcp",
        f"http://localhost:{port}/mcp", f"http://127.1:{port}/mcp", f"http://[::1]:{port}/mcp",
        "http://169.254.169.254/latest", f"http://0x7f000001:{port}/mcp",
    ]  # fmt: skip


BAD_URLS = [
    "", "mcp", "ftp://127.0.0.1/mcp", "file:///etc/passwd", "http://", "http://user@127.0.0.1/mcp", "{url}/../admin",
    "{url}/%2e%2e/admin", "{url}#x", "{url}\n", "{url} ", "http:\\\\127.0.0.1\\mcp", "{url}@evil.example/mcp",
    "http://evil.example\\@127.0.0.1/mcp", "http://127.0.0.1:99999/mcp", "{url}/./x", "http://ｅvil.example/",
    "x" * 3000,
]  # fmt: skip


async def test_only_servers_of_the_operator_are_called(replica: McpReplica, notes: Notes) -> None:
    for url in urls(notes.url):
        error = error_of(
            await replica.client.post(
                PATH, json={"model": "embedded", "input": "Hi", "tools": [tool(notes, server_url=url)]}
            ),
            asked="ingress.mcp_servers",
        )
        assert error["param"] == "tools[0].server_url"
        assert "ingress.mcp_servers" in error["message"]
    for url in BAD_URLS:
        body = {"model": "embedded", "input": "Hi", "tools": [tool(notes, server_url=url.format(url=notes.url))]}
        answer = await replica.client.post(PATH, json=body)
        assert answer.status_code == 400, (url, answer.text)
        assert answer.json()["error"]["param"] == "tools[0].server_url", url
    assert notes.headers == []
    below = tool(notes, server_url=f"{notes.url}/below")
    await create(replica, 424, input="Hi", tools=[below])
    assert set(notes.paths) == {"/mcp/below"}


async def test_none_is_allowed_by_default(notes: Notes) -> None:
    replica = McpReplica(":memory:", notes, mcp_servers=())
    error = (await create(replica, 400, input="Hi", tools=[tool(notes)]))["error"]
    assert (error["param"], error["code"]) == ("tools[0].server_url", "unsupported_field")
    await replica.end()


BAD: list[tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = [
    (lambda it: {"tools": [{k: v for k, v in it.items() if k != "server_url"}]}, "tools[0].server_url"),
    (lambda it: {"tools": [{k: v for k, v in it.items() if k != "server_label"}]}, "tools[0].server_label"),
    (lambda it: {"tools": [it | {"server_label": "a b"}]}, "tools[0].server_label"),
    (lambda it: {"tools": [it, it]}, "tools[1].server_label"),
    (lambda it: {"tools": [it | {"connector_id": "connector_gmail"}]}, "tools[0].connector_id"),
    (lambda it: {"tools": [it | {"defer_loading": True}]}, "tools[0].defer_loading"),
    (lambda it: {"tools": [it | {"require_approval": "sometimes"}]}, "tools[0].require_approval"),
    (lambda it: {"tools": [it | {"require_approval": {"zzz": {}}}]}, "tools[0].require_approval.zzz"),
    (lambda it: {"tools": [it | {"allowed_tools": {"zzz": True}}]}, "tools[0].allowed_tools.zzz"),
    (lambda it: {"tools": [it | {"allowed_tools": 5}]}, "tools[0].allowed_tools"),
    (lambda it: {"tools": [it | {"headers": {"a": 1}}]}, "tools[0].headers.a"),
    (lambda it: {"tools": [it | {"headers": {"Host": "evil.example"}}]}, "tools[0].headers"),
    (lambda it: {"tools": [it | {"headers": {"a": "b\r\nc: d"}}]}, "tools[0].headers"),
    (lambda it: {"tools": [it | {"authorization": "a\r\nb"}]}, "tools[0].authorization"),
    (lambda it: {"tools": [it, {"type": "function", "name": "notes__note"}]}, "tools[0].name"),
    (
        lambda it: {
            "tools": [it],
            "input": [{"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": True}],
        },
        "input[0].approval_request_id",
    ),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
async def test_refusals(
    replica: McpReplica, notes: Notes, fields: Callable[[dict[str, Any]], dict[str, Any]], param: str
) -> None:
    error = (await create(replica, 400, **({"input": "Hi"} | fields(tool(notes)))))["error"]
    assert error["param"] == param
    assert notes.noted == []


async def test_a_server_that_does_not_list_its_tools_fails_the_request_by_name() -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b"secret insides"})

    async with served(broken) as url:
        notes = Notes(url=f"{url}/mcp")
        replica = McpReplica(":memory:", notes)
        error = (await create(replica, 424, input="Hi", tools=[tool(notes)]))["error"]
        assert (error["param"], error["code"]) == ("tools[0].server_url", "failed_dependency")
        assert "secret" not in error["message"]
        await replica.end()
    replica = McpReplica(":memory:", notes)  # from now on no server listens there
    error = (await create(replica, 424, input="Hi", tools=[tool(notes)]))["error"]
    assert "could not be reached" in error["message"]
    await replica.end()


def test_servers_without_the_package_are_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mcp", None)
    McpServers((), 1.0)
    with pytest.raises(ConfigError, match=r"raylm\[mcp\]"):
        McpServers(("https://example.com/mcp",), 1.0)


async def test_a_call_that_hangs_ends(replica: McpReplica, notes: Notes) -> None:
    listed = (await create(replica, input="Hi", tools=[tool(notes)]))["output"][0]
    hurried = McpReplica(":memory:", notes, mcp_timeout_s=0.2)
    asked = {"role": "user", "content": play([("notes__note", {"text": "wait"})])}
    response = await create(hurried, input=[listed, asked], tools=[tool(notes)])
    assert response["output"][0]["error"]["message"] == "It did not answer within 0.2 s."
    await hurried.end()


async def lost(
    tmp_path: Path,
    notes: Notes,
    when: Callable[[McpReplica], bool],
    pause: tuple[int, int] | None = None,
    **fields: Any,
) -> list[dict[str, Any]]:
    """The events of a background response whose first maker is killed ``when`` holds. A second maker completes it."""
    path = tmp_path / "store"
    first = McpReplica(path, notes, seed=1)
    first.playing.pause = pause
    asking = asyncio.create_task(first.create(stream=True, seed=3, tools=[tool(notes)], **fields))
    await until(lambda: when(first) or asking.done())
    store = first.responses._store
    await store._do(lambda: None)
    ((response_id,),) = store._database.execute("SELECT id FROM responses").fetchall()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await end_leases(store)
    await first.end()
    second = McpReplica(path, notes, seed=5)
    second.engine.parks = True
    await second.responses.take_over_once()
    ended = await status(second.client, response_id)
    events = await second.follow(response_id)
    await second.end()
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        check(event, "ResponseStreamEvent")
    assert events[-1]["response"] == ended
    return events


THREE = play(*([("notes__note", {"text": str(number)})] for number in range(3)))


@pytest.mark.parametrize("sequence", [1, 2, 3, 4])
@pytest.mark.parametrize("outputs", [0, 1, 4])
async def test_a_lost_response_makes_each_call_once(tmp_path: Path, notes: Notes, sequence: int, outputs: int) -> None:
    events = await lost(tmp_path, notes, lambda first: first.engine.quota == 0, (sequence, outputs), input=THREE)
    response = events[-1]["response"]
    assert response["status"] == "completed"
    assert kinds(response) == ["mcp_list_tools", *["mcp_call"] * 3, "message"]
    assert notes.noted == ["0", "1", "2"]
    calm = McpReplica(":memory:", notes)
    same = await stream(calm, input=THREE, tools=[tool(notes)], seed=3)
    await calm.end()
    assert texts(events) == texts(same)
    for kind in ("output_item.added", "output_item.done", "mcp_call.completed", "mcp_call_arguments.done", "created"):
        counts = [sum(event["type"] == f"response.{kind}" for event in heard) for heard in (events, same)]
        assert counts[0] == counts[1], kind
    assert response["usage"] == same[-1]["response"]["usage"]


async def test_a_call_in_which_the_maker_is_lost_is_not_made_again(tmp_path: Path, notes: Notes) -> None:
    two = play([("notes__note", {"text": "wait"})], [("notes__note", {"text": "after"})])
    events = await lost(tmp_path, notes, lambda _: "wait" in notes.noted, input=two)
    response = events[-1]["response"]
    assert response["status"] == "completed"
    _, first, second, _ = response["output"]
    assert first["status"] == "failed"
    assert "not known" in first["error"]["message"]
    assert second["output"] == "noted after"
    assert notes.noted == ["wait", "after"]


async def test_an_approved_call_in_the_background(tmp_path: Path, notes: Notes) -> None:
    path = tmp_path / "store"
    first = McpReplica(path, notes)
    always = tool(notes, require_approval="always")
    wait = ("notes__note", {"text": "wait"})
    asked = (await create(first, input=play([wait]), tools=[always]))["output"][1]
    answer = {"type": "mcp_approval_response", "approval_request_id": asked["id"], "approve": True}
    given = [{"role": "user", "content": play([wait])}, asked, answer]
    made = (await first.create(stream=None, input=given, tools=[always])).json()
    await until(lambda: notes.noted == ["wait"])
    await end_leases(first.responses._store)
    await first.end()
    second = McpReplica(path, notes)
    await second.responses.take_over_once()
    ended = await status(second.client, made["id"])
    assert ended["status"] == "completed"
    assert [item["type"] for item in ended["output"]] == ["mcp_list_tools", "mcp_call", "message"]
    assert "made once" in ended["output"][1]["error"]["message"]
    assert notes.noted == ["wait"]
    await second.end()
