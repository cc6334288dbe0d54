"""The connection to a store that is an actor: a store that does not answer is lost within a time limit."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from raylm.errors import StoreLostError
from raylm.ingress.responses import shared_store

pytestmark = pytest.mark.filterwarnings("ignore")  # importing Ray's modules gives a warning


class Handle:
    """The handle of a store whose node has no power: calls get no answer and no error."""

    def __init__(self) -> None:
        self.given_up: list[str] = []

    def __getattr__(self, name: str) -> Any:
        async def call(*args: object) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                self.given_up.append(name)

        return SimpleNamespace(remote=call)


async def test_calls_that_a_lost_node_leaves_open_end_as_a_lost_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_store, "ANSWER_S", 0.05)
    monkeypatch.setitem(shared_store.LONGER_S, "follow", 0.1)
    handle = Handle()
    store = shared_store.open_store(cast(Any, {"response_store": handle}))
    calls = {
        "get": store.get("", "a"),
        "put": store.put("", "a", b"{}"),
        "history": store.history("", "a"),
        "follow": store.follow("", "a", 0),
        "delete": store.delete("", "a"),
        "renew": store.renew("m", 1),
    }
    async with asyncio.timeout(300):
        for call in calls.values():
            with pytest.raises(StoreLostError) as caught:
                await call
            assert caught.value.status == 503
    assert handle.given_up == list(calls)


async def test_who_waits_for_a_cancel_waits_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_store, "ANSWER_S", 0.01)
    handle = Handle()
    store = shared_store.open_store(cast(Any, {"response_store": handle}))
    waiting = asyncio.create_task(store.until_cancelled("", "a"))
    with pytest.raises(StoreLostError):
        await store.get("", "a")
    await asyncio.sleep(0.05)
    assert not waiting.done()
    waiting.cancel()
