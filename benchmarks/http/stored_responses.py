"""The time of a put into a full store of responses, and the delay of lease renewals by puts.

Puts of 1,000 bytes are timed with ``--kept`` stored responses, below the byte limit of their key and at the limit,
where each put removes another response. A lease is renewed every 50 ms meanwhile.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

import orjson

from benchmarks.rows import Report, parser, quantile
from raylm.ingress.responses.store import ResponseStore

RECORD = orjson.dumps({"response": {"status": "completed", "output": []}, "input": ["x" * 950]})
SIZE = len(RECORD) + 512
EVERY_S = 0.05


async def fill(store: ResponseStore, kept: int) -> None:
    """Insert rows like those of puts, in one transaction."""
    columns = "id, owner, status, record, used, place, size"
    rows = (
        (f"resp_{number * 7919 % kept:032x}", "a", "completed", RECORD, time.time(), number, SIZE)
        for number in range(kept)
    )
    insert = f"INSERT INTO responses ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)"
    await store._do(lambda: store._database.executemany(insert, rows))
    store._database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


async def renewals(store: ResponseStore, late: list[float]) -> None:
    while True:
        await asyncio.sleep(EVERY_S)
        asked = time.perf_counter()
        await store.renew("maker", 16, ["job"])
        late.append(time.perf_counter() - asked)


async def measure(report: Report, case: str, kept: int, puts: int, max_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = ResponseStore(str(Path(folder) / "store.sqlite"), max_bytes=2**40)
        await fill(store, kept)
        store._max_bytes = max_bytes
        await store.put("b", "job", orjson.dumps({"response": {"status": "queued"}, "input": []}), None, b"{}", "maker")
        took: list[float] = []
        late: list[float] = []
        beside = asyncio.create_task(renewals(store, late))
        for number in range(puts):
            began = time.perf_counter()
            await store.put("a", f"resp_more_{number}", RECORD)
            took.append(time.perf_counter() - began)
        beside.cancel()
        store._thread.shutdown()
        store._database.close()
    figures = {"put p50": quantile(took, 0.5), "put p99": quantile(took, 0.99), "put max": max(took)}
    figures |= {"renewal p99": quantile(late, 0.99), "renewal max": max(late)}
    report.add(case, {name: value * 1000 for name, value in figures.items()})


async def main() -> None:
    options = parser(__doc__)
    options.add_argument("--kept", type=int, nargs="+", default=[1_000, 100_000])
    options.add_argument("--puts", type=int, default=2_000)
    args = options.parse_args()
    units = dict.fromkeys(("put p50", "put p99", "put max", "renewal p99", "renewal max"), "ms")
    report = Report("stored_responses", units, args.out)
    for kept in args.kept:
        await measure(report, f"{kept:,} kept", kept, args.puts, 2**40)
        await measure(report, f"{kept:,} kept, at the bound", kept, args.puts, kept * SIZE)


if __name__ == "__main__":
    asyncio.run(main())
