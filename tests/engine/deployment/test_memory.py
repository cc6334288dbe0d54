"""An engine that does not fit in the free memory is refused, with the sizes in the error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raylm.config import Config
from raylm.engine.deployment.memory import GIB, check_memory
from raylm.errors import ConfigError


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A checkpoint with two weight files of 3 GiB together, which take no disk space."""
    for number, size in enumerate((1, 2)):
        with (tmp_path / f"model-{number}.safetensors").open("wb") as file:
            file.truncate(size * GIB)
    return str(tmp_path)


@pytest.mark.parametrize(
    ("knobs", "free", "said"),
    [
        ({}, 3.0, ""),
        ({}, 2.9, "needs 3.00 GiB of weights, but only 2.90 GiB are free"),
        ({"cache": {"memory_gib": 1}}, 4.0, ""),
        ({"cache": {"memory_gib": 1}}, 3.9, "3.00 GiB of weights and 1.00 GiB of KV cache, but only 3.90 GiB are free"),
        ({"cache": {"memory_gib": 1}, "engine": {"tensor_parallel_size": 2}}, 4.9, "and 2.00 GiB of KV cache"),
        ({"engine": {"pipeline_parallel_size": 3}}, 1.0, ""),
        ({"engine": {"pipeline_parallel_size": 3}}, 0.9, "needs 1.00 GiB of weights, but only 0.90 GiB are free"),
    ],
)
def test_what_is_missing_is_named(model: str, knobs: dict[str, Any], free: float, said: str) -> None:
    config = Config.model_validate({"model": model} | knobs)
    if not said:
        check_memory(config, 1, int(free * GIB))
        return
    with pytest.raises(ConfigError) as first:
        check_memory(config, 0, int(free * GIB))
    assert said in first.value.message
    assert "update" not in first.value.message
    with pytest.raises(ConfigError, match="An update starts new engines before it stops old ones"):
        check_memory(config, 2, int(free * GIB))
