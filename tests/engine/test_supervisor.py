"""What an engine found out is said at the terminal."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raylm.config import Config
from raylm.messages import EngineInfo, WorkerInfo

WORKER = WorkerInfo(64, 16, 1024, 320, "cpu", "bfloat16", "native", 3, 5 << 20, 1 << 30, [("load weights", 0.2)])


@pytest.mark.filterwarnings("ignore")
def test_several_ranks_are_told(capfd: pytest.CaptureFixture[str]) -> None:
    from raylm.engine.supervisor import _report

    _report(EngineInfo("engine", 1024, replace(WORKER, tensor_parallel_size=2)))
    said = "".join(capfd.readouterr())
    assert "2 workers share every layer (tensor parallel)" in said
    assert "weights 5 MiB each" in said
    assert "kv       1,024 tokens (1.00 GiB each), room for 1 of the longest context, 1,024 tokens" in said


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("longest", "fitting"), [(1024, 1), (1008, 1), (512, 2), (500, 2), (17, 32), (1, 64)])
def test_the_kv_line_tells_how_many_of_the_longest_fit(
    capfd: pytest.CaptureFixture[str], longest: int, fitting: int
) -> None:
    from raylm.engine.supervisor import _report

    _report(EngineInfo("engine", longest, WORKER))
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

    _report(EngineInfo("engine", 1024, replace(WORKER, quantization=quantization)))
    said = "".join(capfd.readouterr())
    assert f"{told}, attention native, weights 5 MiB" in said
    assert "load weights 0.2 s" in said
