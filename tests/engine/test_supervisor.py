"""What an engine found out is said at the terminal."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raylm.messages import EngineInfo, WorkerInfo

WORKER = WorkerInfo(64, 16, 1024, 320, "cpu", "bfloat16", "native", 3, 5 << 20, 1 << 30, [("load weights", 0.2)])


@pytest.mark.filterwarnings("ignore")
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
