"""VirtualLoop: time advances while no task can run."""

from __future__ import annotations

import asyncio

import pytest

from raylm.simulate.virtual_time import run


def test_timers_come_in_their_order_and_an_hour_takes_no_time() -> None:
    seen: list[tuple[str, float]] = []

    async def sleep(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        seen.append((name, asyncio.get_running_loop().time()))

    async def main() -> None:
        await asyncio.gather(sleep("late", 3600.0), sleep("soon", 0.25), sleep("at once", 0))

    run(main())
    assert [name for name, _ in seen] == ["at once", "soon", "late"]
    assert [time for _, time in seen] == pytest.approx([0, 0.25, 3600])


def test_who_waits_for_what_never_comes_is_told() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="no timer is left"):
        run(main())
