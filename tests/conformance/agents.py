"""Agents and proxies against a running server: turns with a tool, with the histories that these programs keep."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MODEL = "embedded"
QUESTIONS = ["What is the weather in Rome?", "And why?", "What is a KV cache?"]
DESCRIPTION = "The weather of a city."
KEY = "sk-of-a-test"  # the proxy requires a key
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
JAVASCRIPT = Path(sys.prefix) / "js"
_START_S = 120.0


def inspect_responses(url: str) -> None:
    """inspect-ai's provider openai/, with the Responses API, which requests encrypted reasoning, and with chats."""
    from inspect_ai.model import ChatMessageUser, GenerateConfig, get_model
    from inspect_ai.tool import Tool, tool

    @tool
    def get_weather() -> Tool:
        async def execute(city: str) -> str:
            """The weather of a city.

            Args:
                city: Its name.
            """
            return "sunny"

        return execute

    async def talk(*, responses_api: bool) -> list[Any]:
        config = GenerateConfig(max_tokens=300, max_retries=0, reasoning_effort="low", reasoning_summary="auto")
        model = get_model(
            f"openai/{MODEL}", base_url=f"{url}/v1", api_key="none", config=config, responses_api=responses_api
        )
        messages: list[Any] = []
        for question in QUESTIONS:
            messages.append(ChatMessageUser(content=question))
            more, _ = await model.generate_loop(messages, tools=[get_weather()])
            messages += more
        return messages

    for responses_api in (True, False):
        said = asyncio.run(talk(responses_api=responses_api))
        assert sum(message.role == "assistant" for message in said) >= len(QUESTIONS)


def litellm_proxy(url: str) -> None:
    """litellm's proxy in front of the server, with its provider openai/: chats, and Anthropic's messages."""
    with _proxy(url) as proxy:
        _chat_turns(proxy)
        _message_turns(proxy)


def _chat_turns(proxy: str) -> None:
    import openai

    api = openai.OpenAI(base_url=f"{proxy}/v1", api_key=KEY, max_retries=0)
    tools: Any = [
        {"type": "function", "function": {"name": "get_weather", "description": DESCRIPTION, "parameters": PARAMETERS}}
    ]
    messages: list[Any] = []
    called = 0
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        for _ in range(3):
            answer = api.chat.completions.create(
                model=MODEL, messages=messages, tools=tools, max_tokens=300, temperature=0, reasoning_effort="low"
            )
            message = answer.choices[0].message
            messages.append(message.model_dump())
            called += len(message.tool_calls or ())
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls or ()
            ]
            if not message.tool_calls:
                break
    assert called


def _message_turns(proxy: str) -> None:
    import httpx

    tools = [{"name": "get_weather", "description": DESCRIPTION, "input_schema": PARAMETERS}]
    messages: list[Any] = []
    called = 0
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        for _ in range(3):
            body = {"model": MODEL, "max_tokens": 2000, "messages": messages, "tools": tools}
            body["thinking"] = {"type": "enabled", "budget_tokens": 1024}
            answer = httpx.post(
                f"{proxy}/v1/messages", json=body, headers={"x-api-key": KEY, "anthropic-version": "2023-06-01"},
                timeout=300,
            )  # fmt: skip
            assert answer.status_code == 200, answer.text[:600]
            content = answer.json()["content"]
            messages.append({"role": "assistant", "content": content})
            calls = [block for block in content if block["type"] == "tool_use"]
            called += len(calls)
            if not calls:
                break
            results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "sunny"} for call in calls]
            messages.append({"role": "user", "content": results})
    assert called


@contextmanager
def _proxy(url: str) -> Iterator[str]:
    """The proxy's server process, with one model."""
    import httpx

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    params = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "none", "max_retries": 0}
    models = [{"model_name": MODEL, "litellm_params": params, "model_info": {"supports_reasoning": True}}]
    with tempfile.TemporaryDirectory() as folder:
        config, log = Path(folder) / "config.yaml", Path(folder) / "log"
        config.write_text(json.dumps({"model_list": models, "litellm_settings": {"num_retries": 0}}))
        program = Path(sys.executable).with_name("litellm")
        command = [str(program), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | {"LITELLM_MASTER_KEY": KEY})
        try:
            begun = time.monotonic()
            while True:
                assert process.poll() is None, log.read_text()[-600:]
                assert time.monotonic() - begun < _START_S, log.read_text()[-600:]
                try:
                    if httpx.get(f"http://127.0.0.1:{port}/health/liveliness", timeout=300).status_code == 200:
                        break
                except httpx.TransportError:
                    time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


def javascript(url: str) -> None:
    """js/clients.mjs, run from the folder that contains its packages."""
    node = shutil.which("node")
    assert node is not None, "node is not installed"
    found = subprocess.run([node, str(JAVASCRIPT / "clients.mjs"), url], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-1500:] + found.stderr[-500:]
