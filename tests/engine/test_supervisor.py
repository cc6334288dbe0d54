"""The supervisor prints what it learns, does and loses."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from raylm.config import Config
from raylm.engine.link import Link, Listener
from raylm.engine.load_report import LoadReport
from raylm.errors import ConfigError, EngineCrashedError, EngineDiedError, RayLMError
from raylm.messages import CoreReport, Counters, EngineInfo, EngineStats, StageInfo, WorkerInfo
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
    assert "kv       app/e.0: 1,024 tokens (1.00 GiB each), enough for 1 sequences of 1,024 tokens" in said


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("longest", "fitting"), [(1024, 1), (1008, 1), (512, 2), (500, 2), (17, 32), (1, 64)])
def test_the_kv_line_tells_how_many_of_the_longest_fit(
    capfd: pytest.CaptureFixture[str], longest: int, fitting: int
) -> None:
    from raylm.engine.supervisor import _report

    _report(EngineInfo("engine", longest, WORKER), "app/e.0")
    assert f"(1.00 GiB), enough for {fitting} sequences of {longest:,} tokens" in "".join(capfd.readouterr())


@pytest.mark.filterwarnings("ignore")
def test_every_worker_has_a_bundle_of_its_own() -> None:
    from raylm.engine import placement_bundles

    config = Config.model_validate({"engine": {"tensor_parallel_size": 3, "num_cpus": 0.2}})
    assert placement_bundles(config, gpus=1) == [{"CPU": 0.1}, {"CPU": 0.1}, *[{"GPU": 1.0}] * 3]
    assert placement_bundles(config, gpus=0) == [{"CPU": 0.1}, {"CPU": 0.1}, *[{"CPU": 0.2}] * 3]


@pytest.mark.filterwarnings("ignore")
def test_what_is_on_one_node_is_in_one_bundle_with_stages() -> None:
    from raylm.engine import placement_bundles
    from raylm.engine.supervisor import actor_bundles

    engine = {"tensor_parallel_size": 2, "pipeline_parallel_size": 3, "num_cpus": 0.25}
    config = Config.model_validate({"engine": engine})
    bundles = placement_bundles(config, gpus=0)
    assert bundles == [{"CPU": 0.7}, {"CPU": 0.5}, {"CPU": 0.5}]
    core, *workers = actor_bundles(config, 0)
    assert core == (0, {"CPU": 0.1}), "on the node of the supervisor, with which it has a Unix socket"
    assert workers == [(bundle, {"CPU": 0.25}) for bundle in (1, 1, 2, 2, 0, 0)], "the last stage is on the core's node"
    one = Config.model_validate({"engine": {"tensor_parallel_size": 2}})
    assert actor_bundles(one, 0) == [(1, {"CPU": 0.1}), (2, {"CPU": 0.1}), (3, {"CPU": 0.1})]


@pytest.mark.filterwarnings("ignore")
def test_the_layers_of_each_stage_are_told(capfd: pytest.CaptureFixture[str]) -> None:
    from raylm.engine.supervisor import _report

    stages = [StageInfo(0, 2, 4 << 20), StageInfo(3, 4, 5 << 20)]
    _report(EngineInfo("engine", 1024, replace(WORKER, pipeline=stages)), "app/e.0")
    said = "".join(capfd.readouterr())
    assert "app/e.0: stage 0 of 2 has layers 0 to 2, weights 4 MiB" in said
    assert "app/e.0: stage 1 of 2 has layers 3 to 4, weights 5 MiB" in said


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("quantization", "told"),
    [(None, "bfloat16 on cpu, CPU threads 3"), ("int4, head int8", "bfloat16 (int4, head int8) on cpu, CPU threads 3")],
)
def test_the_model_line_tells_dtype_and_quantization(
    capfd: pytest.CaptureFixture[str], quantization: str | None, told: str
) -> None:
    from raylm.engine.supervisor import _report  # importing Ray Serve gives a warning

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


def processes() -> Any:
    """EngineProcesses without processes. The test provides the reports of the EngineCore."""
    from raylm.engine.supervisor import EngineProcesses, Pace

    made = object.__new__(EngineProcesses)
    made._title, made._held, made._link = "app/e.0", 5, None
    made._ended = asyncio.get_running_loop().create_future()
    made._lines, made._pace, made._told = LoadReport(), Pace(), 0.0
    made._core = SimpleNamespace(run=SimpleNamespace(remote=never))
    return made


async def never() -> str:
    await asyncio.Event().wait()
    return ""


WORKER_LOST = CoreReport(stats(), 3, "The worker was lost.")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("reports", "end", "told"),
    [
        ([WORKER_LOST], "was lost", "The worker was lost. It held 3 open requests."),
        ([replace(WORKER_LOST, held=0)], "", "The worker was lost. It held 0 open requests."),
        ([], "was lost", "The EngineCore was lost. It held 5 open requests."),
        ([CoreReport(stats(), 7)], "was lost", "The EngineCore was lost. It held 7 open requests."),
        ([], "has given no sign of life for 3 s", "The EngineCore has given no sign of life for 3 s. It held 5"),
    ],
)
async def test_a_loss_is_told_with_the_requests_that_it_held(reports: list[CoreReport], end: str, told: str) -> None:
    engine = processes()
    running = asyncio.create_task(engine.run())
    for report in reports:
        engine._on_value(report)
    if end:
        engine._on_end(end)
    async with asyncio.timeout(300):
        assert (await running).startswith(told)


@pytest.mark.filterwarnings("ignore")
async def test_a_process_that_is_lost_ends_the_start_of_its_engine() -> None:
    engine = processes()
    engine._listener = Listener()
    engine._core.start = SimpleNamespace(remote=never)
    starting = asyncio.create_task(engine.start())
    async with asyncio.timeout(300):
        core = await Link.connect(engine._listener.path, lambda _: None, lambda _: None)
        core.close()
        with pytest.raises(EngineDiedError, match=r"The EngineCore was lost\."):
            await starting
    engine._listener.close()


@pytest.mark.filterwarnings("ignore")
async def test_a_stopped_worker_does_not_outlive_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    from raylm.engine import supervisor

    monkeypatch.setattr(supervisor.ray, "kill", lambda actor: None)
    worker = await asyncio.create_subprocess_exec("sleep", "600")
    os.kill(worker.pid, signal.SIGSTOP)
    engine = processes()
    engine._listener, engine._workers, engine._pidfds = Listener(), [], []
    engine._on_value([worker.pid, 0])
    engine.kill()
    engine.kill()
    assert await worker.wait() == -signal.SIGKILL


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("ends", "starts"),
    [
        ([None], 1),
        ([EngineDiedError("lost"), None], 2),
        ([EngineDiedError("lost")] * 3, 3),
        ([EngineCrashedError("crashed")], 1),
        ([ConfigError("wrong")], 1),
    ],
)
async def test_a_replacement_that_is_lost_while_it_starts_is_replaced_and_a_failed_one_is_not(
    monkeypatch: pytest.MonkeyPatch, ends: list[RayLMError | None], starts: int
) -> None:
    from raylm.engine.supervisor import Engine

    begun = 0

    async def launch(engine: Engine) -> tuple[str, None]:
        nonlocal begun
        begun += 1
        if (error := ends[begun - 1]) is not None:
            raise error
        return "processes", None

    monkeypatch.setattr(Engine, "_launch", launch)
    engine = object.__new__(Engine)
    engine._incarnation = 7
    if ends[-1] is None:
        await engine._replace()
        assert engine._processes == "processes"  # type: ignore[comparison-overlap]
    else:
        with pytest.raises(type(ends[-1])):
            await engine._replace()
    assert begun == starts
    assert engine._incarnation == 7 + starts


@pytest.mark.filterwarnings("ignore")
async def test_a_busy_engine_tells_its_load_in_one_line_a_period(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from raylm.engine import supervisor

    monkeypatch.setattr(supervisor, "PERIOD_S", 0.0)
    engine = processes()
    for told in (stats(), stats(running=1, prompt_tokens=20), stats(prompt_tokens=20), stats(prompt_tokens=20)):
        engine._on_value(CoreReport(told, 1))
    lines = [parse(line) for line in "".join(capfd.readouterr()).splitlines()]
    assert [line[1] for line in lines if line is not None] == ["load"]
    assert lines[0] is not None
    assert lines[0][2].startswith("app/e.0: prompt ")
    monkeypatch.setattr(supervisor, "PERIOD_S", 1e9)
    engine._on_value(CoreReport(stats(running=2, prompt_tokens=40), 1))
    assert capfd.readouterr().out == ""
    assert engine.load.places == 2
