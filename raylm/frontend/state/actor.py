"""StateActor: the application's ApplicationState as a named Ray actor. RemoteState: a replica's connection to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raylm.engine import NAMESPACE, Silence
from raylm.frontend.state.application_state import SETTLE_S, ApplicationState, Departed, Series
from raylm.frontend.state.client import StateLostError
from raylm.frontend.state.messages import StateReply, StateReport

ANSWER_S = 3.0  # time limit for an answer of a state that has started, which takes milliseconds
SILENCE_S = 60.0  # after this time without a report from any replica, the application has ended


class StateActor:
    """Created by the first replica that needs it. Ends if no replica reports for SILENCE_S.

    It is detached, so it outlives all replicas: decisions about adapters survive a restart of all ingresses and
    engines. Ray restarts a lost actor; the replicas then send it whole reports.
    """

    shared = True

    def __init__(self) -> None:
        self._state = ApplicationState(settle_s=SETTLE_S)
        self._watch = asyncio.get_event_loop().create_task(self._end_in_silence())

    async def exchange(self, report: StateReport) -> StateReply:
        return self._state.exchange(report)

    async def series(self) -> tuple[Series, Departed]:
        return self._state.series()

    async def leave(self, replica: str) -> None:
        self._state.leave(replica)

    async def _end_in_silence(self) -> None:
        while self._state.silent_s() < SILENCE_S:  # noqa: ASYNC110 - reports come from outside
            await asyncio.sleep(1.0)
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


class RemoteState:
    """The StateActor of an application. Starts it on this node if there is none.

    A state that does not answer within ANSWER_S is ended, and the next call starts a new one. Ray notices only later
    that the state's node does not answer. All replicas find the new state by its name.
    """

    shared = True

    def __init__(self, app_name: str) -> None:
        self._name = state_name(app_name)
        self._actor: ActorHandle | None = None
        self._has_answered = False  # before that it may still start

    async def exchange(self, report: StateReport) -> StateReply:
        return cast(StateReply, await self._call("exchange", report))

    async def series(self) -> tuple[Series, Departed]:
        return cast(tuple[Series, Departed], await self._call("series"))

    async def leave(self, replica: str) -> None:
        await self._call("leave", replica)

    async def _call(self, method: str, *args: object) -> Any:
        try:
            if self._actor is None:
                self._actor = await asyncio.to_thread(self._open)
            answer = await self._answer(getattr(self._actor, method).remote(*args))
        except (RayError, ValueError) as error:
            self._forget()
            raise StateLostError(str(error).splitlines()[0]) from error
        self._has_answered = True
        return answer

    async def _answer(self, asked: Awaitable[Any]) -> Any:
        """What an actor answers that has answered before, within ANSWER_S of this process's time."""
        answer = asyncio.ensure_future(asked)

        def give_up() -> None:
            answer.cancel()

        silence = Silence(give_up, ANSWER_S) if self._has_answered else None
        try:
            await asyncio.wait([answer])
        finally:
            answer.cancel()
            if silence is not None:
                silence.stop()
        if not answer.cancelled():
            return answer.result()
        await asyncio.to_thread(ray.kill, self._actor)
        self._forget()
        raise StateLostError(f"it has given no sign of life for {ANSWER_S:g} s")

    def _forget(self) -> None:
        self._actor, self._has_answered = None, False

    def _open(self) -> ActorHandle:
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "lifetime": "detached", "get_if_exists": True}
        options["memory"] = 1  # byte; Ray places an actor without any resource on a random node
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)  # this node answers
        options["scheduling_strategy"] = here
        return ray.remote(StateActor).options(name=self._name, namespace=NAMESPACE, **options).remote()


def state_name(app_name: str) -> str:
    """The actor's name. It does not depend on the configuration, which may change."""
    return f"ApplicationState:{app_name}"


def end_state(app_name: str) -> None:
    """End the state of a deleted application. Without this call it would end after SILENCE_S."""
    try:
        ray.kill(ray.get_actor(state_name(app_name), NAMESPACE), no_restart=True)
    except ValueError:
        return
