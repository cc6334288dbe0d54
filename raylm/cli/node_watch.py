"""The watch over Ray's own processes: when one of them dies, the process that started them ends instead of waiting."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from typing import Protocol

from raylm.stages import report

PERIOD_S = 1.0
_VITAL = frozenset({"gcs_server", "raylet"})


class Node(Protocol):
    """What Ray knows of the processes that it started here."""

    def dead_processes(self) -> list[tuple[str, object]]:
        """(kind, process) of those that have ended by themselves."""


def end_with(node: Node, end: Callable[[int], object] = os._exit) -> threading.Thread:
    """End this process, with status 1, when Ray cannot go on: nothing would be served, and nobody would say so.

    The watch ends where this process ends in order, before Ray ends its own.
    """
    over = threading.Event()
    atexit.register(over.set)

    def watch() -> None:
        while not over.wait(PERIOD_S):
            lost = [kind for kind, _ in node.dead_processes() if kind in _VITAL]
            if lost:
                report("error", "ray", f"Ray's {lost[0]} was lost, and with it everything that was served.")
                end(1)
                return

    thread = threading.Thread(target=watch, name="watch over ray", daemon=True)
    thread.start()
    return thread
