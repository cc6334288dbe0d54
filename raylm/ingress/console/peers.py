"""Desk: answers questions about one ingress replica. Peers: asks all replicas."""

from __future__ import annotations

import asyncio
import os
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raylm.errors import CancelledRequestError
from raylm.frontend import Filter
from raylm.ingress.console.history import History

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

    from raylm.frontend import AsyncLLM, Requests

ANSWER_S = 2.0  # a replica that takes longer is reported as missing

_ENDED = "The request was ended by an operator."


class Desk:
    """Answers questions about this process, as plain values."""

    def __init__(self, llm: AsyncLLM, requests: Requests, node: str = "") -> None:
        """``node`` is the address of this process's node, as Ray has it."""
        self._llm, self._requests, self._node = llm, requests, node
        self._began = time.time()
        self.kept = History(llm)

    @property
    def name(self) -> str:
        return self._llm.timelines.ingress

    def listed(self, wanted: Filter) -> list[tuple[float, bytes]]:
        return self._llm.timelines.listed(wanted)

    def find(self, request_id: str, owner: str | None) -> bytes | None:
        return self._llm.timelines.find(request_id, owner)

    def end(self, request_id: str, owner: str | None) -> bool:
        return self._llm.timelines.end(request_id, owner, lambda: CancelledRequestError(_ENDED))

    def part_ids(self, wanted: Filter) -> list[str]:
        """The engines' ids of requests in flight."""
        return self._llm.timelines.part_ids(wanted)

    def history(self) -> list[dict[str, Any]]:
        """Samples of the engines in the last ten minutes by this replica, the oldest first."""
        return list(self.kept.samples)

    def about(self) -> dict[str, Any]:
        """The state of this process and its queue."""
        queue = self._llm.admission
        return {
            "name": self.name,
            "node": self._node,
            "pid": os.getpid(),
            "state": "draining" if self._requests.shutting_down else "ready" if self._llm.is_ready else "starting",
            "began": self._began,
            "ongoing": self._requests.num_ongoing,
            "queued_requests": queue.requests,
            "queued_tokens": queue.tokens,
            "engines": len(self._llm.engines),
        }

    def ask(self, method: str, *args: Any) -> tuple[str, Any]:
        """The name of this replica, and the answer of ``method``."""
        return self.name, getattr(self, method)(*args)


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of replicas. ``missing`` are the replicas that did not answer in time."""

    found: list[Any]
    missing: list[str]


class Peers(ABC):
    """All ingress replicas of the application."""

    @abstractmethod
    async def ask(self, method: str, *args: Any) -> Answers:
        """Call a method of every Desk."""


class Alone(Peers):
    """The only replica."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def ask(self, method: str, *args: Any) -> Answers:
        return Answers([self._desk.ask(method, *args)[1]], [])


class ServePeers(Peers):
    """All replicas of the deployment, called by its handle. This replica is called directly.

    Remembers the replicas that answered, so that it can name missing ones.
    """

    def __init__(self, desk: Desk, handle: DeploymentHandle) -> None:
        self._desk, self._handle = desk, handle
        self._known: set[str] = set()

    async def ask(self, method: str, *args: Any) -> Answers:
        own = dict([self._desk.ask(method, *args)])
        late = 0
        try:
            async with asyncio.timeout(ANSWER_S):
                results = await self._handle.broadcast("desk", method, *args).results_async(return_exceptions=True)
        except Exception:  # any error of Serve: return the known answers
            results, late = [], 1
        late += sum(isinstance(result, BaseException) for result in results)
        # This replica is asked twice: what it answered second, as that a request has ended already, does not count.
        found = dict(result for result in results if not isinstance(result, BaseException)) | own
        missing = sorted(self._known - found.keys()) if late else []
        self._known = (self._known | found.keys()) if late else set(found)
        return Answers(list(found.values()), missing or ["another ingress replica"] * bool(late))
