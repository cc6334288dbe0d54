"""ResponseStore: owns the stored responses of an application; one replica keeps it itself, several share an actor."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, cast

import orjson

from raylm.ingress.http.body import JSONObject

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

_UNFINISHED = ("queued", "in_progress")


class ResponseStore:
    """In memory, bounded by number and bytes; the least recently used go first. An actor, or a plain object.

    A record is {"response": …, "input": items, "history": items}, as JSON.
    """

    def __init__(self, max_responses: int = 4096, max_bytes: int = 128 * 2**20) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._records: OrderedDict[str, bytes] = OrderedDict()
        self._size = 0
        self._cancelled: dict[str, asyncio.Event] = {}

    async def put(self, response_id: str, record: bytes) -> None:
        """Keep a record; the oldest ones go when there are too many, and a cancelled one stays as it is."""
        known = self._records.get(response_id)
        if known is not None and _status(known) == "cancelled":
            return
        self._set(response_id, record)
        while len(self._records) > self._max_responses or (self._size > self._max_bytes and len(self._records) > 1):
            self._drop(next(iter(self._records)))

    async def get(self, response_id: str) -> bytes | None:
        record = self._records.get(response_id)
        if record is not None:
            self._records.move_to_end(response_id)
        return record

    async def delete(self, response_id: str) -> bool:
        """Forget a record; whether there was one. One that is being made is cancelled too."""
        found = response_id in self._records
        if found:
            self._drop(response_id)
            self._wake(response_id)
        return found

    async def cancel(self, response_id: str) -> bytes | None:
        """Mark an unfinished response as cancelled, wake the replica that makes it, and return its record."""
        record = self._records.get(response_id)
        if record is None or _status(record) not in _UNFINISHED:
            return record
        content: JSONObject = orjson.loads(record)
        content["response"]["status"] = "cancelled"
        self._set(response_id, orjson.dumps(content))
        self._wake(response_id)
        return self._records[response_id]

    async def until_cancelled(self, response_id: str) -> None:
        """Wait until it is cancelled or deleted; one waiter a response, the replica that makes it."""
        event = self._cancelled.setdefault(response_id, asyncio.Event())
        try:
            record = self._records.get(response_id)
            if record is not None and _status(record) in _UNFINISHED:
                await event.wait()
        finally:
            self._cancelled.pop(response_id, None)

    def _set(self, response_id: str, record: bytes) -> None:
        self._size += len(record) - len(self._records.get(response_id, b""))
        self._records[response_id] = record
        self._records.move_to_end(response_id)

    def _drop(self, response_id: str) -> None:
        self._size -= len(self._records.pop(response_id))

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
