"""ResponseStore: owns the stored responses of an application; one replica keeps it itself, several share an actor."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, cast

import orjson

from raylm.ingress.http.body import JSONObject

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

_UNFINISHED = ("queued", "in_progress")


class ResponseStore:
    """In memory, bounded by number and bytes. An actor, or a plain object.

    A response belongs to its ``owner``, the name of an API key ("" without keys), and is found with that alone. What
    goes beyond the bounds goes at the cost of the owner that holds most: its least recently used ones are dropped.
    A record is {"response": …, "input": items, "history": items}, as JSON.
    """

    def __init__(self, max_responses: int = 4096, max_bytes: int = 128 * 2**20) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._records: defaultdict[str, OrderedDict[str, bytes]] = defaultdict(OrderedDict)
        self._counts: Counter[str] = Counter()
        self._sizes: Counter[str] = Counter()
        self._cancelled: dict[str, asyncio.Event] = {}

    async def put(self, owner: str, response_id: str, record: bytes) -> None:
        """Keep a record; older ones go when there are too many, and a cancelled one stays as it is."""
        known = self._find(owner, response_id)
        if known is not None and _status(known) == "cancelled":
            return
        self._set(owner, response_id, record)
        while self._counts.total() > self._max_responses:
            self._drop_oldest(self._counts)
        while self._sizes.total() > self._max_bytes and self._counts.total() > 1:
            self._drop_oldest(self._sizes)

    async def get(self, owner: str, response_id: str) -> bytes | None:
        record = self._find(owner, response_id)
        if record is not None:
            self._records[owner].move_to_end(response_id)
        return record

    async def delete(self, owner: str, response_id: str) -> bool:
        """Forget a record; whether there was one. One that is being made is cancelled too."""
        if self._find(owner, response_id) is None:
            return False
        self._drop(owner, response_id)
        self._wake(response_id)
        return True

    async def cancel(self, owner: str, response_id: str) -> bytes | None:
        """Mark an unfinished response as cancelled, wake the replica that makes it, and return its record."""
        record = self._find(owner, response_id)
        if record is None or _status(record) not in _UNFINISHED:
            return record
        content: JSONObject = orjson.loads(record)
        content["response"]["status"] = "cancelled"
        self._set(owner, response_id, orjson.dumps(content))
        self._wake(response_id)
        return self._records[owner][response_id]

    async def until_cancelled(self, owner: str, response_id: str) -> None:
        """Wait until it is cancelled or deleted; one waiter a response, the replica that makes it."""
        event = self._cancelled.setdefault(response_id, asyncio.Event())
        try:
            record = self._find(owner, response_id)
            if record is not None and _status(record) in _UNFINISHED:
                await event.wait()
        finally:
            self._cancelled.pop(response_id, None)

    def _find(self, owner: str, response_id: str) -> bytes | None:
        return self._records[owner].get(response_id) if owner in self._records else None

    def _set(self, owner: str, response_id: str, record: bytes) -> None:
        if self._find(owner, response_id) is not None:
            self._drop(owner, response_id)
        self._records[owner][response_id] = record
        self._counts[owner] += 1
        self._sizes[owner] += len(record)

    def _drop_oldest(self, held: Counter[str]) -> None:
        """Of the owner that holds most by ``held``."""
        owner = max(held, key=held.__getitem__)
        self._drop(owner, next(iter(self._records[owner])))

    def _drop(self, owner: str, response_id: str) -> None:
        self._counts[owner] -= 1
        self._sizes[owner] -= len(self._records[owner].pop(response_id))

    def _wake(self, response_id: str) -> None:
        if response_id in self._cancelled:
            self._cancelled[response_id].set()


def open_store(shared_actors: Mapping[str, DeploymentHandle]) -> ResponseStore:
    """The store that all replicas share, or one of this replica's own where it is the only one."""
    shared = shared_actors.get("response_store")
    return ResponseStore() if shared is None else cast(ResponseStore, _RemoteStore(shared))


class _RemoteStore:
    """The methods of a ResponseStore that is a deployment of its own, by its handle."""

    def __init__(self, store: DeploymentHandle) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        async def call(*args: object) -> Any:
            return await getattr(self._store, name).remote(*args)

        return call


def _status(record: bytes) -> str:
    status: str = orjson.loads(record)["response"]["status"]
    return status
