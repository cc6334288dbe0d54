"""Discovery without Ray: what it does when Ray's control plane does not answer."""

from __future__ import annotations

import asyncio

import pytest

from raylm.frontend import discovery


async def test_a_look_for_engines_that_fails_is_not_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def list_named_actors(all_namespaces: bool) -> list[dict[str, str]]:
        loop.call_soon_threadsafe(looks.put_nowait, 1)
        raise ConnectionError("the control plane is away")

    monkeypatch.setattr(discovery, "list_named_actors", list_named_actors)
    monkeypatch.setattr(discovery, "PERIOD_S", 0.001)
    watching = discovery.Discovery("EngineCore:", lambda client: None)
    async with asyncio.timeout(30):
        for _ in range(3):
            await looks.get()
    watching.stop()
