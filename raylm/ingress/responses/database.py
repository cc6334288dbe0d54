"""The database of stored responses: its schema, and the SQLite file with its migrations and its recovery."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Protocol, TypeVar

from raylm.errors import ConfigError, StoreLostError
from raylm.ingress.http.errors import logger
from raylm.stages import about

T = TypeVar("T")

MEMORY = ":memory:"
ENDED = "status NOT IN ('queued', 'in_progress')"
END_OF_CONVERSATION = "later = 0"
ROW_BYTES = 512  # size of a row in addition to its content
_CACHE_KIB = 16_384
_CHECKPOINT_BYTES = 16 * 2**20  # of the log, about 500 puts; the first write after a checkpoint waits for the disk
_LARGEST_LOG_PAGES = 16_384


class Writes(Enum):
    """What a transaction writes: nothing that matters to others, what a loss of power may undo, or what it may not."""

    NONE = 0
    LOSABLE = 1
    DURABLE = 2


class Database(Protocol):
    """What a ResponseStore needs of a database. Only ``give_up`` and ``listen`` are called outside its thread.

    Attributes:
        answer_s: The limit of a transaction in seconds, with the wait for the thread; None if there is none.
        is_shared: Whether other processes write to it.
        since: The time from which this process has been in touch with it.
    """

    answer_s: float | None
    is_shared: bool
    since: float

    def now(self) -> float:
        """The time in seconds since 1970, in each process that uses the database the same."""

    def run(self, work: Callable[[], T], writes: Writes) -> T:
        """Run ``work`` as one transaction, one writing transaction at a time. Raises StoreLostError if it fails."""

    def execute(self, query: str, values: Sequence[object] = ()) -> Any:
        """Run a statement with ``?`` for values. Returns a cursor."""

    def execute_each(self, query: str, rows: Sequence[Sequence[object]]) -> None:
        """Run a statement once for each row of values."""

    def attempt(self, query: str, values: Sequence[object]) -> None:
        """Run a statement at the end of a transaction that is to succeed without it."""

    def announce(self, what: str, response_id: str) -> None:
        """Let other processes hear of a response when this transaction is done."""

    async def listen(self, hear: Callable[[str, str | None], object]) -> None:
        """Pass on what other processes announce, for ever; None in place of an id if anything may have been missed."""

    def give_up(self, work: Callable[[], object]) -> None:
        """End the connection if it is at ``work``, which did not end in time."""


@dataclass(frozen=True, slots=True)
class Trigger:
    """Statements after a change of each row of a table. They may use OLD and NEW."""

    name: str
    after: str
    statements: tuple[str, ...]
    table: str = "responses"


_TABLES: tuple[str | Trigger, ...] = (
    "CREATE TABLE IF NOT EXISTS responses ("
    " id TEXT PRIMARY KEY, owner TEXT NOT NULL, previous TEXT, status TEXT NOT NULL,"
    " deleted INTEGER NOT NULL DEFAULT 0, record BLOB NOT NULL, job BLOB, maker TEXT,"
    " makers INTEGER NOT NULL DEFAULT 0, lease REAL NOT NULL DEFAULT 0, used REAL NOT NULL, place INTEGER NOT NULL,"
    " size INTEGER NOT NULL)",
    "CREATE INDEX IF NOT EXISTS by_previous ON responses (previous)",
    "CREATE INDEX IF NOT EXISTS by_place ON responses (place)",
    "CREATE TABLE IF NOT EXISTS events ("
    " response TEXT NOT NULL, last INTEGER NOT NULL, tokens INTEGER NOT NULL, data BLOB NOT NULL,"
    " PRIMARY KEY (response, last)) WITHOUT ROWID",
)
# Counts that a put needs, kept by triggers: the bytes of each owner, and the responses that follow a response.
_COUNTS: tuple[str | Trigger, ...] = (
    "ALTER TABLE responses ADD COLUMN later INTEGER NOT NULL DEFAULT 0",
    "UPDATE responses SET later = (SELECT COUNT(*) FROM responses child WHERE child.previous = responses.id)"
    " WHERE id IN (SELECT previous FROM responses)",
    "CREATE TABLE owners (owner TEXT PRIMARY KEY, size INTEGER NOT NULL) WITHOUT ROWID",
    "INSERT INTO owners SELECT owner, SUM(size) FROM responses GROUP BY owner",
    *(f"DROP INDEX IF EXISTS {name}" for name in ("by_use", "by_size", "by_status", "by_previous")),
    "CREATE INDEX by_previous ON responses (previous) WHERE previous IS NOT NULL",
    f"CREATE INDEX by_age ON responses (used) WHERE {END_OF_CONVERSATION} AND {ENDED}",
    f"CREATE INDEX by_use ON responses (owner, used, place DESC) WHERE {END_OF_CONVERSATION} AND {ENDED}",
    f"CREATE INDEX by_beginning ON responses (owner, place) WHERE {ENDED}",
    "CREATE INDEX by_lease ON responses (lease) WHERE status IN ('queued', 'in_progress')",
    Trigger(
        "response_kept",
        "INSERT",
        (
            "INSERT INTO owners VALUES (NEW.owner, NEW.size)"
            " ON CONFLICT (owner) DO UPDATE SET size = owners.size + excluded.size",
            "UPDATE responses SET later = later + 1 WHERE id = NEW.previous",
        ),
    ),
    Trigger(
        "response_changed",
        "UPDATE OF size",
        ("UPDATE owners SET size = size + NEW.size - OLD.size WHERE owner = NEW.owner",),
    ),
    Trigger(
        "response_dropped",
        "DELETE",
        (
            "UPDATE owners SET size = size - OLD.size WHERE owner = OLD.owner",
            "UPDATE responses SET later = later - 1 WHERE id = OLD.previous",
            "DELETE FROM events WHERE response = OLD.id",
        ),
    ),
)
# Conversations and their items. Triggers keep the bytes of each conversation, and add them to those of its owner.
_CONVERSATIONS: tuple[str | Trigger, ...] = (
    "CREATE TABLE conversations ("
    " id TEXT PRIMARY KEY, owner TEXT NOT NULL, metadata TEXT NOT NULL, created INTEGER NOT NULL, used REAL NOT NULL,"
    " next INTEGER NOT NULL DEFAULT 0, size INTEGER NOT NULL)",
    "CREATE INDEX conversations_by_use ON conversations (owner, used)",
    "CREATE INDEX conversations_by_age ON conversations (used)",
    "CREATE TABLE conversation_items ("
    " conversation TEXT NOT NULL, place INTEGER NOT NULL, id TEXT NOT NULL, data BLOB NOT NULL,"
    " PRIMARY KEY (conversation, place)) WITHOUT ROWID",
    "CREATE UNIQUE INDEX items_by_id ON conversation_items (conversation, id)",
    Trigger(
        "conversation_kept",
        "INSERT",
        (
            "INSERT INTO owners VALUES (NEW.owner, NEW.size)"
            " ON CONFLICT (owner) DO UPDATE SET size = owners.size + excluded.size",
        ),
        "conversations",
    ),
    Trigger(
        "conversation_changed",
        "UPDATE OF size",
        ("UPDATE owners SET size = size + NEW.size - OLD.size WHERE owner = NEW.owner",),
        "conversations",
    ),
    Trigger(
        "conversation_dropped",
        "DELETE",
        (
            "UPDATE owners SET size = size - OLD.size WHERE owner = OLD.owner",
            "DELETE FROM conversation_items WHERE conversation = OLD.id",
        ),
        "conversations",
    ),
    Trigger(
        "item_kept",
        "INSERT",
        (f"UPDATE conversations SET size = size + LENGTH(NEW.data) + {ROW_BYTES} WHERE id = NEW.conversation",),
        "conversation_items",
    ),
    Trigger(
        "item_dropped",
        "DELETE",
        (f"UPDATE conversations SET size = size - LENGTH(OLD.data) - {ROW_BYTES} WHERE id = OLD.conversation",),
        "conversation_items",
    ),
)
# Calls of MCP servers that were begun, so that none is made twice.
_CALLS: tuple[str | Trigger, ...] = (
    "CREATE TABLE calls ("
    " owner TEXT NOT NULL, id TEXT NOT NULL, made REAL NOT NULL, PRIMARY KEY (owner, id)) WITHOUT ROWID",
    "CREATE INDEX calls_by_age ON calls (made)",
)
MIGRATIONS: tuple[tuple[str | Trigger, ...], ...] = (_TABLES, _COUNTS, _CONVERSATIONS, _CALLS)
"""Statements that create each schema version from the previous one, in the words of SQLite."""


class FileDatabase:
    """SQLite in a file of this machine or in memory. A damaged file is moved aside, and its responses are lost."""

    answer_s: float | None = None
    is_shared = False
    since = -1.0  # makers of jobs call the one process that has the file, which renews all leases when it begins

    def __init__(self, path: str, clock: Callable[[], float] = time.time) -> None:
        self.path, self.now = path, clock
        self._fails = False
        self.connection = open_database(path)
        self.checkpoints = Checkpoints(path)

    def run(self, work: Callable[[], T], writes: Writes) -> T:
        """As in Database. SQLite does not wait for the disk at the end of any transaction."""
        try:
            return self._transaction(work, writes)
        except sqlite3.Error as error:
            if is_damaged(error) and self.path != MEMORY:
                self.checkpoints.wait()
                self.connection.close()
                move_aside(self.path, error)
                self.connection = open_database(self.path)
                return self._transaction(work, writes)
            if not self._fails:
                self._fails = True
                logger.error("ingress.store: %s cannot be used: %s", self.path, error, extra=about("responses"))
            raise StoreLostError("The store of responses cannot be used now; try again shortly.") from error

    def _transaction(self, work: Callable[[], T], writes: Writes) -> T:
        with self.connection:
            if writes is not Writes.NONE and not self.connection.in_transaction:
                self.connection.execute("BEGIN IMMEDIATE")  # another that writes is waited for now, not after a read
            done = work()
        self._fails = False
        self.checkpoints.begin_if_due()
        return done

    def execute(self, query: str, values: Sequence[object] = ()) -> sqlite3.Cursor:
        return self.connection.execute(query, values)

    def execute_each(self, query: str, rows: Sequence[Sequence[object]]) -> None:
        self.connection.executemany(query, rows)

    def attempt(self, query: str, values: Sequence[object]) -> None:
        with suppress(sqlite3.OperationalError):
            self.connection.execute(query, values)

    def announce(self, what: str, response_id: str) -> None:
        """Nobody else has the file."""

    async def listen(self, hear: Callable[[str, str | None], object]) -> None:
        """Nobody else announces anything."""

    def give_up(self, work: Callable[[], object]) -> None:
        """Work on a file has no limit in time."""


def open_database(path: str) -> sqlite3.Connection:
    """Open the database in a file, or in memory, and migrate it. A damaged file is moved aside first.

    Raises:
        ConfigError: the file cannot be opened, or a newer version wrote it.
    """
    try:
        return _opened(path)
    except sqlite3.Error as error:
        if not (is_damaged(error) or isinstance(error, _UnknownFormError)):
            raise ConfigError(f"ingress.store: {path} cannot be used ({error}); choose another file.") from error
        move_aside(path, error)
        return _opened(path)


def is_damaged(error: sqlite3.Error) -> bool:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def move_aside(path: str, error: sqlite3.Error) -> None:
    """Rename a file that cannot be read, with its log files, so that a new file can be created."""
    aside = f"{path}.damaged-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    for ending in ("", "-wal", "-shm"):
        with suppress(FileNotFoundError):
            os.rename(path + ending, aside + ending)
    keep_private(Path(path))
    message = "ingress.store: %s cannot be read (%s): it was moved to %s, and responses are kept in a new file."
    logger.error(message, path, error, aside, extra=about("responses"))


def keep_private(path: Path) -> None:
    """Make SQLite's files readable for this user only, because they contain prompts and answers."""
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))  # SQLite gives its log files the same mode
    for one in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
        with suppress(FileNotFoundError):
            if one.stat().st_uid == os.geteuid():
                one.chmod(0o600)


def fault_of(path: Path) -> str | None:
    """Check an existing file without changing it. Reads the whole file. Returns the fault, None if there is none."""
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=5)) as database:
            (version,) = database.execute("PRAGMA user_version").fetchone()
            (found,) = database.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.Error as error:
        return str(error)
    if version > len(MIGRATIONS):
        return f"a newer version wrote it (schema {version}; this version supports {len(MIGRATIONS)})"
    return None if found == "ok" else str(found)


class Checkpoints:
    """Copies the log to the database file, on its own thread and connection.

    SQLite's own checkpoints run in the commit that makes the log long, and wait for the disk several times. Here they
    only run if the log still grows, for example when writes never pause.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, "checkpoints")
        self._last: Future[None] | None = None

    def begin_if_due(self) -> None:
        """Start a checkpoint if the log is long. Call it after a transaction. Does not wait."""
        if self._path == MEMORY or (self._last is not None and not self._last.done()):
            return
        with suppress(OSError):
            if os.stat(f"{self._path}-wal").st_size > _CHECKPOINT_BYTES:
                self._last = self._thread.submit(self._run)

    def wait(self) -> None:
        """Wait for a running checkpoint, for example before the file is renamed."""
        if self._last is not None:
            self._last.result()

    def _run(self) -> None:
        # a later checkpoint may succeed
        with suppress(sqlite3.Error), closing(sqlite3.connect(self._path)) as database:
            database.execute("PRAGMA user_version").fetchone()  # reads the log's header
            database.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()


class _UnknownFormError(sqlite3.DatabaseError):
    """The tables in the file do not match any version's schema."""


def _opened(path: str) -> sqlite3.Connection:
    database = sqlite3.connect(path, timeout=30, check_same_thread=False)
    try:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        database.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        database.execute(f"PRAGMA wal_autocheckpoint = {_LARGEST_LOG_PAGES}").fetchone()
        database.execute("PRAGMA journal_size_limit = 0").fetchone()  # truncates the log's file to the log
        with database:
            database.execute("BEGIN IMMEDIATE")
            _migrate(database, path)
    except BaseException:
        database.close()
        raise
    return database


def _migrate(database: sqlite3.Connection, path: str) -> None:
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version > len(MIGRATIONS):
        message = f"a newer version wrote {path} (schema {version}); choose another file."
        raise ConfigError(f"ingress.store: {message}")
    for number, statements in enumerate(MIGRATIONS[version:], version + 1):
        for statement in statements:
            try:
                database.execute(_in_sqlite(statement))
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode == sqlite3.SQLITE_ERROR:  # a column or table differs
                    raise _UnknownFormError(str(error)) from error
                raise
        database.execute(f"PRAGMA user_version = {number}")


def _in_sqlite(statement: str | Trigger) -> str:
    if isinstance(statement, str):
        return statement
    body = " ".join(f"{one};" for one in statement.statements)
    return f"CREATE TRIGGER {statement.name} AFTER {statement.after} ON {statement.table} BEGIN {body} END"
