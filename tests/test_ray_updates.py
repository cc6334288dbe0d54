"""Draining engines, and updates of a served file under load: no client gets an error, and no text changes."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.serving import chat, text_of
from tests.updating import Updates, updated_server

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.filterwarnings("default")]

SCALED = {"replicas": {"min": 0, "max": 2, "downscale_delay_s": 3}, "threads": 1}
INGRESS = {"shutdown_grace_s": 60}  # longer than a stream
GRACE_S = 30
_TLS = httpx.create_ssl_context()  # creating one takes a client long
QUESTIONS = [f"Count from {number} to {number + 9}." for number in range(6)]


@pytest.fixture
def updates(tmp_path: Path) -> Iterator[Updates]:
    with updated_server(tmp_path / "serve.yaml", engines=2, ingress=INGRESS) as updates:
        yield updates


async def text(url: str, number: int, tokens: int) -> str:
    """The text of a sampled stream over a new connection, or a description of the error."""
    body = chat(
        QUESTIONS[number % len(QUESTIONS)],
        stream=True,
        ignore_eos=True,
        max_tokens=tokens,
        temperature=0.9,
        seed=number,
    )
    found = last = ""
    try:
        async with (
            httpx.AsyncClient(timeout=300, verify=_TLS) as client,
            client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer,
        ):
            async for line in answer.aiter_lines():
                if answer.status_code != 200 or '"error"' in line:
                    return f"{answer.status_code} {line}"
                found += text_of(line)
                last = line or last
    except httpx.HTTPError as error:
        return repr(error)
    return found if last == "data: [DONE]" else f"it ended with {last}"


async def test_streams_outlive_engines_that_drain_with_the_texts_of_an_undisturbed_run(updates: Updates) -> None:
    url, tokens = updates.server.url, 2000
    undisturbed = await asyncio.gather(*(text(url, number, tokens) for number in range(6)))
    ingress = updates.replicas("Ingress")
    streams = [asyncio.create_task(text(url, number, tokens)) for number in range(6)]
    await asyncio.sleep(0.5)
    drained = 0
    while not any(stream.done() for stream in streams):
        await asyncio.to_thread(updates.set_engines, 1)
        drained += not any(stream.done() for stream in streams)
        await asyncio.to_thread(updates.set_engines, 2)
    assert await asyncio.gather(*streams) == undisturbed
    assert drained
    assert updates.replicas("Ingress") == ingress


class Clients:
    """Clients that send requests continuously. ``wrong`` has the texts that were not in ``right`` at the time."""

    def __init__(self, url: str, right: list[set[str]]) -> None:
        self._url = url
        self.right = right
        self.wrong: list[str] = []
        self.answers = 0

    async def ask(self, number: int) -> None:
        while True:
            found = await text(self._url, number, 60)
            self.answers += 1
            if found not in self.right[number]:
                self.wrong.append(found)


@asynccontextmanager
async def clients(url: str) -> AsyncIterator[Clients]:
    made = Clients(url, [{await text(url, number, 60)} for number in range(4)])
    tasks = [asyncio.create_task(made.ask(number)) for number in range(4)]
    try:
        yield made
    finally:
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks)


async def test_no_client_sees_an_update(updates: Updates) -> None:
    """Updates of the ingress, of the scheduler, and of the quantization."""
    async with clients(updates.server.url) as asking:
        await asyncio.to_thread(updates.update, ingress=INGRESS | {"max_queued_requests": 1000})
        assert asking.wrong == []
        await asyncio.to_thread(updates.update, scheduler={"max_num_seqs": 32})
        assert asking.wrong == []
        before = asking.answers
        alone = [right.copy() for right in asking.right]
        for right in asking.right:
            right.clear()
        asking.wrong.clear()
        await asyncio.to_thread(updates.update, quantization="int8")
        seen = list(asking.wrong)
        asking.wrong.clear()
    assert asking.answers > before
    quantized = {await text(updates.server.url, number, 60) for number in range(4)}
    assert not quantized <= set.union(*alone), "the quantized model gives other texts"
    assert {*seen} <= set.union(*alone) | quantized


async def test_engines_go_with_the_load_to_none_and_back(tmp_path: Path) -> None:
    """Requests without an engine are answered later. More requests than one engine can run start a second engine."""
    args = {"engine": SCALED, "scheduler": {"max_num_seqs": 3}}
    with updated_server(tmp_path / "serve.yaml", engines=0, **args) as updates:
        url, engines = updates.server.url, lambda: [*updates.replicas("Engine").values()]
        right = await text(url, 1, 40)
        assert len(right) > 50
        await asyncio.to_thread(updates.wait, lambda: engines() == [], "keeps its engine")
        assert (await asyncio.to_thread(httpx.get, f"{url}/health")).status_code == 200
        assert await asyncio.gather(*(text(url, 1, 40) for _ in range(3))) == [right] * 3
        streams = [asyncio.create_task(text(url, number, 4000)) for number in range(6)]
        await asyncio.to_thread(updates.wait, lambda: engines() == ["RUNNING"] * 2, "starts no other engine")
        texts = await asyncio.gather(*streams)
        assert all(len(found) > 1000 for found in texts)
        await asyncio.to_thread(updates.wait, lambda: engines() == [], "keeps its engines")


class Crowd:
    """Ten clients of streams and four of short answers. Each repeats its request, with a new connection each time."""

    def __init__(self, url: str) -> None:
        streams = [partial(text, url, number, 200) for number in range(10)]
        self._asks = [*streams, *(partial(text, url, number, 5) for number in range(4))]
        self._right: list[str] = []
        self.answers = Counter[int]()
        self.wrong: list[str] = []

    async def __aenter__(self) -> Crowd:
        self._right = [await ask() for ask in self._asks]
        assert all(len(right) > 5 and "it ended" not in right for right in self._right), self._right
        self._tasks = [asyncio.create_task(self._ask(number)) for number in range(len(self._asks))]
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _ask(self, number: int) -> None:
        while True:
            began = time.monotonic()
            found = await self._asks[number]()
            took_s = time.monotonic() - began
            self.answers[number] += 1
            if found != self._right[number] and not (took_s > GRACE_S and "shutting_down" in found):
                self.wrong.append(f"client {number}, {took_s:.1f} s: {found}")

    async def see(self, update: Callable[[], None]) -> None:
        """Apply an update. Returns after every client has an answer to a request that may have begun after it."""
        await asyncio.to_thread(update)
        before = self.answers.copy()
        while not self.wrong and any(self.answers[n] == before[n] for n in range(len(self._asks))):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        assert self.wrong == []


async def test_ten_updates_in_turn_change_no_text_and_cut_no_stream(tmp_path: Path) -> None:
    """Only streams that take longer than the grace period may end with ``shutting_down``."""
    ingress = {"replicas": 2, "shutdown_grace_s": GRACE_S}
    with updated_server(tmp_path / "serve.yaml", engines=1, ingress=ingress) as updates:

        def replicas(engines: int, ingresses: int) -> Callable[[], None]:
            numbers = {"Engine": engines, "Ingress": ingresses}
            return lambda: [updates.set_replicas(number, name, **numbers) for name, number in numbers.items()] and None

        steps: list[Callable[[], None]] = [
            replicas(1, 1),
            replicas(2, 1),
            partial(updates.update, scheduler={"max_num_seqs": 32}),
            replicas(2, 2),
            replicas(1, 2),
            replicas(1, 1),
            partial(updates.update, ingress=ingress | {"max_queued_requests": 1000}),
            replicas(1, 2),
            partial(updates.update, scheduler={"max_num_seqs": 48}),
            replicas(1, 1),
        ]
        async with Crowd(updates.server.url) as crowd:
            for step in steps:
                await crowd.see(step)
