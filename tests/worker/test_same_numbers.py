"""A position's logits are the same bits whatever stands beside its sequence, however its tokens came, on any threads.

Every sequence is computed alone first, as one prompt and with one thread. Then random schedules compute it again: in
batches, in chunks, behind cached prefixes, again after preemptions, with one to four threads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from raylm.native import kernels
from raylm.native.build import INSTRUCTION_SETS, offered
from tests.checkpoints import make_checkpoint
from tests.worker.driver import Driver, random_prompt

MODELS: dict[str, dict[str, Any]] = {  # heads that leave threads idle, odd sizes, windows, every kind of weights
    "llama": {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16},
    "llama int8": {"quantization": "int8"},
    "llama int4": {"quantization": "int4"},
    "llama bfloat16": {
        "dtype": "bfloat16",
        "hidden_size": 96,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 32,
    },
    "qwen3": {"head_dim": 48, "num_key_value_heads": 1},
    "mistral": {"sliding_window": 300, "num_key_value_heads": 1},
    "qwen2 bfloat16": {"dtype": "bfloat16", "use_sliding_window": True, "sliding_window": 77, "max_window_layers": 1},
}
_KNOBS = ("quantization", "dtype")


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Driver]:
    @lru_cache
    def checkpoint(name: str) -> Path:
        overrides = {key: value for key, value in MODELS[name].items() if key not in _KNOBS}
        path = tmp_path_factory.mktemp(name.replace(" ", "-"))
        return make_checkpoint(path, name.split()[0], tokenizer=False, max_position_embeddings=2048, **overrides)

    def driver(name: str, threads: int, seed: int = 0) -> Driver:
        knobs = {key: MODELS[name][key] for key in _KNOBS if key in MODELS[name]}
        return Driver(checkpoint(name), num_blocks=1400, seed=seed, engine={"threads": threads}, **knobs)

    return driver


def alone(driver: Driver, tokens: list[int]) -> dict[int, Tensor]:
    driver.add(0, tokens)
    driver.step({0: len(tokens)})
    return driver.finish(0).logits


class Schedule:
    """A random life of ``texts`` by number: every position is computed at least once, some again."""

    def __init__(self, driver: Driver, texts: list[list[int]], seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.driver, self.texts = driver, texts
        self.waiting = list(self.random.permutation(len(texts)))
        self.running: dict[int, int] = {}  # ids of sequences, and which text each has
        self.ids = 0
        self.most = int(self.random.integers(1, len(texts) + 1))
        self.chunk = int(self.random.choice([1, 3, 16, 17, 100, 600]))

    def run(self, check: Callable[[int, dict[int, Tensor]], None]) -> None:
        while self.waiting or self.running:
            while self.waiting and len(self.running) < self.most:
                self._start(int(self.waiting.pop()))
            self._step()
            for seq_id, text in list(self.running.items()):
                done = self.driver.sequences[seq_id].computed == len(self.texts[text])
                if done or self.random.random() < 0.01:
                    del self.running[seq_id]
                    check(text, self.driver.finish(seq_id).logits)
                    if not done:
                        self.waiting.insert(0, text)

    def _start(self, text: int) -> None:
        self.ids += 1
        self.driver.add(self.ids, self.texts[text], prompt=len(self.texts[text]) + 1)
        if self.random.random() < 0.8:  # computed at once but for some last tokens, which come one by one
            behind = min(int(self.random.integers(1, 30)), len(self.texts[text]) - 1)
            self.driver.step({self.ids: len(self.texts[text]) - behind})
        self.running[self.ids] = text

    def _step(self) -> None:
        chosen = [seq_id for seq_id in self.running if self.random.random() < 0.9] or list(self.running)
        left = {
            seq_id: len(self.texts[self.running[seq_id]]) - self.driver.sequences[seq_id].computed for seq_id in chosen
        }
        self.driver.step({
            seq_id: min(count, int(self.random.choice([1, 1, self.chunk]))) for seq_id, count in left.items()
        })  # fmt: skip


def check_schedules(
    make: Callable[..., Driver], name: str, threads: Sequence[int], long: Sequence[int] = (1300, 1025, 700, 513, 512)
) -> None:
    lengths = [*long, *(int(n) for n in np.random.default_rng(5).integers(2, 400, 7))]
    texts = [random_prompt(length, seed) for seed, length in enumerate(lengths)]
    reference = make(name, threads=1)
    wanted = [alone(reference, text) for text in texts]

    def check(text: int, logits: dict[int, Tensor]) -> None:
        for position, found in logits.items():
            same = torch.equal(found, wanted[text][position])
            assert same, f"text {text} of {len(texts[text])} tokens, position {position}"

    for count in threads:
        Schedule(make(name, count, seed=count), texts, seed=10 * count).run(check)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_the_same_bits_in_every_schedule(make: Callable[..., Driver], name: str) -> None:
    check_schedules(make, name, threads=(1, 2, 3, 4))


@pytest.mark.parametrize("name", ["llama int4", "llama bfloat16"])
@pytest.mark.parametrize("instructions", [name for name in INSTRUCTION_SETS if offered(name)][1:])
def test_and_on_every_instruction_set(
    make: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch, instructions: str, name: str
) -> None:
    monkeypatch.setattr(sys.modules["raylm.native.kernels"], "instruction_set", lambda: instructions)
    kernels.cache_clear()
    try:
        check_schedules(make, name, threads=(3,), long=(520,))
    finally:
        kernels.cache_clear()
