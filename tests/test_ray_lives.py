"""What outlives processes, by `raylm serve`: answers beside a request that crashes workers, and clients of an ingress
that is stopped and started."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving import Server, chat, free_port, serve_file, text_of
from tests.updating import updated_server

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.filterwarnings("default")]

ARGS: dict[str, Any] = {"dtype": "float32", "cache": {"num_blocks": 2048}}
POISON = 666  # as the seed
# What a worker's process does when it imports the worker: a sequence with that seed makes its next step a crash.
PLANTED = f"""
import ctypes, importlib.util, sys

NAME = "raylm.worker.worker"

class Planting:
    def find_spec(self, name, path=None, target=None):
        if name != NAME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            launch = module.Worker.launch
            def crashing(self, plan):
                if any(new.params.seed == {POISON} for new in plan.new):
                    ctypes.string_at(0)
                return launch(self, plan)
            module.Worker.launch = crashing
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Planting())
"""


async def stream(url: str, number: int, tokens: int) -> str:
    """The text of a sampled stream, or what went wrong."""
    body = chat(f"Say {number}.", stream=True, ignore_eos=True, max_tokens=tokens, temperature=0.9, seed=number)
    found = ""
    async with (
        httpx.AsyncClient(timeout=240) as client,
        client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer,
    ):
        async for line in answer.aiter_lines():
            if answer.status_code != 200 or '"error"' in line:
                return f"{answer.status_code} {line}"
            found += text_of(line)
    return found


@contextmanager
def seen(server: Server, name: str) -> Iterator[set[int]]:
    """The ids of all processes of an actor's class that are there meanwhile."""
    found, over = set(server.processes(name)), threading.Event()

    def look() -> None:
        while not over.wait(0.1):
            found.update(server.processes(name))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield found
    finally:
        over.set()
        looking.join()


async def test_a_body_that_crashes_workers_costs_three_engines_and_no_neighbour(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(PLANTED)
    args = ARGS | {"engine": {"replicas": 2, "threads": 1}, "ingress": {"recovery_timeout_s": 240}}
    port = free_port()
    path = serve_file(tmp_path / "serve.yaml", port, args)
    import_path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    with Server(path, port, PYTHONPATH=import_path) as server:
        undisturbed = [await stream(server.url, number, 300) for number in range(6)]
        assert all(len(text) > 100 for text in undisturbed)
        with seen(server, "WorkerActor") as workers:
            assert len(workers) == 2
            neighbours = [asyncio.create_task(stream(server.url, number, 300)) for number in range(6)]
            async with httpx.AsyncClient(timeout=300) as client:
                answer = await client.post(f"{server.url}/v1/chat/completions", json=chat("Hi", seed=POISON))
            assert await asyncio.gather(*neighbours) == undisturbed
            deaths = len(workers) - 2
        assert answer.status_code >= 500, answer.text
        assert "3 engines crashed with this request" in answer.text
        server.wait_until(lambda: len(server.processes("WorkerActor")) == 2, "has not two engines again")
        assert 2 <= deaths <= 3
        assert await stream(server.url, 1, 300) == undisturbed[1]


async def test_haproxy_leaves_an_ingress_before_it_refuses_anybody(tmp_path: Path) -> None:
    args = {"ingress": {"replicas": 2, "shutdown_grace_s": 20}}
    with updated_server(tmp_path / "serve.yaml", engines=1, **args) as updates:
        url, wrong, answers = updates.server.url, list[str](), 0
        over = asyncio.Event()

        async def ask(number: int) -> None:
            """On connections of its own, so that each is routed anew."""
            nonlocal answers
            while not over.is_set():
                try:
                    async with httpx.AsyncClient(timeout=120) as client:
                        body = chat(f"Say {number}.", max_tokens=8, stream=bool(number % 2))
                        answer = await client.post(f"{url}/v1/chat/completions", json=body)
                    if answer.status_code != 200 or '"error"' in answer.text:
                        wrong.append(f"{answer.status_code} {answer.text}")
                except httpx.HTTPError as error:
                    wrong.append(repr(error))
                answers += 1

        asking = [asyncio.create_task(ask(number)) for number in range(4)]
        before = updates.replicas("Ingress")
        for number in (1, 2, 1, 2):
            told = answers
            await asyncio.to_thread(updates.set_replicas, number, "Ingress", Engine=1)
            await asyncio.sleep(3)
            assert answers > told
        over.set()
        await asyncio.gather(*asking)
        assert wrong == []
        assert updates.replicas("Ingress").keys() != before.keys()
