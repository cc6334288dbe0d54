"""ResponseStore: an application's stored responses, in SQLite or Postgres."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass
from typing import Any, cast

import orjson

from raylm.ingress.http.body import JSONObject
from raylm.ingress.responses.conversation_store import ConversationStore, ConversationTurn
from raylm.ingress.responses.database import END_OF_CONVERSATION, ROW_BYTES, Database, Writes

LEASE_S = 5.0  # a job whose maker has not renewed it for this time goes to another maker
MOST_MAKERS = 3  # of one job; a job that crashed this many makers fails
FOLLOW_S = 5.0  # time for which `follow` waits for events
_TOLD, _ENDED = "told", "ended"  # what one store announces to others
UNFINISHED = ("queued", "in_progress")


@dataclass(frozen=True, slots=True)
class ToldEvents:
    """JSON of an array of events. ``last`` is the number of the newest, up to which ``tokens`` tokens were sent."""

    last: int
    tokens: int
    data: bytes


@dataclass(frozen=True, slots=True)
class LostJob:
    """A response whose maker is lost: its record, its job, and the newest event (-1 and 0 if there is none)."""

    owner: str
    response_id: str
    record: bytes
    job: bytes
    last: int
    tokens: int


class ResponseStore(ConversationStore):
    """Stores responses in a database, by default in memory. One thread does all work on the database.

    A response belongs to its ``owner``, the name of an API key ("" without keys), and only its owner can read it. Its
    record is JSON: {"response": …, "input": items}. Responses linked by ``previous`` form a conversation; each is
    stored once. Of each owner at most ``max_bytes`` are kept, and no response that was not used for ``max_age_s``. The
    least recently used response is deleted first, and the end of a conversation before its beginning. Unfinished
    responses are kept.

    A ``job`` is the input for generating an unfinished response again. Its maker renews it while it works on it. A job
    that is not renewed for LEASE_S is given to the next maker that asks.

    Several stores may share a Postgres database. What one of them writes wakes those that wait at the others.

    All methods raise StoreLostError if the database cannot be used, for example because the disk is full.
    """

    def __init__(
        self,
        database: Database | None = None,
        max_bytes: int = 128 * 2**20,
        max_age_s: float = 30 * 24 * 3600.0,
    ) -> None:
        super().__init__(database, max_bytes, max_age_s)
        self._cancelled: dict[str, asyncio.Event] = {}
        self._told: dict[str, asyncio.Event] = {}
        self._listening: asyncio.Task[None] | None = None

    async def put(
        self,
        owner: str,
        response_id: str,
        record: bytes,
        previous: str | None = None,
        job: bytes | None = None,
        maker: str | None = None,
        events: ToldEvents | None = None,
        turn: ConversationTurn | None = None,
    ) -> bool:
        """Store a record with its latest events, and its turn of a conversation.

        Returns whether the response ``previous`` is gone; then nothing is stored. A record that has ended does not
        change. If ``maker`` is given without ``job``, the record updates an existing one, and is ignored unless this is
        still its maker.
        """

        def work() -> bool:
            now, status, stored = self._database.now(), _status(record), 1
            if previous is not None and self._one("SELECT 1 FROM responses WHERE id = ?", previous) is None:
                return True
            if job is not None or maker is None:
                place = self._one("SELECT COALESCE(MAX(place), 0) + 1 FROM responses")[0]
                self._database.execute(
                    "INSERT INTO responses (id, owner, previous, status, record, job, maker, lease, used, place, size) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (response_id, owner, previous, status, record, job, maker, now + LEASE_S, now, place,
                     len(record) + len(job or b"") + ROW_BYTES),
                )  # fmt: skip
            if events is not None and maker is not None:
                self._tell(response_id, maker, events)
            if job is None and maker is not None:
                goes_on = status in UNFINISHED
                stored = self._database.execute(
                    "UPDATE responses SET status = ?, record = ?, used = ?, job = CASE WHEN ? THEN job END,"
                    " size = size + ? - LENGTH(record) - CASE WHEN ? THEN 0 ELSE COALESCE(LENGTH(job), 0) END"
                    " WHERE id = ? AND maker = ? AND status IN ('queued', 'in_progress')",
                    (status, record, now, goes_on, len(record), goes_on, response_id, maker),
                ).rowcount
            if turn is not None and stored:
                self._add(owner, turn, now)
            self._make_room(owner, [response_id] if turn is None else [response_id, turn.conversation], now)
            self._database.announce(_TOLD, response_id)
            return False

        is_orphan = await self._do(work)
        self._wake(self._told, response_id)
        return is_orphan

    async def begin_call(self, owner: str, call_id: str) -> bool:
        """Note that a call is being made. Returns whether it was not begun before."""
        query = "INSERT INTO calls VALUES (?, ?, ?) ON CONFLICT DO NOTHING"

        def work() -> bool:
            return self._database.execute(query, (owner, call_id, self._database.now())).rowcount > 0

        return await self._do(work)

    async def append(self, response_id: str, maker: str, events: ToldEvents) -> None:
        """Store events of a response, unless it has ended or has another maker now."""

        def work() -> None:
            self._tell(response_id, maker, events)
            self._database.announce(_TOLD, response_id)

        await self._do(work, durable=False)  # the record, when it is put, comes with all before it
        self._wake(self._told, response_id)

    async def get(self, owner: str, response_id: str) -> bytes | None:
        def work() -> bytes | None:
            found = self._row(owner, response_id, "record")
            if found is None:
                return None
            used = "UPDATE responses SET used = ? WHERE id = ?"  # a full disk can still be read
            self._database.attempt(used, (self._database.now(), response_id))
            return cast(bytes, found[0])

        return await self._read(work)

    async def history(self, owner: str, response_id: str) -> list[bytes] | None:
        """The records of a conversation that ends with a response, oldest first. None if one is missing."""

        def work() -> list[bytes] | None:
            chain = self._database.execute(
                "WITH RECURSIVE chain (id, previous, record, depth) AS ("
                " SELECT id, previous, record, 0 FROM responses WHERE id = ? AND owner = ? AND deleted = 0"
                " UNION ALL SELECT r.id, r.previous, r.record, depth + 1 FROM chain JOIN responses r"
                " ON r.id = chain.previous AND r.owner = ?)"
                " SELECT record, previous FROM chain ORDER BY depth DESC",
                (response_id, owner, owner),
            ).fetchall()
            return [record for record, _ in chain] if chain and chain[0][1] is None else None

        return await self._read(work)

    async def has_events(self, owner: str, response_id: str) -> bool | None:
        """Whether a response has stored events, which every streaming background response has. None if it is unknown.

        The record may be large, and is not read.
        """

        def work() -> bool | None:
            found = self._row(owner, response_id, "EXISTS (SELECT 1 FROM events WHERE response = responses.id)")
            return None if found is None else bool(found[0])

        return await self._read(work)

    async def follow(self, owner: str, response_id: str, after: int) -> tuple[list[bytes], str] | None:
        """Arrays of events after number ``after``, and the status. Waits a limited time for events.

        Returns None if the response does not exist.
        """

        def work() -> tuple[list[bytes], str] | None:
            if (found := self._row(owner, response_id, "status")) is None:
                return None
            rows = self._database.execute(
                "SELECT data FROM events WHERE response = ? AND last > ? ORDER BY last", (response_id, after)
            )
            return [data for (data,) in rows], found[0]

        self._listen()
        told = self._told.setdefault(response_id, asyncio.Event())
        found = await self._read(work)
        if found is None or found[1] not in UNFINISHED:
            self._wake(self._told, response_id)
        elif not found[0]:
            with suppress(TimeoutError):
                async with asyncio.timeout(FOLLOW_S):
                    await told.wait()
            return await self._read(work)
        return found

    async def delete(self, owner: str, response_id: str) -> bool:
        """Delete a record. Returns whether it existed. Responses that follow it keep it as their history."""

        def work() -> bool:
            found = self._row(owner, response_id, "previous")
            if found is None:
                return False
            self._database.execute(
                "UPDATE responses SET deleted = 1, job = NULL, status = 'cancelled',"
                " size = size - COALESCE(LENGTH(job), 0) WHERE id = ?",
                (response_id,),
            )
            self._drop_unneeded(response_id)
            used = "UPDATE responses SET used = ? WHERE id = ?"  # it may be the end of its conversation now
            self._database.execute(used, (self._database.now(), found[0]))
            self._database.announce(_ENDED, response_id)
            return True

        found = await self._do(work)
        self._hear(_ENDED, response_id)
        return found

    async def cancel(self, owner: str, response_id: str) -> bytes | None:
        """Mark an unfinished response as cancelled, notify its maker, and return its record."""

        def work() -> bytes | None:
            found = self._row(owner, response_id, "record, status")
            if found is None or found[1] not in UNFINISHED:
                return None if found is None else cast(bytes, found[0])
            self._database.announce(_ENDED, response_id)
            return self._end(response_id, found[0], "cancelled", None)

        found = await self._do(work)
        self._hear(_ENDED, response_id)
        return found

    async def until_cancelled(self, owner: str, response_id: str) -> None:
        """Wait until the response is cancelled or deleted. Only its maker waits."""
        self._listen()
        try:
            while True:
                event = self._cancelled.setdefault(response_id, asyncio.Event())
                found = await self._read(lambda: self._row(owner, response_id, "status"))
                if found is None or found[0] not in UNFINISHED:
                    return
                await event.wait()
        finally:
            self._cancelled.pop(response_id, None)

    async def renew(self, maker: str, most: int, making: Sequence[str] = ()) -> list[LostJob]:
        """Renew the jobs in ``making``, and give at most ``most`` lost jobs to this maker."""

        def work() -> list[LostJob]:
            now = self._database.now()
            unfinished = "status IN ('queued', 'in_progress')"
            self._database.execute_each(
                f"UPDATE responses SET lease = ? WHERE maker = ? AND {unfinished} AND id = ?",
                [(now + LEASE_S, maker, response_id) for response_id in making],
            )
            if now < self._database.since + LEASE_S:  # others could not renew theirs either
                return []
            lost = self._database.execute(
                f"SELECT id, owner, record, job, makers FROM responses WHERE {unfinished} AND lease < ?"
                " ORDER BY place LIMIT ?",
                (now, most),
            ).fetchall()
            taken = []
            for response_id, owner, record, job, makers in lost:
                if job is None or makers + 1 >= MOST_MAKERS:
                    why = f"The server ended {makers + 1} times while this response was generated."
                    self._end(response_id, record, "failed", {"code": "server_error", "message": why})
                    continue
                self._database.execute(
                    "UPDATE responses SET maker = ?, makers = makers + 1, lease = ? WHERE id = ?",
                    (maker, now + LEASE_S, response_id),
                )
                last, tokens = self._newest_event(response_id)
                taken.append(LostJob(owner, response_id, record, job, last, tokens))
            return taken

        return await self._do(work, durable=False)

    async def release(self, response_id: str, maker: str) -> None:
        """Give up a job, so that the next maker may take it at once."""
        query = "UPDATE responses SET lease = 0, maker = '', makers = makers - 1 WHERE id = ? AND maker = ?"
        await self._do(lambda: self._database.execute(query, (response_id, maker)))

    def renew_all(self) -> None:
        """Renew all jobs, because makers may be alive although the store restarted."""

        def work() -> None:
            lease = self._database.now() + LEASE_S
            self._database.execute("UPDATE responses SET lease = ? WHERE lease < ?", (lease, lease))

        self._database.run(work, Writes.DURABLE)

    def _listen(self) -> None:
        """Hear of what other stores write, from now on."""
        if self._database.is_shared and (self._listening is None or self._listening.done()):
            # an empty context: Ray's context belongs to the request
            self._listening = asyncio.create_task(self._database.listen(self._hear), context=Context())

    def _hear(self, what: str, response_id: str | None) -> None:
        """Wake the followers of a response, all if it is None."""
        for waiting in (self._told, self._cancelled) if what == _ENDED else (self._told,):
            for one in list(waiting) if response_id is None else (response_id,):
                self._wake(waiting, one)

    def _row(self, owner: str, response_id: str, columns: str) -> Any:
        """Columns of a response, if the owner may see it."""
        return self._one(
            f"SELECT {columns} FROM responses WHERE id = ? AND owner = ? AND deleted = 0", response_id, owner
        )

    def _tell(self, response_id: str, maker: str, events: ToldEvents) -> None:
        mine = "id = ? AND maker = ? AND status IN ('queued', 'in_progress')"
        told = self._database.execute(
            f"INSERT INTO events SELECT ?, ?, ?, ? WHERE EXISTS (SELECT 1 FROM responses WHERE {mine})",
            (response_id, events.last, events.tokens, events.data, response_id, maker),
        )
        if told.rowcount:
            size = len(events.data) + ROW_BYTES
            self._database.execute("UPDATE responses SET size = size + ? WHERE id = ?", (size, response_id))

    def _newest_event(self, response_id: str) -> tuple[int, int]:
        """The number of the newest event, and the number of tokens sent up to it."""
        newest = "SELECT last, tokens FROM events WHERE response = ? ORDER BY last DESC LIMIT 1"
        found: tuple[int, int] = self._one(newest, response_id) or (-1, 0)
        return found

    def _end(self, response_id: str, record: bytes, status: str, error: JSONObject | None) -> bytes:
        content: JSONObject = orjson.loads(record)
        output = [item for item in content["response"]["output"] if item.get("status") != "in_progress"]
        content["response"] |= {"status": status, "error": error, "output": output}
        ended, more = orjson.dumps(content), 0
        if error is not None and content.get("streamed"):
            last, tokens = self._newest_event(response_id)
            event = {"type": "response.failed", "response": content["response"], "sequence_number": last + 1}
            row = response_id, last + 1, tokens, orjson.dumps([event])
            self._database.execute("INSERT INTO events VALUES (?, ?, ?, ?)", row)
            more = len(row[-1]) + ROW_BYTES
        self._database.execute(
            "UPDATE responses SET status = ?, record = ?, job = NULL,"
            " size = size + ? - LENGTH(record) - COALESCE(LENGTH(job), 0) WHERE id = ?",
            (status, ended, len(ended) + more, response_id),
        )
        return ended

    def _drop_unneeded(self, response_id: str | None) -> None:
        """Delete a response that is marked as deleted, if none follows it; then its predecessors in the same way."""
        while response_id is not None:
            query = f"SELECT previous FROM responses WHERE id = ? AND deleted = 1 AND {END_OF_CONVERSATION}"
            if (found := self._one(query, response_id)) is None:
                return
            self._drop(response_id)
            response_id = found[0]

    def _wake(self, waiting: dict[str, asyncio.Event], response_id: str) -> None:
        if (event := waiting.pop(response_id, None)) is not None:
            event.set()


def _status(record: bytes) -> str:
    status: str = orjson.loads(record)["response"]["status"]
    return status
