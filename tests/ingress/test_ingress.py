"""An ingress replica that Serve stops: when it starts to refuse requests, and what it leaves behind."""

from __future__ import annotations

import asyncio

import pytest

from raylm.config import Config
from raylm.frontend import Requests, Timelines

pytestmark = pytest.mark.filterwarnings("ignore")  # importing Ray Serve gives a warning


@pytest.mark.parametrize(("routed_s", "refuses"), [(3600.0, False), (0.0, True)])
async def test_nobody_is_refused_while_proxies_may_still_route_to_it(
    monkeypatch: pytest.MonkeyPatch, routed_s: float, refuses: bool
) -> None:
    from raylm.ingress import ingress

    stopping = asyncio.Event()
    asked = asyncio.Event()

    def routed_for_s() -> float:
        asked.set()
        return routed_s

    monkeypatch.setattr(ingress, "_LEAVE_S", 0.0)
    monkeypatch.setattr(ingress, "_POLL_S", 0.001)
    monkeypatch.setattr(ingress, "stop_flag", lambda: stopping.is_set)
    monkeypatch.setattr(ingress, "routed_for_s", routed_for_s)
    found = ingress.Ingress(Config(), None)  # type: ignore[arg-type]
    found._requests = Requests(10, Timelines())
    draining = asyncio.create_task(found._drain_when_stopped())
    await asyncio.sleep(0.01)
    assert not asked.is_set()
    stopping.set()
    async with asyncio.timeout(300):
        await asked.wait()
    await asyncio.sleep(0.01)
    assert found._requests.shutting_down is refuses
    draining.cancel()


async def test_engines_are_called_for_as_often_as_they_are_wanted_whatever_becomes_of_a_call() -> None:
    from raylm.ingress import ingress

    calls: asyncio.Queue[int] = asyncio.Queue()

    class Engine:
        """A handle whose first call fails."""

        def __init__(self) -> None:
            self.wake = self
            self._calls = 0

        async def remote(self) -> None:
            self._calls += 1
            calls.put_nowait(self._calls)
            if self._calls == 1:
                raise RuntimeError("the controller is away")

    found = ingress.Ingress(Config(), Engine())  # type: ignore[arg-type]
    task = asyncio.create_task(found._start_engines_when_wanted())
    async with asyncio.timeout(300):
        for number in (1, 2):
            found._engine_wanted.set()
            assert await calls.get() == number
    await asyncio.sleep(0)
    assert calls.empty()
    task.cancel()


def test_what_serve_calls_at_the_end_leaves_the_engines_once() -> None:
    from raylm.ingress import ingress

    left: list[str] = []
    found = ingress.Ingress(Config(), None)  # type: ignore[arg-type]
    found.__del__()
    found._leave = lambda: left.append("left")
    found.__del__()
    found.__del__()
    assert left == ["left"]
