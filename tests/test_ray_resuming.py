"""Streams over two ingresses, one of which is killed: clients that resume get the answers of an undisturbed run."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from examples.resuming_client import resumed
from tests.serving import ARGS, Server, chat, free_port, serve_file

pytestmark = [pytest.mark.ray, pytest.mark.long]

QUESTIONS = ["What is a KV cache?", "Count from 1 to 30.", "Say hello.", "What is a scheduler?"]
FIELDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 5, "n": 3},
    {"temperature": 1.0, "logprobs": True, "top_logprobs": 2, "seed": 6, "stop": ["zq", "e e"]},
    {"temperature": 0.7, "seed": 7, "frequency_penalty": 0.4, "stream_options": {"include_usage": True}},
]


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port = free_port()
    args = ARGS | {"ingress": {"replicas": 2}}
    with Server(serve_file(tmp_path_factory.mktemp("serve") / "serve.yaml", port, args), port) as server:
        yield server


class Reader:
    """A client of one stream. ``begun`` is set when it has some of the answer."""

    def __init__(self, server: Server, number: int) -> None:
        self.begun = threading.Event()
        self.requests = 0
        self._url = f"{server.url}/v1/chat/completions"
        fields = FIELDS[number % len(FIELDS)]
        question = QUESTIONS[number // len(FIELDS) % len(QUESTIONS)]
        self._body = chat(question, stream=True, ignore_eos=True, max_tokens=500, **fields | {"user": str(number)})

    def read(self) -> dict[int, dict[str, Any]]:
        """Read to the end. Returns the text, logprobs and finish reasons of each choice."""
        found: dict[int, dict[str, Any]] = {}
        with httpx.Client(timeout=300, event_hooks={"request": [self._count]}) as client:
            for place, data in enumerate(resumed(client, self._url, self._body, {})):
                if place == 20:
                    self.begun.set()
                for choice in json.loads(data)["choices"] if data != "[DONE]" else ():
                    kept = found.setdefault(choice["index"], {"text": "", "logprobs": [], "finish": []})
                    kept["text"] += choice["delta"].get("content") or ""
                    kept["logprobs"] += (choice["logprobs"] or {}).get("content", [])
                    kept["finish"] += [choice["finish_reason"]] if choice["finish_reason"] else []
        return found

    def _count(self, request: httpx.Request) -> None:
        self.requests += 1


def test_streams_go_on_when_their_ingress_is_killed(server: Server) -> None:
    numbers = range(16)
    with ThreadPoolExecutor(len(numbers)) as pool:
        undisturbed = [*pool.map(lambda number: Reader(server, number).read(), numbers)]
        readers = [Reader(server, number) for number in numbers]
        answers = [pool.submit(reader.read) for reader in readers]
        for reader in readers:
            assert reader.begun.wait(300)
        ingresses = server.processes("ServeReplica:default:Ingress")
        assert len(ingresses) == 2
        os.kill(ingresses[0], signal.SIGKILL)
        time.sleep(0.5)
        assert [answer.result() for answer in answers] == undisturbed
    assert any(reader.requests > 1 for reader in readers)
