"""The Postgres database of stored responses, which all ingresses of an application share without an actor."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from raylm.errors import ConfigError, StoreLostError
from raylm.ingress.http.errors import logger
from raylm.ingress.responses.database import MIGRATIONS, Trigger, Writes
from raylm.stages import about

if TYPE_CHECKING:
    import psycopg

T = TypeVar("T")

_AGAIN_S = 0.5  # between two attempts to connect
_LONGEST_SCHEMA = 63  # bytes; Postgres cuts longer names
# In milliseconds. A lease of 5 s is renewed each 1.7 s, so a silence of less than 3 s costs no maker its jobs. A client
# that falls silent in a transaction keeps others from writing for `idle_in_transaction_session_timeout`.
_SESSION = {"statement_timeout": 2500, "idle_in_transaction_session_timeout": 1500, "tcp_user_timeout": 2500}
# Of the client, in seconds but for tcp_user_timeout. A URL may have others.
_CONNECTION = {
    "application_name": "raylm",
    "connect_timeout": "2",
    "keepalives_idle": "2",
    "keepalives_interval": "1",
    "keepalives_count": "2",
    "tcp_user_timeout": "2500",
}
_TEMPORARY = ("starting up", "shutting down", "recovery", "too many", "remaining connection slots")
_TYPES = {" INTEGER": " BIGINT", " REAL": " DOUBLE PRECISION", " BLOB": " BYTEA", " WITHOUT ROWID": ""}
_NOW = "EXTRACT(EPOCH FROM clock_timestamp())::float8"
_CHANNEL = "raylm"


def is_postgres(knob: str | None) -> bool:
    """Whether ``ingress.store`` is the URL of a Postgres database."""
    return re.match(r"postgres(ql)?://", knob or "") is not None


def examine(url: str) -> tuple[str, str | None]:
    """The URL without its password, and why the server cannot be used now, None if it can. Changes nothing.

    Raises:
        ConfigError: the server rejects the connection, the URL is malformed, or psycopg is not installed.
    """
    conninfo, shown = _conninfo(url)
    try:
        _open(conninfo, shown).close()
    except _LostError as error:
        return shown, str(error)
    return shown, None


class PostgresDatabase:
    """The schema of an application in a Postgres database.

    A transaction that writes holds a lock of the schema, so one writes at a time, as in SQLite. Times are the server's.

    A server that is away is no error here: calls raise StoreLostError until it is back.
    """

    answer_s: float | None = 3.0
    is_shared = True

    def __init__(self, url: str, application: str, clock: Callable[[], float] | None = None) -> None:
        """Connect, and migrate the schema.

        Raises:
            ConfigError: psycopg is not installed, the URL is malformed, the server rejects it, or a newer version wrote
                the schema.
        """
        self._connection: psycopg.Connection[Any] | None = None
        self._conninfo, self._shown = _conninfo(url)
        self._schema, self._clock = _schema_of(application), clock
        self._lock = int.from_bytes(hashlib.sha256(self._schema.encode()).digest()[:8], "big", signed=True)
        self._not_before = 0.0  # of the next attempt to connect, on the monotonic clock
        self._offset = time.time() - time.monotonic()
        self._work: Callable[[], object] | None = None
        self._fails = False
        self.since = self.now()
        try:
            self._connected()
        except _LostError as error:
            self._log(error)

    def __del__(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def now(self) -> float:
        return time.monotonic() + self._offset if self._clock is None else self._clock()

    def run(self, work: Callable[[], T], writes: Writes) -> T:
        """As in Database. A transaction whose connection breaks before its end is tried once more."""
        import psycopg

        self._work = work
        try:
            try:
                done = self._transaction(work, writes)
            except _LostError:
                if self._work is not work:
                    raise
                done = self._transaction(work, writes)
        except (psycopg.Error, ConfigError, _LostError) as error:
            self._log(error)
            raise StoreLostError("The store of responses cannot be used now; try again shortly.") from error
        finally:
            self._work = None
        self._fails = False
        return done

    def execute(self, query: str, values: Sequence[object] = ()) -> psycopg.Cursor[Any]:
        connection = self._connected()
        return connection.execute(*_in_psycopg(query, values), binary=True)

    def execute_each(self, query: str, rows: Sequence[Sequence[object]]) -> None:
        if rows:
            statement, _ = _in_psycopg(query, rows[0])
            with self._connected().cursor() as cursor:
                cursor.executemany(statement, rows)

    def attempt(self, query: str, values: Sequence[object]) -> None:
        """As in Database. Reads are no transaction, so an error has no consequence."""
        import psycopg

        with suppress(psycopg.Error):
            self.execute(query, values)

    def announce(self, what: str, response_id: str) -> None:
        self.execute("SELECT pg_notify(?, ?)", (_CHANNEL, f"{self._schema} {what} {response_id}"))

    async def listen(self, hear: Callable[[str, str | None], object]) -> None:
        import psycopg

        while True:
            with suppress(psycopg.Error):
                async with await psycopg.AsyncConnection.connect(self._conninfo, autocommit=True) as connection:
                    await connection.execute(f"LISTEN {_CHANNEL}")
                    hear("ended", None)
                    async for notice in connection.notifies():
                        schema, what, response_id = notice.payload.rsplit(" ", 2)
                        if schema == self._schema and notice.pid != self._pid:
                            hear(what, response_id)
            await asyncio.sleep(_AGAIN_S)

    def give_up(self, work: Callable[[], object]) -> None:
        import psycopg

        connection = self._connection
        if self._work is work and connection is not None:
            self._work = None
            # the thread waits for this socket, and finds it closed
            with suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(connection.fileno())) as same:
                same.shutdown(socket.SHUT_RDWR)

    def _transaction(self, work: Callable[[], T], writes: Writes) -> T:
        import psycopg

        connection, ends = self._connected(), False
        try:
            if writes is Writes.NONE:
                return work()
            self._begin(connection, writes)
            done = work()
            ends = True
            connection.execute("COMMIT")
            return done
        except BaseException as error:
            if not connection.closed:
                with suppress(psycopg.Error):
                    connection.execute("ROLLBACK")
            elif isinstance(error, psycopg.errors.IdleInTransactionSessionTimeout) or (
                isinstance(error, psycopg.Error) and not ends
            ):  # nothing is committed
                raise _LostError(str(error)) from error
            raise

    def _begin(self, connection: psycopg.Connection[Any], writes: Writes) -> None:
        """Begin a transaction that writes, when no other does, and learn the server's time."""
        waits = "" if writes is Writes.DURABLE else "SET LOCAL synchronous_commit TO off; "
        held = f"WITH held AS MATERIALIZED (SELECT pg_advisory_xact_lock({self._lock}))"
        cursor = connection.execute(f"BEGIN; {waits}{held} SELECT {_NOW} FROM held".encode(), prepare=False)
        while cursor.nextset():
            pass
        self._learn_time(cursor)

    def _learn_time(self, cursor: psycopg.Cursor[Any]) -> None:
        (now,) = cursor.fetchone() or (0.0,)
        self._offset = now - time.monotonic()

    def _connected(self) -> psycopg.Connection[Any]:
        """The connection, a new one if the last one is lost.

        Raises:
            _LostError: the server cannot be reached now.
            ConfigError: as the constructor.
        """
        if self._connection is not None and not self._connection.closed:
            return self._connection
        if time.monotonic() < self._not_before:
            raise _LostError("it could not be reached a moment ago")
        try:
            connection = self._connect()
        except BaseException:
            self._not_before = time.monotonic() + _AGAIN_S
            raise
        self._connection, self._pid = connection, connection.info.backend_pid
        self.since = self.now()
        return connection

    def _connect(self) -> psycopg.Connection[Any]:
        import psycopg

        connection = _open(self._conninfo, self._shown)
        try:
            limits = "; ".join(f"SET {name} TO {value}" for name, value in _SESSION.items())
            connection.execute(f'{limits}; SET search_path TO "{self._schema}"'.encode(), prepare=False)
            self._begin(connection, Writes.DURABLE)
            self._migrate(connection)
            connection.execute("COMMIT")
        except psycopg.OperationalError as error:
            connection.close()
            raise _LostError(str(error)) from error
        except psycopg.Error as error:
            connection.close()
            raise ConfigError(f"ingress.store: {self._shown} cannot be used ({error}).") from error
        except BaseException:
            connection.close()
            raise
        return connection

    def _migrate(self, connection: psycopg.Connection[Any]) -> None:
        there = "SELECT to_regnamespace(%s) IS NOT NULL, to_regclass('schema_version') IS NOT NULL"
        has_schema, has_version = connection.execute(there, (f'"{self._schema}"',)).fetchone() or (False, False)
        if not has_schema:
            connection.execute(f'CREATE SCHEMA "{self._schema}"'.encode())
        if not has_version:
            connection.execute("CREATE TABLE schema_version (number BIGINT NOT NULL)")
            connection.execute("INSERT INTO schema_version VALUES (0)")
        (version,) = connection.execute("SELECT number FROM schema_version").fetchone() or (0,)
        if version > len(MIGRATIONS):
            message = f"a newer version wrote {self._shown} (schema {version}); choose another database."
            raise ConfigError(f"ingress.store: {message}")
        for statements in MIGRATIONS[version:]:
            for statement in statements:
                for one in _in_postgres(statement):
                    connection.execute(one.encode())
        connection.execute("UPDATE schema_version SET number = %s", (len(MIGRATIONS),))

    def _log(self, error: Exception) -> None:
        """Log an error, once until the database can be used again."""
        if not self._fails:
            self._fails = True
            logger.error("ingress.store: %s cannot be used: %s", self._shown, error, extra=about("responses"))


class _LostError(Exception):
    """The connection could not be opened, or broke before the end of a transaction."""


def _open(conninfo: str, shown: str) -> psycopg.Connection[Any]:
    import psycopg

    try:
        return psycopg.connect(conninfo, autocommit=True)
    except psycopg.Error as error:
        if "FATAL" in str(error) and not any(one in str(error) for one in _TEMPORARY):
            raise ConfigError(f"ingress.store: {shown} cannot be used ({error}).") from None
        raise _LostError(str(error)) from None


def _conninfo(url: str) -> tuple[str, str]:
    """What libpq connects by, and the URL without its password."""
    try:
        from psycopg import ProgrammingError
        from psycopg.conninfo import conninfo_to_dict, make_conninfo
    except ImportError as error:
        message = f"ingress.store: a Postgres URL needs psycopg ({error}): pip install 'raylm[postgres]'"
        raise ConfigError(message) from None
    try:
        given = conninfo_to_dict(url)
        if re.fullmatch(r"[\d,]*", str(given.get("port", ""))) is None:
            raise ProgrammingError("the port is not a number")
    except ProgrammingError:  # its message may have a part of the password
        message = "ingress.store: not a valid URL of Postgres, such as postgresql://USER@HOST:5432/DATABASE"
        raise ConfigError(message) from None
    shown = f"postgresql://{given.get('host', '')}:{given.get('port', 5432)}/{given.get('dbname', '')}"
    return make_conninfo(url, **{name: value for name, value in _CONNECTION.items() if name not in given}), shown


def _schema_of(application: str) -> str:
    schema = f"raylm {application}".strip()
    if len(schema.encode()) > _LONGEST_SCHEMA or '"' in schema or "\0" in schema:
        message = f"the application's name {application!r} is too long for a schema of Postgres, or has a quote"
        raise ConfigError(f"ingress.store: {message}; rename the application.")
    return schema


def _in_psycopg(query: str, values: Sequence[object]) -> tuple[bytes, Sequence[object] | None]:
    """A statement and its values. Postgres stores no NUL, and no stored text has U+FFFD in its place."""
    if not values:
        return query.encode(), None
    text = [value.replace("\0", "\ufffd") if isinstance(value, str) else value for value in values]
    return query.replace("%", "%%").replace("?", "%s").encode(), text


def _in_postgres(statement: str | Trigger) -> list[str]:
    """A statement of MIGRATIONS in the words of Postgres."""
    if isinstance(statement, str):
        for name, other in _TYPES.items():
            statement = statement.replace(name, other)
        return [statement]
    body = " ".join(f"{one};" for one in statement.statements)
    name = statement.name
    return [
        f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN {body} RETURN NULL; END$$",
        f"CREATE TRIGGER {name} AFTER {statement.after} ON {statement.table} FOR EACH ROW EXECUTE FUNCTION {name}()",
    ]
