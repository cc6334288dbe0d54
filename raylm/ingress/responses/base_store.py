"""BaseStore: the database of a store, the thread that works on it, and what is deleted when it is full."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from raylm.errors import StoreLostError
from raylm.ingress.responses.database import END_OF_CONVERSATION, ENDED, MEMORY, Database, FileDatabase, Writes

T = TypeVar("T")


class BaseStore:
    """A database, by default in memory. One thread does all work on it. ``_do`` runs one transaction.

    Of each owner at most ``max_bytes`` are kept, and nothing that was not used for ``max_age_s``.
    """

    def __init__(self, database: Database | None, max_bytes: int, max_age_s: float) -> None:
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._thread = ThreadPoolExecutor(1, "responses")
        self._database = FileDatabase(MEMORY) if database is None else database

    async def _read(self, work: Callable[[], T]) -> T:
        """Run statements that write nothing others depend on, on the thread."""
        return await self._on_thread(work, Writes.NONE)

    async def _do(self, work: Callable[[], T], *, durable: bool = True) -> T:
        """Run one transaction on the thread. It completes even if the caller is cancelled.

        Without ``durable`` it may be lost if the machine of the database loses power, but not what is written later.
        """
        return await self._on_thread(work, Writes.DURABLE if durable else Writes.LOSABLE)

    async def _on_thread(self, work: Callable[[], T], writes: Writes) -> T:
        done = self._thread.submit(self._database.run, work, writes)
        answer = asyncio.wrap_future(done)
        try:
            async with asyncio.timeout(self._database.answer_s):
                return await asyncio.shield(answer)
        except TimeoutError as error:
            answer.add_done_callback(lambda _: answer.cancelled() or answer.exception())  # nobody waits for it now
            if not done.cancel():
                self._database.give_up(work)
            raise StoreLostError("The store of responses does not answer now; try again shortly.") from error

    def _one(self, query: str, *values: object) -> Any:
        return self._database.execute(query, values).fetchone()

    def _make_room(self, owner: str, kept: Collection[str], now: float) -> None:
        """Delete what is old, then the least recently used response or conversation above ``max_bytes``.

        If all remaining responses lead to those ``kept``, the beginning of their history is deleted, then the first
        items of a conversation that is kept. Using a response need not update those before it, because they are deleted
        after it.
        """
        kept = (*kept, "", "")[:2]
        ended = f"{END_OF_CONVERSATION} AND {ENDED}"
        old = f"SELECT id FROM responses WHERE used < ? AND id NOT IN (?, ?) AND {ended} LIMIT 1"
        while oldest := self._one(old, now - self._max_age_s, *kept):
            self._drop(oldest[0])
        unused = "DELETE FROM conversations WHERE used < ? AND id NOT IN (?, ?)"
        self._database.execute(unused, (now - self._max_age_s, *kept))
        self._database.execute("DELETE FROM calls WHERE made < ?", (now - self._max_age_s,))
        while (self._one("SELECT size FROM owners WHERE owner = ?", owner) or (0,))[0] > self._max_bytes:
            if not self._drop_oldest(owner, kept):
                return

    def _drop_oldest(self, owner: str, kept: Collection[str]) -> bool:
        """Delete the least recently used. Returns whether there was something to delete."""
        ends = (
            f"SELECT id, used FROM responses WHERE owner = ? AND id NOT IN (?, ?) AND {END_OF_CONVERSATION} AND {ENDED}"
            " ORDER BY used, place DESC LIMIT 1"
        )
        talks = "SELECT id, used FROM conversations WHERE owner = ? AND id NOT IN (?, ?) ORDER BY used LIMIT 1"
        end, talk = self._one(ends, owner, *kept), self._one(talks, owner, *kept)
        if talk is not None and (end is None or talk[1] < end[1]):
            self._database.execute("DELETE FROM conversations WHERE id = ?", (talk[0],))
            return True
        others = f"SELECT id FROM responses WHERE owner = ? AND id NOT IN (?, ?) AND {ENDED} ORDER BY place LIMIT 1"
        if (oldest := end or self._one(others, owner, *kept)) is not None:
            self._drop(oldest[0])
            return True
        first = "SELECT conversation, place FROM conversation_items WHERE conversation IN (?, ?) ORDER BY place LIMIT 1"
        if (item := self._one(first, *kept)) is None:
            return False
        self._database.execute("DELETE FROM conversation_items WHERE conversation = ? AND place = ?", item)
        return True

    def _drop(self, response_id: str) -> None:
        self._database.execute("DELETE FROM responses WHERE id = ?", (response_id,))
