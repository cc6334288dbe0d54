"""Removes single terms of the Router or of the fair queue, for ``python -m benchmarks.fleet.board --ablate``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from raylm.engine import Forecast, WaitingQueue
from raylm.engine.queues import fair
from raylm.frontend.engines import others_load, rendezvous, routed_engine, router

Queue = Callable[[Forecast], WaitingQueue]
Change = tuple[Any, str, Any]
"""An object, the name of an attribute, and the value that removes the term."""


_ROUTER: dict[str, list[Change]] = {
    "rendezvous": [(rendezvous.RendezvousHash, "place", lambda self, blocks, matched, engines: None)],
    "delay of the next": [(routed_engine, "_NEXT_WEIGHT", 0.0)],
    "decode": [(routed_engine, "_DECODE_TOKENS", 0.0)],
    "distance": [(routed_engine, "_LEAN", 0.0)],
    "risk": [(routed_engine, "_RISK", 0.0)],
    "pauses heard": [(others_load.OthersLoad, "heard_s", lambda self, now, decode_s: 0.0)],
    "prompts unheard": [
        (others_load.OthersLoad, "heard_s", lambda self, now, decode_s: 0.0),
        (others_load.OthersLoad, "unheard_s", lambda self, doubt, token_s: 0.0),
    ],
    "queue of others": [(others_load.OthersLoad, "told_s", lambda self, now, token_s: 0.0)],
    "sequences of others": [(others_load.OthersLoad, "sequences", lambda self, now, service_s: 0.0)],
    "doubt": [(others_load.OthersLoad, "_doubt", lambda self, now, period_s: 0.0)],
    "expected blocks": [(routed_engine.KnownBlocks, "expect", lambda self, key, blocks: None)],
    "measured speeds": [
        (router, "speeds", lambda engines: [(routed_engine._GUESS_STEP_S, routed_engine._GUESS_TOKEN_S)] * len(engines))
    ],
}
_QUEUE: dict[str, list[Change]] = {
    "longest prefix": [(fair, "_PREFIXES", 1)],
    "look ahead": [(fair, "_LOOK_AHEAD", 0)],
    "overtaken limit": [(fair, "MOST_PASSED", 1 << 30)],
    "kept places": [(fair.FairQueue, "_within_share", lambda self, tenants, times=1.0: tenants)],
    "places yielded": [(fair.FairQueue, "displaced", lambda self: None)],
    "prompts that yield": [(fair.FairQueue, "yielding", lambda self, running: [])],
    "charged answers": [(fair, "DRAWN_WEIGHT", 1.0)],
}
_FIRST_COME = "first come, first served"
ABLATIONS = {"router": [f"no {name}" for name in _ROUTER], "queue": [f"no {name}" for name in _QUEUE] + [_FIRST_COME]}
"""The names of the ablations of the Router and of the fair queue."""


@contextmanager
def without(name: str) -> Iterator[Queue | None]:
    """Remove one term during the block. Yields the queue that replaces the fair queue, if any."""
    if name == _FIRST_COME:
        yield lambda forecast: WaitingQueue()
        return
    owners = _ROUTER | _QUEUE
    patches = [patch.object(*change) for change in owners[name.removeprefix("no ")]]
    for one in patches:
        one.start()
    try:
        yield None
    finally:
        for one in patches:
            one.stop()
