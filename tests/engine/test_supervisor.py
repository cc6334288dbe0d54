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
from raylm.errors import ConfigError, EngineCrashedError, EngineDiedError, RayLMError
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


class Watched:
    """A HeartbeatMonitor that finds out what the test says."""

    def __init__(self, lost: tuple[str, str] | None) -> None:
        self.lost = asyncio.get_running_loop().create_future()
        self.killed: list[str] = []
        if lost is not None:
            self.lost.set_result(lost)

    def kill(self, name: str) -> None:
        self.killed.append(name)


def processes(lost: tuple[str, str] | None, run: Callable[[], Any], load: Callable[[], Any]) -> Any:
    """EngineProcesses over an EngineCore whose methods are these coroutine functions."""
    from raylm.engine.supervisor import EngineProcesses

    methods = {"run": run, "load": load}
    made = object.__new__(EngineProcesses)
    made._title, made._held = "app/e.0", 5
    made._monitor = Watched(lost)  # type: ignore[assignment]
    made._core = SimpleNamespace(**{name: SimpleNamespace(remote=method) for name, method in methods.items()})
    return made


async def never() -> str:
    await asyncio.Event().wait()
    return ""


async def lost_a_process() -> str:
    return "A process of the engine was lost."


async def crashed() -> str:
    return "RuntimeError: out of everything"


async def lost() -> Any:
    from ray.exceptions import RayActorError

    raise RayActorError


async def three_requests() -> tuple[EngineStats, int]:
    return stats(running=4, generation_tokens=8), 3


async def no_request() -> tuple[EngineStats, int]:
    return stats(), 0


SILENT = ("worker", "has given no sign of life for 3 s")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("found", "run", "load", "told"),
    [
        (("worker", "was lost"), never, three_requests, "The worker was lost. It held 3 open requests."),
        (("worker", "was lost"), never, no_request, "The worker was lost. It held 0 open requests."),
        (("worker", "was lost"), crashed, three_requests, "RuntimeError: out of everything It held 3 open requests."),
        (("worker of rank 1", "was lost"), lost_a_process, three_requests, "The worker of rank 1 was lost. It held 3"),
        (
            SILENT,
            lost_a_process,
            three_requests,
            "The worker has given no sign of life for 3 s. It held 3 open requests",
        ),
        (("EngineCore", "was lost"), lost, lost, "The EngineCore was lost. It held 5 open requests."),
        (None, crashed, three_requests, "RuntimeError: out of everything It held 3 open requests."),
        (None, lost_a_process, no_request, "A process of the engine was lost. It held 0 open requests."),
    ],
)
async def test_a_loss_is_told_with_the_requests_that_it_held(
    found: tuple[str, str] | None, run: Callable[[], Any], load: Callable[[], Any], told: str
) -> None:
    engine = processes(found, run, load)
    async with asyncio.timeout(300):
        assert (await engine.run()).startswith(told)
    assert engine._monitor.killed == [found[0] if found else ""], "who is declared dead is killed"


@pytest.mark.filterwarnings("ignore")
async def test_a_process_that_is_lost_ends_the_start_of_its_engine() -> None:
    engine = processes(("worker", "was lost"), never, no_request)
    engine._core.start = SimpleNamespace(remote=never)
    with pytest.raises(EngineDiedError, match="The worker was lost while the engine started"):
        async with asyncio.timeout(300):
            await engine.start()


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

    asked = asyncio.Event()
    answers = [stats(), stats(running=1, prompt_tokens=20), stats(prompt_tokens=20), stats(prompt_tokens=20)]

    async def load() -> tuple[EngineStats, int]:
        if len(answers) == 1:
            asked.set()
        return (answers.pop(0) if len(answers) > 1 else answers[0]), 0

    monkeypatch.setattr(supervisor, "LOAD_PERIOD_S", 0.001)
    monkeypatch.setattr(supervisor, "PERIOD_S", 0.0)
    running = asyncio.create_task(processes(None, never, load).run())
    async with asyncio.timeout(300):
        await asked.wait()
    running.cancel()
    lines = [parse(line) for line in "".join(capfd.readouterr()).splitlines()]
    assert [line[1] for line in lines if line is not None] == ["load"]
    assert lines[0] is not None
    assert lines[0][2].startswith("app/e.0: prompt ")
