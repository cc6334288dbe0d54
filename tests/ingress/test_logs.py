"""The log lines of requests in an ingress, over the whole stack without a model: ids, but no content."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from raylm.frontend import current_id, open_observers
from raylm.stages import Format, LogSource, configure_logs
from tests.ingress.console.stack import Stack
from tests.ingress.test_real_llm import TEXT

PLANTED = "-".join(("planted", "prompt"))  # so that no line of this file contains it
CHAT = {"model": "embedded", "messages": [{"role": "user", "content": PLANTED}], "max_tokens": 4}


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    ours = logging.getLogger("raylm")
    before = list(ours.handlers), ours.level, ours.propagate
    yield
    ours.handlers[:], ours.level, ours.propagate = before


@pytest.mark.parametrize("kind", ["text", "json"])
async def test_no_line_has_anything_of_a_prompt_and_those_of_requests_have_their_ids(
    kind: Format, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    configure_logs(kind, LogSource("ingress", "app"), current_id)
    async with Stack(ingress={"slow_request_s": 0, "access_log": True}) as stack, stack.client() as client:
        stack.llm.timelines.observers = open_observers(stack.config, "app", "replica", stack.llm.text_of)

        async def ask(request_id: str, status: int, body: dict[str, Any], path: str = "/v1/chat/completions") -> str:
            answer = await client.post(path, json=body, headers={"x-request-id": request_id})
            assert answer.status_code == status, answer.text
            return answer.text

        said = json.loads(await ask("id-whole", 200, CHAT))["choices"][0]["message"]["content"]
        await ask("id-stream", 200, CHAT | {"stream": True})
        await ask("id-text", 200, TEXT | {"prompt": PLANTED, "stop": [PLANTED]}, "/v1/completions")
        await ask("id-long", 400, TEXT | {"prompt": PLANTED * 100}, "/v1/completions")
        await ask("id-field", 400, CHAT | {"temperature": PLANTED})
        await ask("id-role", 400, CHAT | {"messages": [{"role": PLANTED, "content": PLANTED}]})
        await ask("id-grammar", 400, CHAT | {"structured_outputs": {"regex": f"({PLANTED}"}})

        def fail(*_: object, **__: object) -> None:
            raise KeyError(PLANTED)

        monkeypatch.setattr(stack.llm._input, "build", fail)
        await ask("id-failing", 500, CHAT)
    written = capsys.readouterr().out
    assert PLANTED not in written
    assert said not in written
    lines = written.splitlines()
    for request_id in (
        f"id-{name}" for name in ("whole", "stream", "text", "long", "field", "role", "grammar", "failing")
    ):
        assert len([line for line in lines if "request.slow" in line and request_id in line]) == 1
        assert len([line for line in lines if "access" in line and f" s {request_id}" in line]) == 1
    assert "KeyError" in written
    if kind == "json":
        for line in map(json.loads, lines):
            assert line["process"] == "ingress"
            assert line["request_id"] in line["message"] != ""
        failing = [json.loads(line) for line in lines if "request.failed" in line]
        assert [line["request_id"] for line in failing] == ["id-failing"]


async def test_without_switches_a_request_leaves_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("text", LogSource("ingress", "app"), current_id)
    async with Stack() as stack, stack.client() as client:
        stack.llm.timelines.observers = open_observers(stack.config, "app", "replica", stack.llm.text_of)
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
    assert capsys.readouterr().out == ""
