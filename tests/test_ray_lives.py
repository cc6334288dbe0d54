"""`raylm serve` survives crashing workers, a stopped ingress, and the loss of all processes: no answer changes."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving import Server, chat, free_port, serve_file, text_of
from tests.updating import updated_server

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.filterwarnings("default")]

ARGS: dict[str, Any] = {"dtype": "float32", "cache": {"num_blocks": 2048}}
POISON = 666  # a sequence with this seed crashes the worker
# Code that a worker's process runs when it imports the worker. The next step after a sequence with that seed joins
# crashes.
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


UNFINISHED = ("queued", "in_progress")


async def stream(url: str, number: int, tokens: int) -> str:
    """The text of a sampled stream, or a description of the error."""
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
    """The ids of all processes of an actor's class that exist during the block."""
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
        assert "because 3 engines crashed" in answer.text
        server.wait_until(lambda: len(server.processes("WorkerActor")) == 2, "has not two engines again")
        assert 2 <= deaths <= 3
        assert await stream(server.url, 1, 300) == undisturbed[1]


async def test_haproxy_leaves_an_ingress_before_it_refuses_anybody(tmp_path: Path) -> None:
    args = {"ingress": {"replicas": 2, "shutdown_grace_s": 20}}
    with updated_server(tmp_path / "serve.yaml", engines=1, **args) as updates:
        url, wrong, answers = updates.server.url, list[str](), 0
        over = asyncio.Event()

        async def ask(number: int) -> None:
            """Use a new connection for each request, so that each is routed anew."""
            nonlocal answers
            while not over.is_set():
                try:
                    async with httpx.AsyncClient(timeout=300) as client:
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


class Background:
    """A background response, as one client sees it. The client's connections end with the server."""

    def __init__(self, number: int) -> None:
        text = f"Write about the number {number}."
        self.body = {"model": "embedded", "input": text, "seed": number, "max_output_tokens": 1500, "ignore_eos": True}
        self.id = ""
        self.events: list[dict[str, Any]] = []

    async def create(self, url: str) -> None:
        """Start the response. Responses with an odd number are streamed."""
        streamed, body = self.body["seed"] % 2 == 1, self.body | {"background": True}
        async with httpx.AsyncClient(timeout=240) as client:
            if not streamed:
                self.id = (await client.post(f"{url}/v1/responses", json=body)).json()["id"]
                return
            async with client.stream("POST", f"{url}/v1/responses", json=body | {"stream": True}) as answer:
                await self._read(answer)

    async def follow(self, url: str) -> None:
        query = f"stream=true&starting_after={self.events[-1]['sequence_number']}"
        async with (
            httpx.AsyncClient(timeout=240) as client,
            client.stream("GET", f"{url}/v1/responses/{self.id}?{query}") as answer,
        ):
            await self._read(answer)

    async def _read(self, answer: httpx.Response) -> None:
        with suppress(httpx.HTTPError):  # the connection closes when the server is killed
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    self.events.append(json.loads(line[6:]))
                    self.id = self.id or self.events[0]["response"]["id"]

    def told(self) -> str:
        return "".join(event["delta"] for event in self.events if event["type"] == "response.output_text.delta")


_TLS = httpx.create_ssl_context()  # creating one takes a client long, and HAProxy waits only 10 s for a request


async def found(url: str, response_id: str) -> dict[str, Any]:
    async with httpx.AsyncClient(timeout=300, verify=_TLS) as client:
        answer: dict[str, Any] = (await client.get(f"{url}/v1/responses/{response_id}")).json()
        return answer


async def ended(url: str, response_id: str) -> dict[str, Any]:
    """Wait for the end of the response, and return it."""
    async with asyncio.timeout(240):
        while (answer := await found(url, response_id)).get("status", "queued") in UNFINISHED:  # noqa: ASYNC110 - it is the server's
            await asyncio.sleep(0.2)
    return answer


def text_of_response(answer: dict[str, Any]) -> str:
    return "".join(part["text"] for item in answer["output"] for part in item["content"])


async def test_responses_in_the_background_outlive_the_end_of_everything(tmp_path: Path) -> None:
    args = ARGS | {
        "engine": {"replicas": 2, "threads": 1},
        "scheduler": {"max_num_seqs": 4},  # so that most responses wait
        "ingress": {"replicas": 2, "store": str(tmp_path / "store" / "responses.sqlite")},
    }
    port = free_port()
    path = serve_file(tmp_path / "serve.yaml", port, args)
    all_of_them = [Background(number) for number in range(20)]
    async with AsyncExitStack() as tasks:
        with Server(path, port) as server:
            async with httpx.AsyncClient(timeout=240) as client:
                body = all_of_them[0].body | {"max_output_tokens": 20}
                before = (await client.post(f"{server.url}/v1/responses", json=body)).json()
                cancelled = (await client.post(f"{server.url}/v1/responses", json=body | {"background": True})).json()
                await client.post(f"{server.url}/v1/responses/{cancelled['id']}/cancel")
            creating = [asyncio.create_task(one.create(server.url)) for one in all_of_them]
            tasks.push_async_callback(asyncio.gather, *creating, return_exceptions=True)
            async with asyncio.timeout(300):
                while not all(one.id for one in all_of_them):  # noqa: ASYNC110 - it is the server that tells them
                    await asyncio.sleep(0.02)
            answers = await asyncio.gather(*(found(server.url, one.id) for one in all_of_them))
            states = Counter(answer["status"] for answer in answers)
            assert states["queued"] >= 4, states
            assert states["in_progress"] >= 2, states
            waited = [one for one, answer in zip(all_of_them, answers, strict=True) if answer["status"] == "queued"]
            begun = [one for one in all_of_them if one not in waited]
            assert len(server.processes("ServeReplica")) >= 5, "two ingresses, two engines and the store"
            await asyncio.to_thread(server.kill)
    with Server(path, port) as server:
        ends = await asyncio.gather(*(ended(server.url, one.id) for one in all_of_them))
        assert Counter(answer["status"] for answer in ends) == {"incomplete": 20}, ends  # by max_output_tokens
        followed = [one for one in all_of_them if one.events]
        await asyncio.gather(*(one.follow(server.url) for one in followed))
        for one in followed:
            assert [event["sequence_number"] for event in one.events] == list(range(len(one.events)))
            assert one.told() == text_of_response(ends[one.body["seed"]])
        async with httpx.AsyncClient(timeout=240) as client:  # the same responses without a disturbance
            for one in (begun[0], begun[-1], waited[0], waited[-1]):
                whole = (await client.post(f"{server.url}/v1/responses", json=one.body)).json()
                assert text_of_response(whole) == text_of_response(ends[one.body["seed"]])
        assert await found(server.url, before["id"]) == before
        assert (await found(server.url, cancelled["id"]))["status"] == "cancelled"
