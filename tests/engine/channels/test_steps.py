"""StepChannel: every step's outcome, in order, over a real socket; failures arrive as themselves; ends are noticed."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from raylm.engine.channels.steps import StepClient, StepFailure, StepServer
from raylm.messages import ModelRunnerOutput, SchedulerOutput


def plan(step: int, seqs: int = 1) -> SchedulerOutput:
    ids = list(range(seqs))
    return SchedulerOutput(step, [], [], ids, ids, [1] * seqs, [True] * seqs, [0] * seqs, [])


def drawn(plan: SchedulerOutput) -> ModelRunnerOutput:
    return ModelRunnerOutput(plan.step, plan.seq_ids, [1] * len(plan.seq_ids), [plan.step] * len(plan.seq_ids))


def launch(plan: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
    output = drawn(plan)
    return lambda: output


@asynccontextmanager
async def connected(server: StepServer) -> AsyncIterator[StepClient]:
    client = await StepClient.connect(server.path)
    yield client
    client._transport.close()


@pytest.mark.parametrize("overlapped", [False, True])
async def test_outcomes_come_in_order_whatever_their_size(overlapped: bool) -> None:
    async with connected(StepServer(launch, overlapped=overlapped)) as client:
        plans = [plan(step, seqs) for step, seqs in enumerate([1, 300, 2, 100_000, 1, 50_000, 3])]
        sent = [client.send(plan) for plan in plans]
        assert [await outcome for outcome in sent] == [drawn(plan) for plan in plans]


async def test_the_next_step_is_launched_while_the_output_of_the_last_is_awaited() -> None:
    second_launched = threading.Event()

    def launch_late(plan: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        if plan.step == 2:
            second_launched.set()

        def output() -> ModelRunnerOutput:
            assert second_launched.wait(300)
            return drawn(plan)

        return output

    async with connected(StepServer(launch_late, overlapped=True)) as client:
        sent = [client.send(plan(1)), client.send(plan(2))]
        async with asyncio.timeout(300):
            assert [await outcome for outcome in sent] == [drawn(plan(1)), drawn(plan(2))]


class UnpicklableError(Exception):
    """One that cannot leave its process."""

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

    async with connected(StepServer(fail, overlapped=overlapped)) as client:
        plain, unpicklable, good = [await outcome for outcome in [client.send(plan(step)) for step in (1, 2, 3)]]
        assert isinstance(plain, StepFailure)
        assert isinstance(plain.cause, ValueError)
        assert "out of everything" in plain.traceback
        assert isinstance(unpicklable, StepFailure)
        assert str(unpicklable.cause) == "UnpicklableError: inside"
        assert good == drawn(plan(3))


async def test_a_worker_that_hangs_up_fails_what_waits_and_what_comes(tmp_path: Path) -> None:
    def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_unix_server(hang_up, tmp_path / "steps"), asyncio.timeout(300):
        client = await StepClient.connect(str(tmp_path / "steps"))
        for outcome in [client.send(plan(1)), client.send(plan(2))]:
            with pytest.raises(ConnectionError):
                await outcome
        with pytest.raises(ConnectionError):
            await client.send(plan(3))
        client._transport.close()


async def test_who_is_not_awaited_any_more_disturbs_nobody() -> None:
    async with connected(StepServer(launch, overlapped=False)) as client:
        given_up, wanted = client.send(plan(1)), client.send(plan(2))
        given_up.cancel()
        assert await wanted == drawn(plan(2))


async def test_nobody_else_may_connect_and_nothing_stays_on_disk() -> None:
    server = StepServer(launch, overlapped=False)
    directory = Path(server.path).parent
    assert os.stat(directory).st_mode & 0o077 == 0
    async with connected(server) as client:
        await client.send(plan(1))
        assert not directory.exists()
        with pytest.raises(OSError, match="No such file"):
            await StepClient.connect(server.path)
