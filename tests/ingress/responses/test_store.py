"""ResponseStore: stored responses by owner and age, restarts, and the takeover of unfinished responses."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
from concurrent.futures import Future
from pathlib import Path
from random import Random
from typing import Any

import orjson
import pytest

from raylm.errors import ConfigError, StoreLostError
from raylm.ingress.responses.database import MEMORY, MIGRATIONS, FileDatabase, fault_of
from raylm.ingress.responses.storage import store_path
from raylm.ingress.responses.store import LEASE_S, MOST_MAKERS, ResponseStore, ToldEvents
from tests.ingress.responses.conftest import Place


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


def record(text: str = "", status: str = "completed") -> bytes:
    return orjson.dumps({"response": {"status": status, "output": []}, "input": [], "text": text})


async def kept(store: ResponseStore, names: str, owner: str = "") -> str:
    """The responses that are stored. Looking at them does not count as use."""
    return "".join([name for name in names if store._row(owner, name, "id") is not None])


async def test_a_conversation_is_kept_once(place: Place) -> None:
    store = ResponseStore(place.open(), max_bytes=2**20)
    text = "x" * 1500
    for number in range(399):
        before = str(number - 1) if number else None
        await store.put("", str(number), record(f"{number} {text}"), before)
    history = await store.history("", "398")
    assert history is not None
    assert [orjson.loads(one)["text"].split()[0] for one in history] == [str(number) for number in range(399)]
    assert await store.history("", "399") is None
    assert await store.history("other", "398") is None
    (size,) = store._one("SELECT SUM(size) FROM responses")
    assert size < 399 * 2200


async def test_what_was_deleted_stays_for_what_was_built_on_it(place: Place) -> None:
    store = ResponseStore(place.open())
    for name, before in (("a", None), ("b", "a"), ("c", "b"), ("d", "b")):
        await store.put("", name, record(name), before)
    for name in "ab":
        assert await store.delete("", name)
        assert not await store.delete("", name)
        assert await store.get("", name) is None
        assert await store.history("", name) is None
    history = await store.history("", "c")
    assert history is not None
    assert [orjson.loads(one)["text"] for one in history] == ["a", "b", "c"]
    await store.delete("", "c")
    assert store._one("SELECT COUNT(*) FROM responses") == (3,)
    await store.delete("", "d")
    assert store._one("SELECT COUNT(*) FROM responses") == (0,)


async def test_the_least_recently_used_goes_and_of_a_conversation_its_end(place: Place) -> None:
    size = len(record("x" * 400)) + 512
    store = ResponseStore(place.open(Clock()), max_bytes=3 * size)
    for name in "abc":
        await store.put("", name, record("x" * 400))
    await store.get("", "a")
    await store.put("", "d", record("x" * 400))
    assert await kept(store, "abcd") == "acd"
    await store.put("", "e", record("x" * 400), "d")  # so that d is used too
    assert await kept(store, "abcde") == "ade"
    await store.put("", "f", record("x" * 400))
    assert await kept(store, "abcdef") == "def"
    await store.put("", "g", record("x" * 400))
    assert await kept(store, "abcdefg") == "dfg"  # e, which continues d, was dropped before it
    for name, before in zip("hij", "ghi", strict=True):
        await store.put("", name, record("x" * 400), before)
    assert await kept(store, "abcdefghij") == "hij"
    assert await store.history("", "j") is None  # its first response is gone


async def test_an_owner_who_stores_much_loses_their_own(place: Place) -> None:
    store = ResponseStore(place.open(Clock()), max_bytes=10_000)
    await store.put("quiet", "first", record())
    for number in range(40):
        await store.put("busy", str(number), record("x" * 1000))
    assert await store.get("quiet", "first") == record()
    assert await store.get("busy", "39") is not None
    assert await store.get("busy", "0") is None
    (size,) = store._one("SELECT SUM(size) FROM responses WHERE owner = 'busy'")
    assert 8_000 < size <= 10_000


async def test_the_old_goes(place: Place) -> None:
    clock = Clock()
    store = ResponseStore(place.open(clock), max_age_s=100)
    for name, before in (("a", None), ("b", None), ("c", "b")):
        await store.put("", name, record(), before)
    clock.now += 90
    await store.get("", "b")
    clock.now += 90
    await store.put("", "d", record())
    assert await kept(store, "abcd") == "bd"


async def test_any_history_of_puts_and_deletes_against_a_plain_model(place: Place) -> None:
    luck, store = Random(3), ResponseStore(place.open())
    chains: dict[str, list[str]] = {}  # stored responses with their predecessors
    for number in range(300):
        name, before = str(number), luck.choice([None, *chains])
        await store.put("", name, record(name), before)
        chains[name] = [*(chains[before] if before else []), name]
        if luck.random() < 0.4:
            gone = luck.choice([*chains])
            assert await store.delete("", gone)
            del chains[gone]
        if number % 20 == 0:
            for name, chain in chains.items():
                found = await store.history("", name)
                assert found is not None
                assert [orjson.loads(one)["text"] for one in found] == chain
    for name in list(chains):
        await store.delete("", name)
    assert store._one("SELECT COUNT(*) FROM responses") == (0,)


def told_events(last: int, tokens: int) -> ToldEvents:
    return ToldEvents(last, tokens, orjson.dumps([{"sequence_number": last}]))


async def test_jobs_survive_their_makers(place: Place) -> None:
    clock = Clock()
    store = ResponseStore(place.open(clock))
    await store.put("me", "a", record("a", "queued"), None, b"job", "first")
    await store.put("me", "a", record("b", "in_progress"), None, None, "first", told_events(4, 3))
    await store.append("a", "first", told_events(6, 5))
    assert await store.renew("second", 9) == []
    clock.now += LEASE_S - 1
    assert await store.renew("first", 9, ["a"]) == []
    clock.now += LEASE_S - 1
    store = ResponseStore(place.open(clock))  # after all processes have ended
    assert await store.renew("second", 9) == []
    clock.now += LEASE_S
    assert await store.renew("second", 0) == []
    (lost,) = await store.renew("second", 9)
    assert (lost.owner, lost.response_id, lost.job, lost.last, lost.tokens) == ("me", "a", b"job", 6, 5)
    assert await store.renew("third", 9) == []
    await store.append("a", "first", told_events(8, 7))  # a replaced maker's events are ignored
    await store.put("me", "a", record("stale"), None, None, "first", told_events(9, 9))
    found = await store.follow("me", "a", -1)
    assert found is not None
    assert [orjson.loads(batch)[0]["sequence_number"] for batch in found[0]] == [4, 6]
    await store.put("me", "a", record("done"), None, None, "second", told_events(9, 9))
    assert await store.get("me", "a") == record("done")
    clock.now += 2 * LEASE_S
    assert await store.renew("third", 9) == []
    found = await store.follow("me", "a", 6)
    assert found is not None
    assert ([orjson.loads(batch)[0]["sequence_number"] for batch in found[0]], found[1]) == ([9], "completed")
    assert await store.follow("other", "a", 6) is None


async def test_each_lost_job_goes_to_exactly_one_of_those_that_ask(place: Place) -> None:
    """Also if each store has its own connection to the database."""
    clock = Clock()
    stores = [ResponseStore(place.open(clock)) for _ in range(4)]
    store = stores[0]
    for number in range(60):
        await store.put("me", str(number), record("", "queued"), None, b"job", "gone")
    clock.now += 2 * LEASE_S
    taken = await asyncio.gather(
        *(one.renew(f"{place}", most) for most in (2, 5, 9) for place, one in enumerate(stores))
    )
    assert sorted(int(job.response_id) for some in taken for job in some) == [*range(60)]
    assert await store.renew("late", 99) == []


async def test_a_job_is_lost_that_its_maker_is_not_at_work_on(place: Place) -> None:
    """Even if the maker lives. But no job is lost because the store itself was away."""
    clock = Clock()
    store = ResponseStore(place.open(clock))
    for name in "ab":
        await store.put("", name, record("", "queued"), None, b"job", "it")
    clock.now += LEASE_S - 1
    assert await store.renew("it", 9, ["b", "unknown"]) == []
    clock.now += 2
    assert [job.response_id for job in await store.renew("it", 9, ["b"])] == ["a"]
    clock.now += 2 * LEASE_S
    store = ResponseStore(place.open(clock))
    store.renew_all()
    assert await store.renew("other", 9) == []
    assert await store.renew("it", 9, ["a", "b"]) == []


async def test_who_brings_down_its_makers_fails(place: Place) -> None:
    clock = Clock()
    store = ResponseStore(place.open(clock))
    streamed = orjson.dumps(orjson.loads(record("", "queued")) | {"streamed": True})
    await store.put("", "a", streamed, None, b"job", "0", told_events(1, 0))
    for number in range(1, MOST_MAKERS):
        clock.now += 2 * LEASE_S
        assert len(await store.renew(str(number), 9)) == 1
    clock.now += 2 * LEASE_S
    assert await store.renew("last", 9) == []
    found = await store.get("", "a")
    assert found is not None
    response = orjson.loads(found)["response"]
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
    followed = await store.follow("", "a", 1)
    assert followed is not None
    (event,) = orjson.loads(followed[0][0])
    assert (event["type"], event["sequence_number"], event["response"]) == ("response.failed", 2, response)
    await store.put("", "b", record("", "queued"), None, b"job", "0")
    for number in range(2 * MOST_MAKERS):  # an orderly release is no failure
        await store.release("b", "another")
        assert await store.renew(str(number), 9) == []
        await store.release("b", str(number - 1) if number else "0")
        assert len(await store.renew(str(number), 9)) == 1


async def test_its_files_are_for_their_user_alone(tmp_path: Path) -> None:
    def modes() -> dict[str, int]:
        return {entry.name: stat.S_IMODE(entry.stat().st_mode) for entry in os.scandir(tmp_path)}

    path, closed = tmp_path / "x.db", dict.fromkeys(("x.db", "x.db-wal", "x.db-shm"), 0o600)
    store = ResponseStore(FileDatabase(store_path(str(path), "app")))
    await store.put("", "a", record())
    assert modes() == closed
    for name in closed:  # the modes that older versions set
        os.chmod(tmp_path / name, 0o644)
    store_path(str(path), "app")
    assert modes() == closed


def test_where_the_file_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert store_path(None, "") == store_path(":memory:", "app") == ":memory:"
    assert store_path(None, "a/b") == str(tmp_path / ".local/state/raylm/a%2Fb.sqlite")
    assert (tmp_path / ".local/state/raylm").stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert store_path(None, "a") == str(tmp_path / "state/raylm/a.sqlite")
    named: Any = tmp_path / "there" / "x.db"
    assert store_path(str(named), "app") == str(named)


def counted(store: ResponseStore) -> None:
    """Check that the stored sizes equal the sizes of the rows."""
    rows = "SELECT owner, SUM(size) FROM responses GROUP BY owner ORDER BY owner"
    kept = "SELECT owner, size FROM owners WHERE size > 0 ORDER BY owner"
    assert (
        store._database.execute(kept).fetchall() == store._database.execute(rows).fetchall()
    )  # a Decimal equals an int
    size = (
        "SELECT 512 + LENGTH(record) + COALESCE(LENGTH(job), 0) + (SELECT COALESCE(SUM(LENGTH(data) + 512), 0)"
        " FROM events WHERE response = responses.id), size FROM responses"
    )
    assert all(real == told for real, told in store._database.execute(size))
    later = "SELECT later, (SELECT COUNT(*) FROM responses child WHERE child.previous = responses.id) FROM responses"
    assert all(real == told for real, told in store._database.execute(later))


async def test_any_life_of_responses_and_jobs_is_counted(place: Place) -> None:
    luck, clock = Random(5), Clock()
    store = ResponseStore(place.open(clock), max_bytes=20_000)
    jobs: list[tuple[str, str]] = []
    for number in range(400):
        owner, name = luck.choice("ab"), str(number)
        before = luck.choice([None, *(str(one) for one in range(max(0, number - 5), number))])
        kind = luck.random()
        if kind < 0.3:
            await store.put(owner, name, record(name, "queued"), before, b"j" * 300, "m", told_events(0, 0))
            jobs.append((owner, name))
        else:
            await store.put(owner, name, record("x" * luck.randrange(2000)), before)
        if jobs and luck.random() < 0.4:
            of, job = jobs.pop(luck.randrange(len(jobs)))
            way = luck.randrange(4)
            if way == 0:
                await store.put(of, job, record("done"), None, None, "m", told_events(3, 3))
            elif way == 1:
                await store.cancel(of, job)
            elif way == 2:
                await store.delete(of, job)
            else:
                await store.put(of, job, record("more", "in_progress"), None, None, "m", told_events(3, 3))
                await store.append(job, "m", told_events(5, 4))
        if luck.random() < 0.1:
            clock.now += 2 * LEASE_S
            await store.renew("m", 9)
        counted(store)


async def test_a_job_is_not_dropped_to_make_room(place: Place) -> None:
    store = ResponseStore(place.open(), max_bytes=20_000)
    await store.put("", "job", record("", "queued"), None, b"j" * 3000, "maker")
    for number in range(30):
        await store.put("", str(number), record("x" * 1000))
    assert await store.get("", "job") is not None
    await store.put("", "job", record("done"), None, None, "maker")
    assert await store.get("", "job") == record("done")


async def test_a_put_writes_the_log_alone_and_another_thread_copies_it(tmp_path: Path) -> None:
    path, log = tmp_path / "responses.sqlite", tmp_path / "responses.sqlite-wal"
    database = FileDatabase(str(path))
    store, checkpoints = ResponseStore(database), database.checkpoints
    before, puts = path.stat().st_size, 0
    while checkpoints._last is None:
        assert path.stat().st_size == before
        await store.put("", str(puts), record("x" * 20_000))
        puts += 1
    assert log.stat().st_size > 16 * 2**20
    await asyncio.to_thread(checkpoints.wait)
    assert path.stat().st_size > puts * 20_000
    await store.put("", "last", record())
    assert log.stat().st_size < 2**20, "the log must be truncated"
    assert await ResponseStore(FileDatabase(str(path))).get("", str(puts - 1)) == record("x" * 20_000)
    assert fault_of(path) is None


async def test_a_log_that_cannot_be_copied_beside_the_puts_is_copied_by_one(tmp_path: Path) -> None:
    path, log = tmp_path / "responses.sqlite", tmp_path / "responses.sqlite-wal"
    database = FileDatabase(str(path))
    store, checkpoints = ResponseStore(database), database.checkpoints
    checkpoints._thread.shutdown()
    checkpoints._last = Future()  # it never completes
    for number in range(400):
        await store.put("", str(number), record("x" * 250_000))
    assert log.stat().st_size < 80 * 2**20
    assert path.stat().st_size > 50 * 2**20


@pytest.mark.parametrize("bound", [2**30, 2**18])
async def test_what_a_put_looks_at_does_not_grow_with_what_is_kept(bound: int) -> None:
    """Measured in steps of SQLite's virtual machine, also if each put drops another response."""
    steps = []
    for size in (500, 5_000):
        database = FileDatabase(MEMORY)
        store = ResponseStore(database, max_bytes=bound if bound > 2**20 else 600 * size)
        taken = 0

        def step() -> int:
            nonlocal taken
            taken += 1
            return 0

        for number in range(size):
            await store.put("", str(number), record())
        database.connection.set_progress_handler(step, 100)
        for number in range(50):
            await store.put("", f"more {number}", record())
        steps.append(taken)
    assert steps[1] <= 2 * steps[0]


async def test_a_file_of_the_first_form_opens(tmp_path: Path) -> None:
    path = tmp_path / "store"
    database = sqlite3.connect(path)
    for statement in MIGRATIONS[0]:
        assert isinstance(statement, str)
        database.execute(statement)
    for name, before in (("a", None), ("b", "a"), ("c", "a")):
        database.execute(
            "INSERT INTO responses (id, owner, previous, status, record, used, place, size)"
            " VALUES (?, 'me', ?, 'completed', ?, 1, 1, ?)",
            (name, before, record(name), len(record(name)) + 512),
        )
    database.commit()
    database.close()
    store = ResponseStore(FileDatabase(str(path), lambda: 2.0))
    counted(store)
    assert len(await store.history("me", "c") or ()) == 2
    await store.put("me", "d", record(), "c")
    counted(store)
    assert store._one("PRAGMA user_version") == (len(MIGRATIONS),)
    assert fault_of(path) is None


def moved(path: Path) -> list[Path]:
    return [*path.parent.glob(f"{path.name}.damaged-*")]


@pytest.mark.parametrize("content", [b"no database" * 999, None], ids=["damaged", "unknown"])
async def test_a_file_that_cannot_be_read_is_moved_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes | None
) -> None:
    path = tmp_path / "store"
    if content is None:
        sqlite3.connect(path).execute("CREATE TABLE responses (id TEXT PRIMARY KEY, record BLOB)").connection.close()
    else:
        path.write_bytes(content)
        assert fault_of(path) == "file is not a database"
    was = path.read_bytes()
    store = ResponseStore(FileDatabase(str(path)))
    await store.put("", "a", record())
    (aside,) = moved(path)
    assert aside.read_bytes()[100:] == was[100:], "all but the header, which has WAL mode now"
    assert path.stat().st_mode & 0o777 == 0o600
    (line,) = [entry.message for entry in caplog.records if "ingress.store" in entry.message]
    assert str(path) in line
    assert str(aside) in line


async def test_a_file_that_is_damaged_meanwhile_is_moved_aside(tmp_path: Path) -> None:
    path = tmp_path / "store"
    database = FileDatabase(str(path))
    store = ResponseStore(database)
    for number in range(300):
        await store.put("", str(number), record("x" * 2000))
    database.connection.close()
    content = bytearray(path.read_bytes())
    for at in range(8192, len(content), 4096):
        content[at : at + 64] = b"\xff" * 64
    path.write_bytes(content)
    store = ResponseStore(FileDatabase(str(path)))
    await store.put("", "a", record())
    assert await store.get("", "a") == record()
    assert len(moved(path)) == 1


def test_a_newer_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "store"
    database = sqlite3.connect(path)
    database.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    database.close()
    with pytest.raises(ConfigError, match=rf"ingress\.store: a newer version wrote {path}"):
        ResponseStore(FileDatabase(str(path)))
    assert "newer" in (fault_of(path) or "")


async def test_a_full_disk_is_an_error_that_goes_away(tmp_path: Path) -> None:
    store = ResponseStore(FileDatabase(str(tmp_path / "store")))
    await store.put("", "a", record())
    (pages,) = store._one("PRAGMA page_count")
    store._database.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StoreLostError):
        await store.put("", "b", record("x" * 100_000))
    assert await store.get("", "a") == record()
    store._database.execute("PRAGMA max_page_count = 1000000")
    await store.put("", "b", record("x" * 100_000))
