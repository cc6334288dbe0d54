"""Counts the code on four paths of a request: ``python -m tests.ways`` prints a report.

For each path: modules, functions, calls, and moves from one module to another. One process runs the HTTP app, AsyncLLM
and a real EngineCore with a worker that is a function. So Ray, connections between nodes and the model are not counted.
A path ends at the function that is named for it.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from types import FrameType
from typing import Any

import httpx

from raylm.engine import EngineCore
from raylm.frontend import LocalEngineClient
from raylm.messages import EngineInfo
from tests.fakes import FakeExecutor, FakeWorker
from tests.ingress.harness import served, until
from tests.ingress.test_real_llm import CHAT, CONFIG, MODEL, Stack, running_stack

Call = tuple[str, str]  # the module, without "raylm.", and the qualified name of a function
STREAMED: dict[str, Any] = CHAT | {"stream": True, "ignore_eos": True}
INTERRUPTS = ("Request.interrupt", "Request.hang_up")
DATA = ("raylm.messages", "raylm.step_cost")  # calls of these modules count for the calling module
LOSSES = ("Router._lose", "Router.lose")
EVENTS = 24  # events of a stream that is already running


@dataclass
class Listener:
    """Records each call of a Python function of raylm, in every thread, until ``last`` is called."""

    last: str = ""
    calls: list[Call] = field(default_factory=list)
    ended: bool = False

    def __enter__(self) -> Listener:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        module = str(frame.f_globals.get("__name__"))
        caller = frame.f_back
        while module in DATA and caller is not None:
            module, caller = str(caller.f_globals.get("__name__")), caller.f_back
        if event == "call" and module.startswith("raylm.") and not self.ended:
            function = frame.f_code.co_qualname
            self.calls.append((module.removeprefix("raylm."), function))
            self.ended = function == self.last

    def since(self, functions: Iterable[str]) -> list[Call]:
        """The calls from the last call of one of ``functions`` on."""
        wanted = {*functions}
        return self.calls[max(i for i, (_, function) in enumerate(self.calls) if function in wanted) :]


def front_end(calls: Sequence[Call]) -> list[Call]:
    """The calls without those of the engine core."""
    return [call for call in calls if not call[0].startswith(("engine.", "core."))]


def report(way: str, calls: Sequence[Call], events: int = 1, listed: bool = True) -> str:
    """The figures of one path, divided by ``events``, and its modules in order."""
    modules = list(dict.fromkeys(module for module, _ in calls))
    moves = sum(before != after for (before, _), (after, _) in pairwise(calls))
    figures = f"{len(modules)} modules, {len({*calls})} functions"
    figures += f", {len(calls) / events:.4g} calls, {moves / events:.4g} moves"
    return f"{way}: {figures}" + (f"\n    {', '.join(modules)}" if listed else "")


async def body_to_scheduler(client: httpx.AsyncClient, body: dict[str, Any]) -> list[Call]:
    """From the head of the HTTP message to ``Scheduler.add``."""
    with Listener("Scheduler.add") as listener:
        (await client.post("/v1/chat/completions", json=body)).raise_for_status()
    return listener.calls


async def tokens_to_events(client: httpx.AsyncClient) -> list[Call]:
    """``EVENTS`` events of one running stream, one token each, with the engine's steps."""
    seen = 0
    with Listener() as listener:
        async for _ in _data(client, STREAMED | {"max_tokens": 60}):
            seen += 1
            if seen == 6:
                listener.calls.clear()
            if seen == 6 + EVENTS:
                return list(listener.calls)
    raise AssertionError(f"The stream ended after {seen} events.")


async def abort(client: httpx.AsyncClient) -> list[Call]:
    """A client disconnects: from the interrupt of its request to ``Scheduler._abort``, without the engine's steps."""
    begun = asyncio.Event()

    async def read() -> None:
        async for _ in _data(client, STREAMED | {"max_tokens": 200}):
            begun.set()

    with Listener("Scheduler._abort") as listener:
        reader = asyncio.create_task(read())
        await begun.wait()
        reader.cancel()
        await until(lambda: listener.ended)
    return front_end(listener.since(INTERRUPTS)) + listener.calls[-1:]


async def replay(client: httpx.AsyncClient, stack: Stack) -> list[Call]:
    """An engine is lost during a stream: from the loss to ``Scheduler.add`` of the next engine."""
    begun = asyncio.Event()

    async def read() -> None:
        async for _ in _data(client, STREAMED | {"max_tokens": 60}):
            begun.set()

    reader = asyncio.create_task(read())
    await begun.wait()
    async with other_engine(stack):
        with Listener() as listener:
            stack.executor.die()
            await reader
    calls = listener.since(LOSSES)
    return calls[: 1 + [function for _, function in calls].index("Scheduler.add")]


@asynccontextmanager
async def other_engine(stack: Stack) -> AsyncIterator[None]:
    """A second engine of the same model."""
    core = EngineCore(CONFIG, FakeExecutor(FakeWorker(model=MODEL)))
    info = await core.start()
    loop = asyncio.create_task(core.run())
    stack.llm.add_engine(LocalEngineClient(core, EngineInfo("other", info.max_model_len, info)))
    await asyncio.sleep(0)
    yield
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)


async def _data(client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[str]:
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data:"):
                yield line


async def main() -> None:
    """Print the report."""
    async with (
        running_stack() as stack,
        served(stack.app) as url,
        httpx.AsyncClient(base_url=url, timeout=300) as client,
    ):
        (await client.post("/v1/chat/completions", json=CHAT)).raise_for_status()  # one-time objects are made
        for name, body in {"whole": CHAT, "streamed": STREAMED}.items():
            print(report(f"body to Scheduler.add, {name}", await body_to_scheduler(client, body)))
        calls = await tokens_to_events(client)
        print(report("a token to its event, all", calls, EVENTS, listed=False))
        print(report("a token to its event, front end", front_end(calls), EVENTS))
        counts = Counter(front_end(calls)).most_common()
        print("    calls a token:", ", ".join(f"{module}.{name} {n / EVENTS:.3g}" for (module, name), n in counts))
        print(report("abort", await abort(client)))
        print(report("a lost engine's request to the next engine", await replay(client, stack)))


if __name__ == "__main__":
    asyncio.run(main())
