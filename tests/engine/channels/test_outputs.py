"""The channel of outputs: all of them, in order, over a real socket; a slow client holds them up; ends are noticed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from raylm.engine.channels.outputs import MAX_OUTPUTS_IN_FLIGHT, OutputListener, OutputReceiver, OutputSender
from raylm.messages import EngineCoreOutputs, EngineStats


def outputs(step: int, entries: int = 1) -> EngineCoreOutputs:
    ids = list(range(entries))
    nothing = [None] * entries
    return EngineCoreOutputs(ids, ids, [1] * entries, ids, nothing, nothing, ids, EngineStats(steps=step))


class Ends:
    """Both ends of a channel, and what the sender was told."""

    def __init__(self) -> None:
        self.sign, self.lost = asyncio.Event(), asyncio.Event()
        self.listener = OutputListener()

    async def open(self) -> None:
        accepting = asyncio.ensure_future(self.listener.accept())
        self.sender = await OutputSender.connect(self.listener.path, self.sign.set, self.lost.set)
        self.receiver: OutputReceiver = await accepting
        self.listener.close()


@asynccontextmanager
async def channel() -> AsyncIterator[Ends]:
    async with asyncio.timeout(300):
        ends = Ends()
        await ends.open()
        yield ends
        ends.sender.close()
        await ends.receiver.close()


async def test_outputs_come_in_order_whatever_their_size_and_all_before_the_end() -> None:
    sent = [outputs(step, entries) for step, entries in enumerate([1, 300, 2, 100_000, 1, 50_000, 3])]

    async def send(sender: OutputSender) -> None:
        for each in sent:
            await sender.send(each)
        sender.close()

    async with channel() as ends:
        sending = asyncio.ensure_future(send(ends.sender))
        assert [each async for each in ends.receiver.outputs()] == sent
        await sending


async def test_a_client_that_does_not_read_holds_up_its_sender_and_loses_nothing() -> None:
    async with channel() as ends:
        received = ends.receiver.outputs()
        count = 0

        async def send() -> None:
            nonlocal count
            while True:
                await ends.sender.send(outputs(count))
                count += 1

        sending = asyncio.ensure_future(send())
        await asyncio.sleep(0.2)
        held = count
        assert MAX_OUTPUTS_IN_FLIGHT <= held < 200
        await asyncio.sleep(0.1)
        assert count == held
        assert [(await anext(received)).stats.steps for _ in range(held + 100)] == list(range(held + 100))
        sending.cancel()


async def test_signs_of_life_and_the_end_of_a_client_are_told() -> None:
    async with channel() as ends:
        ends.receiver.renew()
        await ends.sign.wait()
        assert not ends.lost.is_set()
        await ends.receiver.close()
        await ends.lost.wait()
        await ends.sender.send(outputs(1, 100_000))


async def test_a_sender_that_waits_for_room_ends_with_its_client() -> None:
    async with channel() as ends:

        async def send() -> None:
            while not ends.lost.is_set():
                await ends.sender.send(outputs(1, 10_000))

        sending = asyncio.ensure_future(send())
        await asyncio.sleep(0.2)
        assert not sending.done()
        await ends.receiver.close()
        await sending


async def test_nobody_else_may_connect_and_nothing_stays_on_disk() -> None:
    ends = Ends()
    directory = Path(ends.listener.path).parent
    assert os.stat(directory).st_mode & 0o077 == 0
    await ends.open()
    assert not directory.exists()
    with pytest.raises(OSError, match="No such file"):
        await OutputSender.connect(ends.listener.path, ends.sign.set, ends.lost.set)
    await ends.sender.send(outputs(1))
    assert await anext(ends.receiver.outputs()) == outputs(1)
    await ends.receiver.close()
    await ends.lost.wait()
