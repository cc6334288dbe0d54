"""Recordings of real engines: decisions are repeated, simulations agree, and errors in recordings are reported."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raylm.config import CacheConfig, Config, EngineConfig, SchedulerConfig
from raylm.engine.recording.recorded_scheduler import RecordedScheduler
from raylm.errors import ConfigError
from raylm.messages import ServiceLevel
from raylm.simulate import (
    Fleet,
    Replay,
    Targets,
    figures,
    fit,
    read_recordings,
    read_steps,
    read_trace,
    replay,
    simulate,
)
from tests.engine.build import request
from tests.engine.running_core import collect, running, until
from tests.fakes import FakeExecutor, FakeWorker


async def recorded(folder: Path, seed: int, num_blocks: int = 40, policy: str = "fcfs") -> Path:
    """Record a real engine with small numbers: common prefixes, several sequences, all kinds of ends, preemptions."""
    rng, size = random.Random(seed), {"max_num_seqs": 8, "max_num_batched_tokens": 64}
    settings = Config(
        cache=CacheConfig(num_blocks=num_blocks),
        scheduler=SchedulerConfig.model_validate(size | {"policy": policy}),
        engine=EngineConfig(record_dir=str(folder)),
    )
    async with running(FakeExecutor(FakeWorker(num_blocks=num_blocks), delay_s=0.0005), settings) as core:
        core.connect("a")
        core.connect("b")
        prompts: list[list[int]] = [[rng.randrange(1, 9)] * rng.randint(1, 60) for _ in range(6)]
        for key in range(60):
            prompt = rng.choice(prompts) + [rng.randrange(1, 9) for _ in range(rng.randint(1, 50))]
            fields: dict[str, Any] = {"n": rng.choice([1, 1, 1, 3]), "max_tokens": rng.choice([None, 1, 17, 60])}
            asked = request(prompt, key, priority=rng.randint(0, 2), seed=key, **fields)
            core.add(rng.choice("ab"), [asked])
            if rng.random() < 0.1:
                core.abort(rng.choice("ab"), [rng.randrange(key + 1)])
            if rng.random() < 0.1:
                core.stop(rng.choice("ab"), [(rng.randrange(key + 1), 0)])
            await asyncio.sleep(rng.choice([0, 0.0005, 0.002]))
    (path,) = folder.glob("engine-*.jsonl")  # noqa: ASYNC240 - nothing else runs
    return path


@pytest.mark.parametrize(("seed", "num_blocks", "policy"), [(1, 40, "fcfs"), (2, 20, "priority"), (3, 200, "fcfs")])
async def test_a_recorded_engine_is_scheduled_again_step_by_step(
    tmp_path: Path, seed: int, num_blocks: int, policy: str
) -> None:
    path = await recorded(tmp_path, seed, num_blocks, policy)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    kinds = {line["kind"] for line in lines}
    assert kinds >= {"engine", "add", "schedule", "update", "request"}
    assert replay(path) == sum(line["kind"] == "schedule" for line in lines) > 50
    computed = [sum(line["num_computed"]) for line in lines if line["kind"] == "schedule" and line["new"]]
    assert any(computed), "no prefix hit"


async def test_a_step_that_was_decided_otherwise_is_named(tmp_path: Path) -> None:
    path = await recorded(tmp_path, 4)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    (line,) = [line for line in lines if line["kind"] == "schedule" and line["step"] == 9]
    line["num_scheduled"][0] += 1
    path.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(ConfigError, match="step 9: num_scheduled is"):
        replay(path)


def test_a_recording_is_a_trace_and_steps_to_fit_costs_to(tmp_path: Path) -> None:
    path = asyncio.run(recorded(tmp_path, 5))
    costs, _ = fit(read_steps(path))
    ended = [json.loads(line) for line in path.read_text().splitlines() if '"kind":"request"' in line]
    trace = list(read_trace([path], 64))
    assert len(trace) == len(ended)
    assert all(0 < line["ttft_s"] <= line["duration_s"] for line in ended)
    served = simulate(Fleet.of({"costs": costs.model_dump()}, "test"), Replay(trace)).served
    assert sorted(one.prompt_tokens for one in served) == sorted(line["prompt_tokens"] for line in ended)
    assert any(one.cached_tokens for one in served)


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"kind": "add"}')
    with pytest.raises(ConfigError, match="not a recording of an engine"):
        replay(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        replay(tmp_path / "none")


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [("engine", "scheduler", None), ("add", "id", "x"), ("request", "blocks", 5), ("update", "step", 10**6)],
)
async def test_a_damaged_recording_is_refused(tmp_path: Path, kind: str, field: str, value: object) -> None:
    path = await recorded(tmp_path, 1)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    next(line for line in lines if line["kind"] == kind)[field] = value
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ConfigError, match=re.escape(str(path))):
        replay(path)
    if kind != "update":  # the steps' order does not matter to their costs
        with pytest.raises(ConfigError, match=re.escape(str(path))):
            read_recordings([path])


async def test_where_nothing_can_be_written_the_engine_says_so_at_its_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    settings = Config(engine=EngineConfig(record_dir=str(tmp_path / "file" / "below")))
    with pytest.raises(ConfigError, match="record_dir"):
        async with running(FakeExecutor(), settings):
            pass


@pytest.mark.parametrize("last", ["none of it", "a part"])
async def test_a_full_disk_ends_the_recording_and_not_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, last: str
) -> None:
    write, room = os.write, 5000

    def write_while_there_is_room(file: int, data: bytes) -> int:
        nonlocal room
        if last == "none of it" and len(data) > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(file, data[:room])
        room -= written
        return written

    monkeypatch.setattr(os, "write", write_while_there_is_room)
    path = await recorded(tmp_path, 6)
    lines = path.read_text().splitlines(keepends=True)
    assert 4000 < sum(map(len, lines)) <= 5000
    assert all(json.loads(line) for line in lines)
    assert replay(path) > 0
    (told,) = [record.getMessage() for record in caplog.records if "engine.record_dir" in record.getMessage()]
    assert str(path) in told


async def test_an_engine_that_begins_on_a_full_disk_serves_without_a_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, *args: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    settings = Config(engine=EngineConfig(record_dir=str(tmp_path / "recordings")))
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", full)
        async with running(FakeExecutor(), settings) as core:
            outbox = core.connect("a")
            core.add("a", [request([1, 2, 3], 1, max_tokens=3, ignore_eos=True)])
            assert len((await collect(outbox, 1))[1, 0]) == 3
    assert "No space left on device" in caplog.text


async def test_nothing_is_kept_of_requests_that_were_given_up(tmp_path: Path) -> None:
    settings = Config(engine=EngineConfig(record_dir=str(tmp_path)))
    async with running(FakeExecutor(), settings) as core:
        core.connect("a")
        late = [replace(request([1, 2], key), service=ServiceLevel(timeout_s=1.0)) for key in range(9)]
        core.add("a", late)
        await until(lambda: not core.has_work)
        scheduler = core.scheduler
        assert isinstance(scheduler, RecordedScheduler)
        assert not scheduler._asked
        assert not scheduler._added


def test_a_recorded_fleet_is_simulated_as_it_was(tmp_path: Path) -> None:
    path = asyncio.run(recorded(tmp_path, 6, num_blocks=60))
    found = read_recordings([path])
    (group,) = found.fleet.engines
    assert (group.num_blocks, found.fleet.config.scheduler.max_num_seqs) == (60, 8)
    outcome = figures(simulate(found.fleet, Replay(found.trace)), Targets())
    assert found.figures["requests"] == len(list(found.trace)) == outcome["requests"]
    assert found.figures["hit_rate"] == pytest.approx(hit_rate(path), abs=0.05)
    assert outcome["hit_rate"] == pytest.approx(hit_rate(path), abs=0.2)


def hit_rate(path: Path) -> float:
    """The hit rate by the plans, over sequences that ended and were not preempted."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [
        (dict(zip(line["seq_ids"], line["num_computed"], strict=True)), line["new"])
        for line in lines
        if line["kind"] == "schedule"
    ]
    first: dict[int, tuple[int, int]] = {}
    for computed, new in rows:
        for seq_id, prompt, *_ in new:
            first.setdefault(seq_id, (computed[seq_id], prompt))
    return sum(cached for cached, _ in first.values()) / sum(prompt for _, prompt in first.values())


def test_engines_that_served_otherwise_are_none_of_one_fleet(tmp_path: Path) -> None:
    one, other = (asyncio.run(recorded(tmp_path / policy, 6, policy=policy)) for policy in ("fcfs", "priority"))
    with pytest.raises(ConfigError, match=r"differs from .* in scheduler"):
        read_recordings([one, other])
