"""The connection to a state that is an actor: an actor that does not answer is ended and replaced."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from raylm.frontend.state import actor as actor_module
from raylm.frontend.state.actor import RemoteState
from raylm.frontend.state.application_state import ApplicationState
from raylm.frontend.state.client import StateClient
from raylm.frontend.state.messages import KeyLimits

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray warns when its modules are imported


class Actor:
    """A StateActor's handle, which answers until its node loses power."""

    def __init__(self) -> None:
        self.state, self.answers = ApplicationState(), True
        self.exchange = SimpleNamespace(remote=self._exchange)

    async def _exchange(self, report: Any) -> Any:
        if not self.answers:
            await asyncio.Event().wait()
        return self.state.exchange(report)


async def test_a_state_that_gives_no_sign_of_life_is_replaced_and_grants_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    actors: list[Actor] = []
    ended: list[Actor] = []

    def open_state(self: RemoteState) -> Any:
        actors.append(Actor())
        return actors[-1]

    monkeypatch.setattr(actor_module, "ANSWER_S", 0.2)
    monkeypatch.setattr(RemoteState, "_open", open_state)
    monkeypatch.setattr(actor_module.ray, "kill", ended.append)
    client = StateClient(RemoteState("app"), "one")
    limits = KeyLimits(requests_per_minute=2)
    try:
        await client.claim("key", limits)
        actors[0].answers = False
        async with asyncio.timeout(300):
            await client.claim("key", limits)
        assert ended == actors[:1]
        assert len(actors) == 2
        with pytest.raises(Exception, match="requests_per_minute"):  # the new state knows the grants of the first one
            await client.claim("key", limits)
    finally:
        client._task.cancel()  # type: ignore[union-attr]


async def test_a_state_that_starts_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[object] = []
    monkeypatch.setattr(actor_module, "ANSWER_S", 0.01)
    monkeypatch.setattr(actor_module.ray, "kill", ended.append)
    state, starting = RemoteState("app"), Actor()
    starting.answers = False
    monkeypatch.setattr(state, "_open", lambda: starting)
    asked = asyncio.create_task(state.exchange(Any))  # type: ignore[arg-type]
    await asyncio.sleep(1)
    assert not asked.done()
    assert not ended
    asked.cancel()
