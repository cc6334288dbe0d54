"""Steps over a Link: every outcome in order, over a real socket. Failures keep their type, and ends are noticed."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from raylm.engine.link import Listener
from raylm.engine.steps import StepFailure, StepLink, StepServer
from raylm.errors import EngineCrashedError, EngineDiedError
from raylm.messages import ModelRunnerOutput, SchedulerOutput


def plan(step: int, seqs: int = 1) -> SchedulerOutput:
    ids = list(range(seqs))
    return SchedulerOutput(step, [], [], ids, ids, [1] * seqs, [True] * seqs, [0] * seqs, [])


def drawn(plan: SchedulerOutput) -> ModelRunnerOutput:
    return ModelRunnerOutput(plan.step, plan.seq_ids, [1] * len(plan.seq_ids), [plan.step] * len(plan.seq_ids))


def launch(plan: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
    output = drawn(plan)
    return lambda: output


class Lost(list[EngineDiedError]):
    """The errors of lost workers."""


@asynccontextmanager
async def connected(server: StepServer) -> AsyncIterator[StepLink]:
    lost = Lost()
    client = StepLink("worker", lost.append)
    await client.connect(server.path)
    yield client
    assert not lost
    client.link.close()


def serve(launch: Callable[[SchedulerOutput], Callable[[], ModelRunnerOutput]], overlapped: bool = False) -> StepServer:
    return StepServer(launch, lambda: overlapped)


@pytest.mark.parametrize("overlapped", [False, True])
async def test_outcomes_come_in_order_whatever_their_size(overlapped: bool) -> None:
    async with connected(serve(launch, overlapped)) as client:
        plans = [plan(step, seqs) for step, seqs in enumerate([1, 300, 2, 100_000, 1, 50_000, 3])]
        sent = [client.send(plan) for plan in plans]
        assert [await outcome for outcome in sent] == [drawn(plan) for plan in plans]


def test_a_worker_closes_its_connection_and_gives_no_more_signs_of_life_when_its_core_is_gone() -> None:
    server = serve(launch)
    with socket.socket(socket.AF_UNIX) as core:
        core.connect(server.path)
        core.shutdown(socket.SHUT_WR)
        assert not all(core.recv(4096) for _ in range(20)), "20 signs of life, then the end"


async def test_the_next_step_is_launched_while_the_output_of_the_last_is_awaited() -> None:
    second_launched = threading.Event()

    def launch_late(plan: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        if plan.step == 2:
            second_launched.set()

        def output() -> ModelRunnerOutput:
            assert second_launched.wait(300)
            return drawn(plan)

        return output

    async with connected(serve(launch_late, True)) as client:
        sent = [client.send(plan(1)), client.send(plan(2))]
        async with asyncio.timeout(300):
            assert [await outcome for outcome in sent] == [drawn(plan(1)), drawn(plan(2))]


class UnpicklableError(Exception):
    """An error that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("inside")
        self.lock = threading.Lock()


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("late", [False, True])
async def test_failures_arrive_as_what_they_are(overlapped: bool, late: bool) -> None:
    errors = {1: ValueError("out of everything"), 2: UnpicklableError()}

    def fail(plan: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        if plan.step == 3:
            return launch(plan)
        if not late:
            raise errors[plan.step]

        def output() -> ModelRunnerOutput:
            raise errors[plan.step]

        return output

    async with connected(serve(fail, overlapped)) as client:
        plain, unpicklable, good = [await outcome for outcome in [client.send(plan(step)) for step in (1, 2, 3)]]
        assert isinstance(plain, StepFailure)
        assert isinstance(plain.cause, ValueError)
        assert "out of everything" in plain.traceback
        assert isinstance(unpicklable, StepFailure)
        assert str(unpicklable.cause) == "UnpicklableError: inside"
        assert good == drawn(plan(3))


async def test_a_worker_that_is_lost_fails_what_waits_and_what_comes() -> None:
    lost, listener = Lost(), Listener()
    client = StepLink("worker of rank 1", lost.append)
    await client.connect(listener.path)
    outcomes = [client.send(plan(1)), client.send(plan(2))]
    connection, _ = listener.socket.accept()
    connection.close()
    listener.close()
    async with asyncio.timeout(300):
        for outcome in outcomes:
            with pytest.raises(ConnectionError, match=r"The worker of rank 1 was lost\."):
                await outcome
        with pytest.raises(ConnectionError):
            await client.send(plan(3))
    assert [(type(error), error.message) for error in lost] == [(EngineDiedError, "The worker of rank 1 was lost.")]


async def test_a_worker_that_crashes_says_so() -> None:
    lost, listener = Lost(), Listener()
    client = StepLink("worker", lost.append)
    await client.connect(listener.path)
    outcome = client.send(plan(1))
    connection, _ = listener.socket.accept()
    connection.sendall(b"\0\0\0\0Fatal Python error: Segmentation fault\n\n\0\0\0\0  File somewhere")
    connection.close()
    listener.close()
    async with asyncio.timeout(300):
        with pytest.raises(ConnectionError):
            await outcome
    (error,) = lost
    assert type(error) is EngineCrashedError
    assert error.message == "The worker crashed: Fatal Python error: Segmentation fault"
    assert client.link.last_words.endswith("File somewhere")


async def test_an_outcome_that_nobody_awaits_disturbs_no_other() -> None:
    async with connected(serve(launch)) as client:
        given_up, wanted = client.send(plan(1)), client.send(plan(2))
        given_up.cancel()
        assert await wanted == drawn(plan(2))


async def test_nobody_else_may_connect_and_nothing_stays_on_disk() -> None:
    server = serve(launch)
    directory = Path(server.path).parent
    assert os.stat(directory).st_mode & 0o077 == 0
    async with connected(server) as client:
        await client.send(plan(1))
        assert not directory.exists()
        with pytest.raises(OSError, match="No such file"):
            await StepLink("worker", Lost().append).connect(server.path)
