"""Asynchronous greedy steps, whose tokens the host has not seen, draw the same tokens as steps in sequence."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from raylm.messages import Logprobs, ModelRunnerOutput, NewSequence, SchedulerOutput
from raylm.params import SamplingParams
from raylm.worker.arrays import Ints
from raylm.worker.attention import StepLimits
from raylm.worker.features import AsyncDecode
from raylm.worker.gpu.async_decode import GPUAsyncDecode
from raylm.worker.input_batch import InputBatch
from raylm.worker.input_buffers import StepInputs
from raylm.worker.model_runner import ModelRunner
from raylm.worker.startup import create_async_decode
from raylm.worker.step_batch import StepBatch
from tests.checkpoints import make_checkpoint
from tests.worker.driver import GREEDY, Driver, random_prompt

CPU = torch.device("cpu")
LIMITS = StepLimits(256, 4, 16, 16)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama", tokenizer=False)


class CountingDecode(GPUAsyncDecode):
    """Counts its launches. It also runs on a CPU, without any wait."""

    def __init__(self) -> None:
        super().__init__(LIMITS, CPU)
        self.taken = 0

    def launch(self, *args: object) -> object:  # type: ignore[override]
        self.taken += 1
        return super().launch(*args)  # type: ignore[arg-type]


@dataclass
class Sequence:
    tokens: list[int]
    params: SamplingParams
    blocks: list[int]
    prompt: int
    scheduled: int = 0
    drawn: int = 0


@dataclass
class Life:
    """A scheduler that launches ``ahead`` steps before it reads the output of the first one, as the engine does."""

    runner: ModelRunner
    ahead: int
    flying: deque[Callable[[], ModelRunnerOutput]] = field(default_factory=deque)
    sequences: dict[int, Sequence] = field(default_factory=dict)
    told: dict[int, list[int]] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    pooled: dict[int, bytes] = field(default_factory=dict)
    described: dict[int, list[Any]] = field(default_factory=dict)  # (ids, log-probabilities, rank) of each token
    step_s: list[float] = field(default_factory=list)  # seconds of each step
    step: int = 0

    def add(self, seq_id: int, prompt: list[int], blocks: list[int], params: SamplingParams = GREEDY) -> None:
        self.sequences[seq_id] = Sequence(list(prompt), params, blocks, len(prompt))
        self.told[seq_id] = []

    def run(self, finished: tuple[int, ...] = (), only: tuple[int, ...] | None = None) -> None:
        """Run one step with all sequences, or ``only`` some. New sequences compute their whole prompt."""
        for seq_id in finished:
            del self.sequences[seq_id]
        self.step += 1
        members = [seq_id for seq_id in self.sequences if only is None or seq_id in only]
        counts = {seq_id: 1 if (seq := self.sequences[seq_id]).scheduled else seq.prompt for seq_id in members}
        order = sorted(members, key=lambda seq_id: counts[seq_id] > 1)
        new = [seq_id for seq_id in order if not self.sequences[seq_id].scheduled]
        plan = SchedulerOutput(
            self.step,
            list(finished),
            [self._new(seq_id) for seq_id in new],
            order,
            [self.sequences[seq_id].scheduled for seq_id in order],
            [counts[seq_id] for seq_id in order],
            [True] * len(order),
            [0] * len(order),
            [],
        )
        for seq_id in order:
            self.sequences[seq_id].scheduled += counts[seq_id]
        self.flying.append(self.runner.launch(plan))
        while len(self.flying) >= self.ahead:
            self.land()

    def _new(self, seq_id: int) -> NewSequence:
        seq = self.sequences[seq_id]
        return NewSequence(seq_id, seq.tokens, seq.prompt, seq.blocks, seq.params, seed=seq_id)

    def land(self) -> None:
        output = self.flying.popleft()()
        described = _entries(output.logprobs) if output.logprobs is not None else iter(())
        for seq_id, token in zip(output.seq_ids, output.token_ids, strict=True):
            self.told[seq_id].append(token)
            if output.logprobs is not None:
                entries = next(described)
                self.described.setdefault(seq_id, []).append(entries)
        self.step_s.append(output.step_s)
        self.failed |= dict(output.failed) | dict(output.undrawable)
        self.pooled |= dict(output.pooled)

    def end(self) -> dict[int, list[int]]:
        while self.flying:
            self.land()
        return self.told


def _entries(columns: Logprobs) -> Iterator[tuple[list[int], list[float], int]]:
    """(ids, log-probabilities, rank) of each token."""
    start = 0
    for count, rank in zip(columns.counts, columns.ranks, strict=True):
        yield columns.token_ids[start : start + count], columns.logprobs[start : start + count], rank
        start += count


def runner(path: Path, decode: GPUAsyncDecode | None) -> ModelRunner:
    driver = Driver(path, scheduler={"max_num_seqs": 4, "max_num_batched_tokens": 256})
    driver.runner.async_decode = decode or AsyncDecode()
    with torch.inference_mode():
        for pool in driver.runner.forward._kv_caches:  # type: ignore[attr-defined]
            pool.zero_()
    return driver.runner


def blocks(seq_id: int) -> list[int]:
    return list(range(4 * seq_id, 4 * seq_id + 4))


SAMPLED = SamplingParams(temperature=0.8, top_p=0.9)


def eventful(life: Life) -> dict[int, list[int]]:
    """Sequences join and leave. A row is reused while its last owner's token is in flight. One sequence is sampled."""
    life.add(0, random_prompt(5, 0), blocks(0))
    life.add(1, random_prompt(9, 1), blocks(1))
    for _ in range(4):
        life.run()
    life.add(2, random_prompt(3, 2), blocks(2))
    for _ in range(3):
        life.run()
    life.add(3, random_prompt(40, 3), blocks(3))
    life.run(finished=(1,))  # sequence 3 gets its row
    for _ in range(3):
        life.run()
    life.run(only=(0, 3))
    life.run()
    life.add(4, random_prompt(1, 4), blocks(4))  # a prompt of one token, not the last drawn one
    for _ in range(3):
        life.run()
    life.add(6, random_prompt(1, 6), blocks(6))
    life.run(finished=(2,))  # sequence 6 gets its row before the host has sequence 2's last token
    life.run()
    life.run(finished=(6,))
    life.add(5, random_prompt(6, 5), blocks(5), SAMPLED)
    for _ in range(4):
        life.run()
    life.run(finished=(5,))
    for _ in range(4):
        life.run()
    return life.end()


@pytest.mark.parametrize("ahead", [1, 2])
def test_tokens_are_those_of_steps_one_after_the_other(path: Path, ahead: int) -> None:
    decode = CountingDecode()
    fed = eventful(Life(runner(path, decode), ahead))
    assert fed == eventful(Life(runner(path, None), 1))
    assert decode.taken == 28  # all steps


class NeverFed(CountingDecode):
    """A fault: steps begin with the host's tokens."""

    def _feed(self, inputs: StepInputs, step: StepBatch, places: Ints) -> tuple[Tensor, Tensor]:
        newest = self._newest.copy()
        self._newest[:] = -1
        uploaded = super()._feed(inputs, step, places)
        self._newest[:] = newest
        return uploaded


class FedForever(CountingDecode):
    """A fault: a row's next owner begins with the last owner's token."""

    def add(self, row: int) -> None:
        self._owners[row] += 1


class Forgetful(CountingDecode):
    """A fault: drawn tokens are never written to the host's columns."""

    def _settle_oldest(self, batch: InputBatch) -> None:
        step = self._under_way.popleft()
        self._newest[step.rows[self._newest[step.rows] == step.number]] = -1


class Indiscriminate(CountingDecode):
    """A fault: a token for a row's last owner is written to the next owner's tokens."""

    def _settle_oldest(self, batch: InputBatch) -> None:
        self._owners[self._under_way[0].rows] = self._under_way[0].owners
        super()._settle_oldest(batch)


@pytest.mark.parametrize("fault", [NeverFed, FedForever, Forgetful, Indiscriminate])
def test_planted_faults_are_seen(path: Path, fault: type[CountingDecode]) -> None:
    assert eventful(Life(runner(path, fault()), 2)) != eventful(Life(runner(path, None), 1))


def test_a_row_whose_logits_are_no_numbers_fails_alone(path: Path) -> None:
    life = Life(runner(path, CountingDecode()), 2)
    for seq_id in (0, 1):
        life.add(seq_id, random_prompt(20, seq_id), blocks(seq_id))
    life.run()
    life.run()
    with torch.inference_mode():
        for pool in life.runner.forward._kv_caches:  # type: ignore[attr-defined]
            pool[:, blocks(0)[0]] = float("nan")
    life.run()
    life.run()
    told = life.end()
    assert life.failed == {0: "the model's logits are not finite"}
    assert (len(told[0]), len(told[1])) == (2, 4)


def test_only_steps_that_describe_a_prompt_are_not_taken(path: Path) -> None:
    decode = CountingDecode()
    life = Life(runner(path, decode), 2)
    life.add(0, random_prompt(4, 0), blocks(0), SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1))
    life.add(1, random_prompt(4, 1), blocks(1))
    for _ in range(3):
        life.run()
    assert decode.taken == 2
    life.add(2, random_prompt(4, 2), blocks(2))
    life.run(finished=(0,))
    assert decode.taken == 3


def test_only_a_gpu_decodes_asynchronously() -> None:
    assert type(create_async_decode(LIMITS, CPU, alone=True)) is AsyncDecode
    assert type(create_async_decode(LIMITS, torch.device("cuda"), alone=False)) is AsyncDecode
    assert np.array_equal(CountingDecode()._newest, [-1] * 4)
