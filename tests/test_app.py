"""The GPUs of each worker, and configurations that are refused because the cluster has too few GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from raylm.config import Config
from raylm.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray Serve warns when it is imported


def gpus(monkeypatch: pytest.MonkeyPatch, nodes: list[int], device: str, ranks: int) -> int:
    """The GPUs of each worker, in a cluster whose nodes have ``nodes[i]`` GPUs. One more node with 64 GPUs is dead."""
    from raylm import app

    found: list[dict[str, Any]] = [{"Alive": True, "Resources": {"GPU": float(n)} if n else {}} for n in nodes]
    monkeypatch.setattr(app.ray, "nodes", lambda: [*found, {"Alive": False, "Resources": {"GPU": 64.0}}])
    config = Config.model_validate({"device": device, "engine": {"tensor_parallel_size": ranks}})
    return app._gpus(config)


@pytest.mark.parametrize(
    ("nodes", "device", "ranks", "each"),
    [([0], "auto", 2, 0), ([4], "cpu", 2, 0), ([0, 4], "auto", 4, 1), ([1], "cuda", 1, 1)],
)
def test_each_worker_gets_a_gpu_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, nodes: list[int], device: str, ranks: int, each: int
) -> None:
    assert gpus(monkeypatch, nodes, device, ranks) == each


@pytest.mark.parametrize(
    ("nodes", "device", "ranks", "said"),
    [
        ([0], "cuda", 1, "device: 'cuda' is set, but the cluster has no GPU"),
        (
            [2, 2],
            "auto",
            4,
            "engine.tensor_parallel_size: 4 workers need a GPU each on one node; no node has more than 2",
        ),
    ],
)
def test_too_few_gpus_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, nodes: list[int], device: str, ranks: int, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        gpus(monkeypatch, nodes, device, ranks)
    assert said in caught.value.message
