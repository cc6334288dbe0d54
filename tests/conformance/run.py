"""Sends every request of the conformance run to a server, and checks each object of the answers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import anthropic
import httpx
import orjson
from pydantic import TypeAdapter, ValidationError

from tests.conformance.cases import RESPONSE, Case, cases
from tests.conformance.specification import violations


@dataclass
class Report:
    """The number of checked objects by schema, and the violations."""

    checked: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def check(self, value: Any, schema: str, where: str) -> None:
        """Check one object."""
        self.checked[schema] += 1
        self.faults += [f"{where}: {fault}" for fault in faults_of(value, schema)]

    def expect(self, holds: bool, what: str) -> None:
        """Record a violation that no schema can express."""
        if not holds:
            self.faults.append(what)


@lru_cache
def _adapter(name: str) -> TypeAdapter[Any]:
    return TypeAdapter(getattr(anthropic.types, name))


def faults_of(value: Any, schema: str) -> list[str]:
    """The errors in an object. Anthropic's client models check Anthropic's objects, the specification OpenAI's."""
    if not schema.startswith("anthropic."):
        return violations(value, schema)
    if schema == "anthropic.RawMessageStreamEvent" and value == {"type": "ping"}:
        return []
    try:
        _adapter(schema.removeprefix("anthropic.")).validate_python(value, extra="forbid", strict=True)
    except ValidationError as error:
        return [f"{schema}: {error}"[:400]]
    return []


def run(client: httpx.Client) -> Report:
    """Send all requests to the server at ``client``'s base URL."""
    report = Report()
    models = client.get("/v1/models").json()
    report.check(models, "ListModelsResponse", "/v1/models")
    model = models["data"][0]["id"]
    report.check(client.get(f"/v1/models/{model}").json(), "Model", "/v1/models/{id}")
    report.check(client.get("/v1/models/other").json(), "ErrorResponse", "/v1/models/other")
    for case in cases():
        _send(client, case, model, report)
    _stored(client, model, report)
    _conversation(client, model, report)
    return report


def _send(client: httpx.Client, case: Case, model: str, report: Report) -> None:
    where = f"{case.path} {orjson.dumps(case.body).decode()[:120]}"
    answer = client.post(case.path, json={"model": model} | case.body)
    report.expect(answer.status_code == case.status, f"{where}: status {answer.status_code}, {answer.text[:200]}")
    if answer.status_code != case.status:
        return
    if answer.headers["content-type"].startswith("text/event-stream"):
        for event in stream_events(answer.text, case.path, where, report):
            report.check(event, case.schema, where)
    else:
        report.check(answer.json(), case.schema, where)


def stream_events(text: str, path: str, where: str, report: Report) -> list[Any]:
    """The events of a stream. Checks their framing and order."""
    report.expect(text.endswith("\n\n"), f"{where}: the stream does not end with an event")
    found = []
    lines = (line for line in text.rstrip("\n").split("\n") if not line.startswith(("id: ", ":")))
    blocks = [block for block in "\n".join(lines).split("\n\n") if block]
    if path in ("/v1/chat/completions", "/v1/completions"):
        report.expect(blocks.pop() == "data: [DONE]", f"{where}: the stream does not end with [DONE]")
    for block in blocks:
        name, _, data = block.rpartition("\n")
        event = orjson.loads(data.removeprefix("data: "))
        named = f"event: {event['type']}" if "type" in event else ""
        report.expect(name == named, f"{where}: {name!r} before {event}")
        found.append(event)
    numbers = [event["sequence_number"] for event in found if "sequence_number" in event]
    report.expect(numbers == list(range(len(numbers))), f"{where}: sequence numbers {numbers}")
    return found


def _stored(client: httpx.Client, model: str, report: Report) -> None:
    """Stored responses: fetched, listed, chained, cancelled, deleted."""
    path = "/v1/responses"
    first = client.post(path, json={"model": model} | RESPONSE).json()
    chained = client.post(path, json={"model": model, "previous_response_id": first["id"]} | RESPONSE).json()
    background = client.post(path, json={"model": model, "background": True} | RESPONSE | {"max_output_tokens": 900})
    report.check(background.json(), "Response", "in the background")
    cancelled = client.post(f"{path}/{background.json()['id']}/cancel")
    report.check(cancelled.json(), "Response", "cancelled")
    for response in (first, chained):
        stored = client.get(f"{path}/{response['id']}").json()
        report.check(stored, "Response", "fetched")
        report.expect(stored == response, "a stored response differs from what was answered")
        report.check(client.get(f"{path}/{response['id']}/input_items").json(), "ResponseItemList", "input_items")
        report.expect(client.delete(f"{path}/{response['id']}").json()["deleted"], "a response is not deleted")
        report.check(client.get(f"{path}/{response['id']}").json(), "ErrorResponse", "after its end")


def _conversation(client: httpx.Client, model: str, report: Report) -> None:
    """A conversation with its items and a response."""
    made = client.post(
        "/v1/conversations", json={"items": [{"role": "user", "content": "Hello"}], "metadata": {"a": "b"}}
    )
    report.check(made.json(), "ConversationResource", "a conversation")
    path = f"/v1/conversations/{made.json()['id']}"
    response = client.post("/v1/responses", json={"model": model, "conversation": made.json()["id"]} | RESPONSE).json()
    report.check(response, "Response", "of a conversation")
    call = {"type": "custom_tool_call", "call_id": "c", "name": "note", "input": "x"}
    more = [call, {"type": "custom_tool_call_output", "call_id": "c", "output": "noted"}]
    report.check(client.post(f"{path}/items", json={"items": more}).json(), "ConversationItemList", "added")
    listed = client.get(f"{path}/items", params={"order": "asc"}).json()
    report.check(listed, "ConversationItemList", "listed")
    kinds = [item["type"] for item in listed["data"]]
    expected = ["message", "message", *(item["type"] for item in response["output"]), *(item["type"] for item in more)]
    report.expect(kinds == expected, f"the items of a conversation are {kinds}")
    item = f"{path}/items/{listed['data'][0]['id']}"
    report.check(client.get(item).json(), "ConversationItem", "one item")
    report.check(client.delete(item).json(), "ConversationResource", "without an item")
    report.check(client.get(item).json(), "ErrorResponse", "a deleted item")
    report.check(client.post(path, json={"metadata": {}}).json(), "ConversationResource", "changed")
    report.check(client.delete(path).json(), "DeletedConversationResource", "deleted")
    report.check(client.get(path).json(), "ErrorResponse", "a deleted conversation")
