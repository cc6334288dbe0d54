"""What an engine found out, what it does, and what was lost, is said at the terminal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from raylm.config import Config
from raylm.engine.load_report import LoadReport
from raylm.messages import Counters, EngineInfo, EngineStats, WorkerInfo
from raylm.stages import parse

WORKER = WorkerInfo(
    64, 16, 1024, 320, "cpu", "bfloat16", "native", 3, 5 << 20, 1 << 30, [("load weights", 0.2), ("profile run", 1.0)]
)


@pytest.mark.filterwarnings("ignore")
def test_several_ranks_are_told(capfd: pytest.CaptureFixture[str]) -> None:
    from raylm.engine.supervisor import _report

    _report(EngineInfo("engine", 1024, replace(WORKER, tensor_parallel_size=2)), "app/e.0")
    said = "".join(capfd.readouterr())
    assert "2 workers share every layer (tensor parallel)" in said
    assert "weights 5 MiB each" in said
    assert "kv       app/e.0: 1,024 tokens (1.00 GiB each), room for 1 of the longest context, 1,024 tokens" in said


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("longest", "fitting"), [(1024, 1), (1008, 1), (512, 2), (500, 2), (17, 32), (1, 64)])
def test_the_kv_line_tells_how_many_of_the_longest_fit(
    capfd: pytest.CaptureFixture[str], longest: int, fitting: int
) -> None:
    from raylm.engine.supervisor import _report

    _report(EngineInfo("engine", longest, WORKER), "app/e.0")
    assert f"(1.00 GiB), room for {fitting} of the longest context, {longest:,} tokens" in "".join(capfd.readouterr())


@pytest.mark.filterwarnings("ignore")
def test_every_worker_has_a_bundle_of_its_own() -> None:
    from raylm.engine import placement_bundles

    config = Config.model_validate({"engine": {"tensor_parallel_size": 3, "num_cpus": 0.2}})
    assert placement_bundles(config, gpus=1) == [{"CPU": 0.1}, {"CPU": 0.1}, *[{"GPU": 1.0}] * 3]
    assert placement_bundles(config, gpus=0) == [{"CPU": 0.1}, {"CPU": 0.1}, *[{"CPU": 0.2}] * 3]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("quantization", "told"),
    [(None, "bfloat16 on cpu, CPU threads 3"), ("int4, head int8", "bfloat16 (int4, head int8) on cpu, CPU threads 3")],
)
def test_the_model_line_tells_dtype_and_quantization(
    capfd: pytest.CaptureFixture[str], quantization: str | None, told: str
) -> None:
    from raylm.engine.supervisor import _report  # imports Ray Serve, which warns

    _report(EngineInfo("engine", 1024, replace(WORKER, quantization=quantization)), "app/e.0")
    said = "".join(capfd.readouterr())
    assert f"{told}, attention native, weights 5 MiB" in said
    lines = [parse(line) for line in said.splitlines()]
    assert all(line is not None and line[2].startswith("app/e.0: ") for line in lines)
    assert [line[1:] for line in lines if line is not None and line[1] == "worker"] == [
        ("worker", "app/e.0: load weights 0.2 s, profile run 1.0 s")
    ]


def stats(running: int = 0, waiting: int = 0, **counted: int) -> EngineStats:
    return EngineStats(running, waiting, 0.125, 7, Counters(**counted))


def test_the_load_is_told_by_its_change_and_idle_engines_say_nothing() -> None:
    load = LoadReport()
    assert load.line(stats(), 10) is None
    busy = stats(3, 1, prompt_tokens=1000, generation_tokens=45, prefix_queries=400, prefix_hits=100)
    assert load.line(busy, 10) == (
        "prompt 100.0 tokens/s, generation 4.5 tokens/s, running 3 reqs, waiting 1 reqs, KV cache usage 12.5%, "
        "prefix cache hit rate 25.0%"
    )
    stuck = load.line(busy, 10)
    assert stuck is not None
    assert stuck.startswith("prompt 0.0 tokens/s, generation 0.0 tokens/s, running 3 reqs")
    assert "hit rate" not in stuck
    done = replace(busy, running=0, waiting=0, counters=replace(busy.counters, generation_tokens=50))
    ended = load.line(done, 5)
    assert ended is not None
    assert "generation 1.0 tokens/s, running 0 reqs" in ended
    assert load.line(done, 10) is None


def processes(workers: list[Callable[[], Any]], run: Callable[[], Any], load: Callable[[], Any]) -> Any:
    """EngineProcesses over actors whose methods are these coroutine functions."""
    from raylm.engine.supervisor import EngineProcesses

    def actor(**methods: Callable[[], Any]) -> SimpleNamespace:
        return SimpleNamespace(**{name: SimpleNamespace(remote=method) for name, method in methods.items()})

    made = object.__new__(EngineProcesses)
    made._title, made._held = "app/e.0", 5
    made._workers = [actor(ping=ping) for ping in workers]
    made._core = actor(run=run, load=load)
    return made


async def lives() -> None:
    pass


async def never() -> str:
    await asyncio.Event().wait()
    return ""


async def lost() -> Any:
    from ray.exceptions import RayActorError

    raise RayActorError


async def three_requests() -> tuple[EngineStats, int]:
    return stats(running=4, generation_tokens=8), 3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("workers", "run", "load", "told"),
    [
        ([lost], never, three_requests, "The worker was lost. It held 3 open requests."),
        ([lives, lost], never, three_requests, "The worker of rank 1 was lost. It held 3 open requests."),
        ([lives], lost, lost, "The EngineCore was lost. It held 5 open requests."),
    ],
)
async def test_a_loss_is_told_with_the_requests_that_it_held(
    workers: list[Callable[[], Any]], run: Callable[[], Any], load: Callable[[], Any], told: str
) -> None:
    async with asyncio.timeout(30):
        assert await processes(workers, run, load).run() == told


@pytest.mark.filterwarnings("ignore")
async def test_a_busy_engine_tells_its_load_in_one_line_a_period(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from raylm.engine import supervisor

    asked = asyncio.Event()
    answers = [stats(), stats(running=1, prompt_tokens=20), stats(prompt_tokens=20), stats(prompt_tokens=20)]

    async def load() -> tuple[EngineStats, int]:
        if len(answers) == 1:
            asked.set()
        return (answers.pop(0) if len(answers) > 1 else answers[0]), 0

    monkeypatch.setattr(supervisor, "LOAD_PERIOD_S", 0.001)
    monkeypatch.setattr(supervisor, "PERIOD_S", 0.0)
    running = asyncio.create_task(processes([lives], never, load).run())
    async with asyncio.timeout(30):
        await asked.wait()
    running.cancel()
    lines = [parse(line) for line in "".join(capfd.readouterr()).splitlines()]
    assert [line[1] for line in lines if line is not None] == ["load"]
    assert lines[0] is not None
    assert lines[0][2].startswith("app/e.0: prompt ")
