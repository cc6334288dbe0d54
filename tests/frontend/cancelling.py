"""Cancels a call at the moments at which a cancellation is most easily lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from itertools import count

import pytest


async def cancel_in_every_turn(call: Callable[[], Coroutine[object, object, object]]) -> None:
    """Cancel ``call()``, which waits for a thread, in each turn of the loop between the thread's end and its own end.

    The cancellation must be raised each time, also if the result is already available.
    """
    for turns in count():
        task = asyncio.create_task(call())
        await asyncio.sleep(0)
        time.sleep(0.03)  # noqa: ASYNC251 - the thread is to be done before the loop goes on
        for _ in range(turns):
            await asyncio.sleep(0)
        if not task.cancel():
            assert turns > 1
            return
        with pytest.raises(asyncio.CancelledError):
            await task
