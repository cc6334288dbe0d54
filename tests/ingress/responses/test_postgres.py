"""Postgres as the store: notifications between stores, and stores while the server is away."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from raylm.errors import ConfigError, StoreLostError
from raylm.ingress.responses import postgres as module
from raylm.ingress.responses.database import MIGRATIONS, Writes
from raylm.ingress.responses.postgres import PostgresDatabase, examine
from raylm.ingress.responses.shared_store import open_store
from raylm.ingress.responses.store import LEASE_S, ResponseStore, ToldEvents
from tests.ingress.refused import error_of
from tests.ingress.responses.conftest import Place
from tests.ingress.responses.test_background import PATH, replica, status
from tests.ingress.responses.test_store import record
from tests.postgres import Postgres, lacking
from tests.serving import free_port

JOB: dict[str, Any] = {"job": b"job", "maker": "m"}


@pytest.fixture
def own_server() -> Iterator[Postgres]:
    """A server that the test may stop."""
    if (reason := lacking()) is not None:
        pytest.skip(reason)
    server = Postgres()
    yield server
    server.remove()


def opened(server: Postgres, application: str) -> ResponseStore:
    store = open_store({}, server.url, application)
    store._database.since = 0.0
    return store


async def wait_for_server(store: ResponseStore) -> None:
    """Wait until the server answers again."""
    async with asyncio.timeout(300):
        while True:
            try:
                return await store._do(lambda: None)
            except StoreLostError:
                await asyncio.sleep(0.05)


async def test_what_one_store_writes_wakes_those_that_wait_at_another(
    postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise they would wait for FOLLOW_S, or forever."""
    monkeypatch.setattr("raylm.ingress.responses.store.FOLLOW_S", 3600.0)
    application = uuid.uuid4().hex
    one, other = opened(postgres, application), opened(postgres, application)
    await one.put("me", "a", record("", "queued"), **JOB)
    cancelled = asyncio.create_task(one.until_cancelled("me", "a"))

    async def follow(after: int) -> Any:
        while (found := await other.follow("me", "a", after)) == ([], "queued"):
            pass  # it may wake when it starts to listen
        return found

    following = asyncio.create_task(follow(-1))
    async with asyncio.timeout(300):
        while "a" not in other._told:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        await one.append("a", "m", ToldEvents(3, 1, b"[3]"))
        assert await following == ([b"[3]"], "queued")
        following = asyncio.create_task(follow(3))
        await asyncio.sleep(0.2)
        assert not cancelled.done()
        assert await other.cancel("me", "a") is not None
        await cancelled
        assert await following == ([], "cancelled")


async def test_those_that_wait_hear_of_what_happened_while_the_server_was_away(own_server: Postgres) -> None:
    one = opened(own_server, "app")
    await one.put("me", "a", record("", "queued"), **JOB)
    cancelled = asyncio.create_task(one.until_cancelled("me", "a"))
    await asyncio.sleep(0.2)
    other = opened(own_server, "app")
    own_server.stop()
    own_server.start()
    await wait_for_server(other)
    await other.cancel("me", "a")
    async with asyncio.timeout(300):
        await cancelled


async def test_stores_that_write_at_the_same_time_count_every_byte(postgres: Postgres) -> None:
    """Also if a store drops a response that another one uses."""
    application = uuid.uuid4().hex
    stores = [opened(postgres, application) for _ in range(3)]
    for store in stores:
        store._max_bytes = 20_000

    async def live(place: int) -> None:
        store = stores[place]
        for number in range(60):
            name = f"{place}-{number}"
            before = f"{place}-{number - 1}" if number % 3 else None
            await store.put("me", name, record("x" * 300), before)
            await store.delete("me", f"{(place + 1) % 3}-{number - 2}")
            await store.get("me", f"{(place + 2) % 3}-{number - 1}")

    await asyncio.gather(*map(live, range(3)))
    sizes = stores[0]._one("SELECT (SELECT SUM(size) FROM owners), (SELECT SUM(size) FROM responses)")
    assert sizes[0] == sizes[1]
    later = "SELECT later, (SELECT COUNT(*) FROM responses child WHERE child.previous = responses.id) FROM responses"
    assert all(real == told for real, told in stores[0]._database.execute(later))


async def test_an_ingress_that_falls_silent_while_it_writes_keeps_no_other_from_writing(postgres: Postgres) -> None:
    application = uuid.uuid4().hex
    one, other = opened(postgres, application), opened(postgres, application)
    goes_on, writes = threading.Event(), threading.Event()

    def silent() -> None:
        one._database.execute("SELECT 1")
        writes.set()
        goes_on.wait()

    stuck = asyncio.get_running_loop().run_in_executor(None, one._database.run, silent, Writes.DURABLE)
    await asyncio.to_thread(writes.wait)
    await other.put("me", "a", record())
    goes_on.set()
    await stuck  # its transaction had ended, so it began another one


async def test_without_the_server_calls_fail_and_go_on_when_it_is_back(
    own_server: Postgres, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(own_server, "app")
    await store.put("me", "a", record("a"))
    own_server.stop()
    for _ in range(3):
        with pytest.raises(StoreLostError) as caught:
            await store.get("me", "a")
        assert caught.value.status == 503
    assert len([line for line in caplog.messages if "ingress.store" in line]) == 1
    own_server.start()
    await wait_for_server(store)
    assert await store.get("me", "a") == record("a")


async def test_a_connection_that_the_server_closed_is_opened_again_unnoticed(own_server: Postgres) -> None:
    store = opened(own_server, "app")
    await store.put("me", "a", record("a"))
    own_server.stop()
    own_server.start()
    await store.put("me", "b", record("b"))
    assert await store.get("me", "a") == record("a")


async def test_a_server_that_falls_silent_is_lost_within_a_limit(own_server: Postgres) -> None:
    """The server's machine acknowledges packets, so the connection itself never ends."""
    store = opened(own_server, "app")
    await store.put("me", "a", record("a"))
    own_server.freeze()
    calls = await asyncio.gather(*(store.get("me", "a") for _ in range(20)), return_exceptions=True)
    assert {type(call) for call in calls} == {StoreLostError}
    with pytest.raises(StoreLostError):
        await store.put("me", "b", record("b"))
    own_server.freeze(frozen=False)
    await wait_for_server(store)
    assert await store.get("me", "a") == record("a")


async def test_what_clients_see_of_a_server_that_is_away(own_server: Postgres) -> None:
    """Stored responses give 503 while other requests work. After the server is back, all requests work again."""
    assert (PostgresDatabase.answer_s or 99) < 5
    async with replica(Place(own_server.url, "app")) as one:
        stored = (await one.create(background=False)).json()
        own_server.stop()
        path = f"{PATH}/{stored['id']}"
        refused = (await one.client.get(path), await one.create(), await one.client.delete(path))
        assert [error_of(answer, 503)["code"] for answer in refused] == ["store_lost"] * 3
        answer = (await one.create(background=False)).json()
        assert (answer["status"], answer["store"]) == ("completed", False)
        own_server.start()
        await wait_for_server(one.responses._store)
        assert (await one.client.get(path)).json() == stored
        made = (await one.create()).json()
        assert (await status(one.client, made["id"]))["status"] == "completed"


async def test_a_job_is_not_lost_because_the_server_was_away(
    own_server: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first maker that reaches the server again waits until other makers can have renewed their jobs."""
    clock = [1000.0]
    one, other = (ResponseStore(PostgresDatabase(own_server.url, "app", lambda: clock[0])) for _ in range(2))
    await one.put("me", "a", record("", "queued"), **JOB)
    clock[0] += 2 * LEASE_S
    own_server.stop()
    own_server.start()
    await wait_for_server(other)
    assert await other.renew("other", 9) == []
    clock[0] += LEASE_S - 1
    assert await one.renew("m", 9, ["a"]) == []
    clock[0] += 2
    assert await other.renew("other", 9) == []
    clock[0] += LEASE_S
    assert [job.response_id for job in await other.renew("other", 9)] == ["a"]


async def test_a_store_opens_while_the_server_is_away(own_server: Postgres) -> None:
    own_server.stop()
    store = opened(own_server, "app")
    with pytest.raises(StoreLostError):
        await store.get("me", "a")
    own_server.start()
    await wait_for_server(store)
    await store.put("me", "a", record("a"))
    assert await store.get("me", "a") == record("a")


async def test_applications_share_a_database_but_no_responses(postgres: Postgres) -> None:
    application = uuid.uuid4().hex
    one, other = opened(postgres, application), opened(postgres, application + " too")
    await one.put("me", "a", record("a"), **JOB)
    assert await other.get("me", "a") is None
    assert await one.get("me", "a") == record("a")


async def test_an_id_with_a_nul_is_unknown(postgres: Postgres) -> None:
    store = opened(postgres, uuid.uuid4().hex)
    assert await store.get("me", "a\0b") is None
    assert await store.history("me\0", "a") is None


async def test_a_large_record_is_stored(postgres: Postgres) -> None:
    store = opened(postgres, uuid.uuid4().hex)
    await store.put("me", "a", record("\0" + "x" * 6_000_000))
    assert len(orjson.loads(await store.get("me", "a") or b"")["text"]) == 6_000_001


def test_a_newer_schema_is_refused_by_name(postgres: Postgres) -> None:
    application = uuid.uuid4().hex
    database = PostgresDatabase(postgres.url, application)
    database.execute("UPDATE schema_version SET number = ?", (len(MIGRATIONS) + 1,))
    with pytest.raises(ConfigError, match=r"ingress\.store: a newer version wrote postgresql://127"):
        PostgresDatabase(postgres.url, application)


def test_a_schema_of_the_first_version_is_migrated(postgres: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    application = uuid.uuid4().hex
    monkeypatch.setattr(module, "MIGRATIONS", MIGRATIONS[:1])
    database = PostgresDatabase(postgres.url, application)
    row = "('a', 'me', 'completed', ?, 1, 1, 9)"
    database.execute(
        f"INSERT INTO responses (id, owner, status, record, used, place, size) VALUES {row}", (record("a"),)
    )
    monkeypatch.undo()
    database = PostgresDatabase(postgres.url, application)
    assert database.execute("SELECT size FROM owners WHERE owner = 'me'").fetchone() == (9,)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("postgresql://raylm:secret@{host}/nothing", 'database "nothing" does not exist'),
        ("postgresql://nobody:secret@{host}/postgres", 'role "nobody" does not exist'),
        ("postgresql://raylm:secret/slash@{host}/postgres", "not a valid URL of Postgres"),
        ("postgresql://raylm:secret@{host}/postgres?colour=red", "not a valid URL of Postgres"),
    ],
)
def test_a_url_that_cannot_work_is_refused_without_its_password(postgres: Postgres, url: str, message: str) -> None:
    url = url.format(host=f"{postgres.host}:{postgres.port}")
    for refuse in (lambda: PostgresDatabase(url, "app"), lambda: examine(url)):
        with pytest.raises(ConfigError, match=r"^ingress\.store: ") as caught:
            refuse()
        assert message in str(caught.value)
        assert "secret" not in str(caught.value)


def test_what_doctor_says_of_it(postgres: Postgres) -> None:
    place = f"127.0.0.1:{postgres.port}/postgres"
    assert examine(f"postgresql://raylm:secret@{place}") == (f"postgresql://{place}", None)
    shown, fault = examine(f"postgres://raylm:secret@127.0.0.1:{free_port()}/postgres")
    assert "secret" not in shown
    assert "refused" in (fault or "")
