"""A worker whose device runs out of memory at start reports a size that would fit."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from raylm.config import Config
from raylm.errors import ConfigError
from raylm.worker import Worker
from raylm.worker.attention import StepLimits
from raylm.worker.memory import largest_step
from tests.checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    path = make_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", tokenizer=False)
    return Config.model_validate(
        {"model": str(path), "cache": {"num_blocks": 8}, "scheduler": {"max_num_batched_tokens": 1000}}
    )


def full(*args: Any, **kwargs: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_weights_that_do_not_fit(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raylm.worker.startup.load_model", full)
    with pytest.raises(ConfigError, match=r"^model: the weights in .* take 0\.0 GiB, but cpu had only [\d.]+ GiB free"):
        Worker(config).start()


@pytest.mark.parametrize(("memory", "said"), [(300, "; 250 tokens fit."), (0, "; no smaller step fits either.")])
def test_a_step_that_does_not_fit(config: Config, monkeypatch: pytest.MonkeyPatch, memory: int, said: str) -> None:
    tried = []

    def profile_run(model: object, backend: object, limits: StepLimits, *rest: object) -> int:
        tried.append(limits.max_num_tokens)
        assert limits.max_num_seqs <= limits.max_num_tokens
        return full() if limits.max_num_tokens > memory else 0

    monkeypatch.setattr("raylm.worker.startup.profile_run", profile_run)
    with pytest.raises(ConfigError) as raised:
        Worker(config).start()
    assert str(raised.value).startswith("scheduler.max_num_batched_tokens: a step of 1000 tokens does not fit")
    assert str(raised.value).endswith(said)
    assert tried[:3] == [1000, 500, 250]


def test_what_the_step_that_failed_took_is_free_again() -> None:
    taken: list[weakref.ref[torch.Tensor]] = []

    def run(limits: StepLimits) -> int:
        assert all(memory() is None for memory in taken)
        memory = torch.zeros(limits.max_num_tokens)
        taken.append(weakref.ref(memory))
        return full() if limits.max_num_tokens > 100 else 0

    with pytest.raises(ConfigError, match="; 64 tokens fit"):
        largest_step(run, StepLimits(256, 4, 16, 16))
    assert len(taken) == 3
