"""The logits of a position have the same bits in any batch, with any chunks, and with any number of threads.

First every sequence is computed alone, as one prompt and with one thread. Then random schedules compute it again: in
batches, in chunks, with cached prefixes, after preemptions, with one to four threads.
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

from raylm.checkpoint import EMBEDDED
from raylm.native import kernels
from raylm.native.build import INSTRUCTION_SETS, offered
from tests.checkpoints import make_checkpoint
from tests.gguf_files import make_gguf
from tests.worker.driver import Driver, random_prompt

MODELS: dict[str, dict[str, Any]] = {  # idle threads, odd sizes, windows, every kind of weights
    "llama": {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16},
    "llama int8": {"quantization": "int8"},
    "llama int4": {"quantization": "int4"},
    "llama Q4_1": {"kind": "Q4_1", "dtype": "float32"},
    "qwen3 Q5_1": {"kind": "Q5_1", "dtype": "float32"},
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
_KIND = "kind"  # the kind of blocks of a GGUF file
_SMOL = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
LARGER: dict[str, dict[str, Any]] = {  # the embedded model, and one of 135 M parameters
    "embedded": {},
    "llama 135M": {"dtype": "bfloat16", **_SMOL, "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 8192},
}
LENGTHS = (1300, 1025, 700, 513, 512, 271, 330, 17, 2, 150, 99, 395)
PREFIX = random_prompt(96, seed=99)


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Driver]:
    known = MODELS | LARGER

    @lru_cache
    def checkpoint(name: str) -> Path:
        if name == "embedded":
            return EMBEDDED
        overrides = {key: value for key, value in known[name].items() if key not in (*_KNOBS, _KIND)}
        path, kind = tmp_path_factory.mktemp(name.replace(" ", "-")), known[name].get(_KIND)
        sizes = {"max_position_embeddings": 2048, **overrides}
        made = make_checkpoint(path, name.split()[0], tokenizer=kind is not None, **sizes)
        return made if kind is None else make_gguf(made, path / "model.gguf", kind)

    def driver(name: str, threads: int, seed: int = 0) -> Driver:
        knobs = {key: known[name][key] for key in _KNOBS if key in known[name]}
        return Driver(checkpoint(name), num_blocks=1400, seed=seed, engine={"threads": threads}, **knobs)

    return driver


def alone(driver: Driver, tokens: list[int]) -> dict[int, Tensor]:
    driver.add(0, tokens)
    driver.step({0: len(tokens)})
    return driver.finish(0).logits


class Schedule:
    """Run the ``texts`` in random order. Every position is computed once or more, or found in a cached prefix."""

    def __init__(self, driver: Driver, texts: list[list[int]], seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.shared: dict[int, int] = {}  # sequence id -> number of its blocks that another one owns
        self.ids = self.owner = 10_000 * seed  # the owner computes the prefix that others share
        driver.add(self.owner, PREFIX)
        driver.step({self.owner: len(PREFIX)})
        self.driver, self.texts = driver, texts
        self.waiting = list(self.random.permutation(len(texts)))
        self.running: dict[int, int] = {}  # sequence id -> number of its text
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
                    check(text, self._finish(seq_id))
                    if not done:
                        self.waiting.insert(0, text)
        self.driver.finish(self.owner)

    def _finish(self, seq_id: int) -> dict[int, Tensor]:
        del self.driver.sequences[seq_id].blocks[: self.shared.pop(seq_id, 0)]
        return self.driver.finish(seq_id).logits

    def _start(self, text: int) -> None:
        self.ids += 1
        tokens = self.texts[text]
        self.driver.add(self.ids, tokens, prompt=len(tokens) + 1)
        if tokens[: len(PREFIX)] == PREFIX and self.random.random() < 0.7:
            count = self.shared[self.ids] = int(self.random.integers(1, len(PREFIX) // self.driver.block_size + 1))
            self.driver.share_prefix(self.ids, self.owner, count)
        left = len(tokens) - self.driver.sequences[self.ids].computed
        if self.random.random() < 0.8 and left > 1:  # leave some last tokens to compute one by one
            self.driver.step({self.ids: left - min(int(self.random.integers(1, 30)), left - 1)})
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
    make: Callable[..., Driver], name: str, threads: Sequence[int], schedules: int = 1, lengths: Sequence[int] = LENGTHS
) -> None:
    texts = [random_prompt(length, seed) for seed, length in enumerate(lengths)]
    for text in texts[1::2]:
        if len(text) > len(PREFIX):
            text[: len(PREFIX)] = PREFIX
    reference = make(name, threads=1)
    wanted = [alone(reference, text) for text in texts]

    def check(text: int, logits: dict[int, Tensor]) -> None:
        for position, found in logits.items():
            same = torch.equal(found, wanted[text][position])
            assert same, f"text {text} of {len(texts[text])} tokens, position {position}"

    for count in threads:
        driver = make(name, count, seed=count)
        for seed in range(schedules):
            Schedule(driver, texts, seed=1000 * count + seed).run(check)


@pytest.mark.parametrize("name", list(MODELS))
def test_logits_are_the_same_bits_in_every_schedule(make: Callable[..., Driver], name: str) -> None:
    check_schedules(make, name, threads=(1, 3))


@pytest.mark.long
@pytest.mark.parametrize("name", list(MODELS))
def test_and_by_teams_of_two_and_four(make: Callable[..., Driver], name: str) -> None:
    check_schedules(make, name, threads=(2, 4))


@pytest.mark.parametrize("tail", [1, 9])
@pytest.mark.parametrize("threads", [1, 3])
def test_blocks_may_be_read_in_the_step_that_writes_them(make: Callable[..., Driver], threads: int, tail: int) -> None:
    """Each layer writes the keys and values of all rows before attention, so even an earlier row can read them."""
    text = random_prompt(320 + tail, seed=5)
    wanted = alone(make("mistral", 1), text)
    driver = make("mistral", threads, seed=tail)
    for seq_id in (100, 101, 102):
        driver.add(seq_id, text)
    blocks = driver.sequences[100].blocks = [driver.free.pop() for _ in range(20)]
    for seq_id in (101, 102):
        driver.share_prefix(seq_id, 100, len(blocks))
    driver.step({102: tail, 100: len(text), 101: tail})
    for seq_id, count in ((100, len(text)), (101, tail), (102, tail)):
        logits = driver.finish(seq_id).logits
        assert len(logits) == count
        assert all(torch.equal(found, wanted[position]) for position, found in logits.items())


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "lengths"), [("embedded", (*LENGTHS, *range(3, 156, 3))), ("llama 135M", (560, 140, 90, 17, 5, 97))]
)
def test_and_in_two_hundred(make: Callable[..., Driver], name: str, lengths: Sequence[int]) -> None:
    """The embedded model is tested with up to 64 sequences in a batch."""
    check_schedules(make, name, (1, 2, 3, 4), schedules=50, lengths=lengths)


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama int8", "llama int4", "llama bfloat16"])
@pytest.mark.parametrize("instructions", [name for name in INSTRUCTION_SETS if offered(name)][1:])
def test_and_on_every_instruction_set(
    make: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch, instructions: str, name: str
) -> None:
    monkeypatch.setattr(sys.modules["raylm.native.runtime"], "instruction_set", lambda: instructions)
    kernels.cache_clear()
    try:
        check_schedules(make, name, threads=(3,), lengths=(520, 400, 90, 17, 130, 3))
    finally:
        kernels.cache_clear()
