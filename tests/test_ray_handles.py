"""Calls by handle from separate processes, and the composed application: requests of a gone caller are ended."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import httpx
import numpy as np
import pytest
import yaml

from tests.serving import ARGS, ROOT, Server, chat, free_port

pytestmark = pytest.mark.ray

QUESTION = "What is a KV cache?"
BEGIN = f"""
import asyncio, pickle, sys
import ray, raylm
from ray import serve
from raylm.errors import InvalidRequestError
ray.init(address="auto", namespace="serve", log_to_driver=False, logging_level="warning")
llm, plain = raylm.handle(), serve.get_app_handle("default")
HI = [{{"role": "user", "content": "{QUESTION}"}}]
LONG = {{"ignore_eos": True, "max_tokens": 7000}}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The example's Serve file on a free port, with a second application that has its own model."""
    port, path = free_port(), tmp_path_factory.mktemp("serve") / "serve.yaml"
    data = yaml.safe_load((ROOT / "examples" / "composed_app" / "serve.yaml").read_text())
    data["http_options"]["port"] = port
    data["applications"][0]["args"] |= ARGS
    data["applications"].append({"name": "bound", "import_path": "tests.bound_app:app", "route_prefix": "/bound"})
    path.write_text(yaml.safe_dump(data))
    with Server(path, port) as server:
        yield server


class Caller:
    """A separate Ray program. It prints one word a line, and waits for the test before it continues."""

    def __init__(self, server: Server, program: str) -> None:
        (address,) = re.findall(r"RAY_ADDRESS=(\S+) ray status", server.log.read_text())
        found = {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "token"}
        command = [sys.executable, "-c", BEGIN + program]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=ROOT, env=os.environ | found, stdin=pipe, stdout=pipe, text=True)

    def __enter__(self) -> Caller:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.communicate()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


def ended(server: Server, reason: str) -> int:
    """The number of sequences that have ended with ``reason``."""
    text = httpx.get(f"{server.url}/metrics", timeout=300).text
    return round(sum(map(float, re.findall(rf'^vllm:request_success_total{{.*"{reason}".*}} (\S+)$', text, re.M))))


def running(server: Server) -> float:
    text = httpx.get(f"{server.url}/metrics", timeout=300).text
    return sum(map(float, re.findall(r"^vllm:num_requests_(?:running|waiting){.*} (\S+)$", text, re.M)))


def post(server: Server, path: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(server.url + path, json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    return answer.json()


LET_GO = {
    "break": "for output in llm.chat(HI, **LONG):\n    say_and_wait()\n    break",
    "closed": "found = llm.chat(HI, **LONG)\nnext(found)\nsay_and_wait()\nfound.close()",
    "deleted": "found = llm.generate('Once', **LONG)\nnext(found)\nsay_and_wait()\ndel found",
    "unread": "found = llm.generate('Once', **LONG)\nsay_and_wait()\ndel found",
    "reply": "found = llm.reply(HI, **LONG)\nsay_and_wait()\ndel found",
    "cancelled": """
async def read():
    async for output in llm.chat(HI, **LONG):
        pass
async def main():
    task = asyncio.create_task(read())
    await asyncio.sleep(0)
    await asyncio.to_thread(say_and_wait)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
asyncio.run(main())""",
    "awaited": """
async def main():
    task = asyncio.ensure_future(llm.complete("Once", **LONG))
    await asyncio.sleep(0)
    await asyncio.to_thread(say_and_wait)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
asyncio.run(main())""",
}


def test_what_a_caller_lets_go_of_is_ended_while_it_lives(server: Server) -> None:
    program = """
def say_and_wait(word="begun"):
    print(word, flush=True)
    sys.stdin.readline()
"""
    with Caller(server, program + "\n".join(f"{code}\nsay_and_wait('let go')" for code in LET_GO.values())) as caller:
        for how in LET_GO:
            aborted, finished = ended(server, "abort"), ended(server, "length")
            assert caller.line() == "begun", how
            server.wait_until(lambda: running(server) == 1, f"does not run the request: {how}")
            caller.go_on()
            assert caller.line() == "let go", how
            server.wait_until(lambda: running(server) == 0, f"goes on: {how}")
            assert (ended(server, "abort"), ended(server, "length")) == (aborted + 1, finished), how
            caller.go_on()


@pytest.mark.long
def test_what_a_killed_caller_leaves_is_ended_and_others_go_on(server: Server) -> None:
    aborted, finished = ended(server, "abort"), ended(server, "length")
    program = "first, second = llm.chat(HI, **LONG), llm.reply(HI, **LONG)\nnext(first)\nprint('begun', flush=True)\n"
    other = "found = list(raylm.handle().chat(HI, ignore_eos=True, max_tokens=3000))\nprint('read', flush=True)"
    with Caller(server, program + "sys.stdin.readline()") as caller, Caller(server, other) as honest:
        assert caller.line() == "begun"
        caller.process.kill()
        assert honest.line() == "read"
        server.wait_until(lambda: running(server) == 0, "goes on")
    assert (ended(server, "abort"), ended(server, "length")) == (aborted + 2, finished + 1)


def test_calls_answer_as_http_does_and_plain_handles_too(server: Server) -> None:
    program = """
fields = {"temperature": 0, "max_tokens": 40}
copy = pickle.loads(pickle.dumps(llm))
whole = copy.reply(HI, **fields).result(), plain.reply.remote(HI, **fields).result()
params = raylm.SamplingParams(temperature=0, max_tokens=40)
streams = llm.chat(HI, **fields), plain.options(stream=True).chat.remote(HI, params)
texts = ["".join(delta.text for output in stream for delta in output.deltas) for stream in streams]
print(texts + [output.deltas[0].text for output in whole])
def told(call):
    try:
        call()
    except InvalidRequestError as error:
        return error.message, error.param
wrong = [{"role": "robot", "content": "x"}]
calls = llm.chat(wrong).__next__, llm.reply(wrong).result, plain.reply.remote(wrong).result
print([told(call) for call in calls])
"""
    wrong = chat("x") | {"messages": [{"role": "robot", "content": "x"}]}
    error = httpx.post(f"{server.url}/v1/chat/completions", json=wrong, timeout=300).json()["error"]
    whole = post(server, "/v1/chat/completions", chat(QUESTION, max_tokens=40))["choices"][0]["message"]["content"]
    with Caller(server, program) as caller:
        assert caller.line() == repr([whole] * 4)
        assert caller.line() == repr([(error["message"], error["param"])] * 3)


def test_a_model_that_is_bound_to_another_deployment_is_called_by_its_handle(server: Server) -> None:
    body = chat(QUESTION, max_tokens=40)
    whole = post(server, "/v1/chat/completions", body)["choices"][0]["message"]["content"]
    assert post(server, "/bound", body) == {"streamed": whole, "whole": whole}


def test_the_composed_application_answers_as_its_parts_do_over_http(server: Server) -> None:
    question = "What is the stock of tea?"
    found = post(server, "/assistant/ask", {"question": question})
    text = (ROOT / "examples" / "composed_app" / "app.py").read_text()
    notes: list[str] = re.findall(r'^    "(.*)",$', text, re.M)
    assert len(notes) == 5
    embedded = post(server, "/v1/embeddings", {"model": "embedded", "input": [question, *notes]})["data"]
    asked, *vectors = [np.array(row["embedding"], np.float32) for row in embedded]
    near = sorted(range(5), key=lambda place: -float(asked @ vectors[place]))[:3]
    ranking = {"model": "embedded", "query": question, "documents": [notes[place] for place in near], "top_n": 2}
    best = [result["document"]["text"] for result in post(server, "/rerank", ranking)["results"]]
    assert found["notes"] == best
    system, user, made, result = found["messages"]
    assert (system["content"], user["content"]) == ("\n".join(best), question)
    assert made["tool_calls"][0]["function"] == {"name": "get_stock", "arguments": '{"item": "tea"}'}
    assert result["content"] == '{"item": "tea", "pieces": 12}'
    tools = {"tools": app_tools(), "max_tokens": 100, "temperature": 0, "model": "embedded"}
    answer = post(server, "/v1/chat/completions", tools | {"messages": found["messages"]})
    assert found["answer"] == answer["choices"][0]["message"]["content"]


def app_tools() -> Any:
    """The tools of the example. Its module is not imported here, because Serve makes its class a deployment."""
    source = (ROOT / "examples" / "composed_app" / "app.py").read_text()
    found = re.search(r"^TOOLS = (\[.*?^\])", source, re.M | re.S)
    assert found
    return ast.literal_eval(found[1])
