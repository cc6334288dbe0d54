"""The runner's logits and greedy tokens equal transformers', however steps, chunks and blocks are arranged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raylm.messages import SchedulerOutput
from raylm.params import SamplingParams
from tests.checkpoints import FAMILIES, make_checkpoint
from tests.worker.driver import GREEDY, Driver, Reference, kv_caches, random_prompt

LIMIT = 1e-4
Maker = Callable[..., tuple[Driver, Reference]]
VARIANTS = {
    "llama": {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "qwen2": {"num_key_value_heads": 4, "use_sliding_window": True, "sliding_window": 13, "max_window_layers": 1},
    "qwen3": {"head_dim": 24},
    "mistral": {"sliding_window": 21},
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @lru_cache
    def make(family: str) -> Path:
        return make_checkpoint(tmp_path_factory.mktemp(family), family, tokenizer=False, **VARIANTS[family])

    return make


@pytest.fixture(scope="module")
def references(checkpoints: Callable[[str], Path]) -> Callable[[str], Reference]:
    return lru_cache(lambda family: Reference(checkpoints(family)))


@pytest.fixture
def make(checkpoints: Callable[[str], Path], references: Callable[[str], Reference]) -> Maker:
    def pair(family: str = "llama", **config: object) -> tuple[Driver, Reference]:
        return Driver(checkpoints(family), **config), references(family)  # type: ignore[arg-type]

    return pair


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [1000, 16, 7, 1])
def test_greedy_tokens_and_logits_equal_transformers(make: Maker, family: str, chunk: int) -> None:
    driver, reference = make(family)
    prompt = random_prompt(53, seed=chunk)
    driver.add(0, prompt)
    seq = driver.run(0, until=53 + 30, chunk=chunk)
    assert seq.tokens == reference.greedy(prompt, 30)
    assert sorted(seq.logits) == list(range(82))
    assert reference.error(seq) < LIMIT


@pytest.mark.parametrize("family", FAMILIES)
def test_decodes_and_prefills_in_one_step(make: Maker, family: str) -> None:
    driver, reference = make(family, num_blocks=96)
    prompts = {seq_id: random_prompt(length, seq_id) for seq_id, length in enumerate([3, 40, 16, 70, 1, 17])}
    driver.add(0, prompts[0])
    driver.step({0: 3})
    for seq_id in range(1, 6):
        driver.add(seq_id, prompts[seq_id])
        driver.step(dict.fromkeys(range(seq_id), 1) | {seq_id: min(16, len(prompts[seq_id]))})
        while (left := len(prompts[seq_id]) - driver.sequences[seq_id].computed) > 0:
            driver.step({seq_id: min(left, 16), 0: 1})
    for seq_id, seq in driver.sequences.items():
        assert seq.tokens == reference.greedy(prompts[seq_id], len(seq.tokens) - len(prompts[seq_id]))
        assert reference.error(seq) < LIMIT


def test_shared_prefix_blocks(make: Maker) -> None:
    driver, reference = make("qwen3")
    prompt = random_prompt(37, seed=1)
    driver.add(0, prompt)
    driver.run(0, until=45)
    driver.add(1, prompt[:32] + random_prompt(9, seed=2))
    driver.share_prefix(1, source=0, num_blocks=2)
    driver.step({0: 1, 1: 9})
    driver.step({0: 1, 1: 1})
    for seq in driver.sequences.values():
        assert reference.error(seq) < LIMIT
    assert min(driver.sequences[1].logits) == 32


@pytest.mark.parametrize("family", ["llama", "qwen3"])  # with the native decoder, and with sdpa
def test_blocks_are_shared_in_the_step_that_writes_them(make: Maker, family: str) -> None:
    driver, reference = make(family)
    prompt = random_prompt(33, seed=1)
    driver.add(0, prompt)
    driver.sequences[0].blocks = [driver.free.pop(), driver.free.pop()]
    for seq_id, tail in ((1, prompt[32:]), (2, random_prompt(9, seed=2))):
        driver.add(seq_id, prompt[:32] + tail)
        driver.share_prefix(seq_id, source=0, num_blocks=2)
    driver.step({0: 33, 1: 1, 2: 9})
    for seq in driver.sequences.values():
        assert reference.error(seq) < LIMIT
    assert driver.sequences[0].tokens == driver.sequences[1].tokens == reference.greedy(prompt, 1)


def test_blocks_of_finished_sequences_are_reused(make: Maker) -> None:
    driver, reference = make("mistral", num_blocks=5)
    for seq_id in range(4):
        prompt = random_prompt(30 + seq_id, seed=seq_id)
        driver.add(seq_id, prompt)
        seq = driver.run(seq_id, until=60)
        assert seq.tokens == reference.greedy(prompt, 60 - len(prompt))
        assert reference.error(driver.finish(seq_id)) < LIMIT


def test_preempted_sequence_goes_on_where_it_was(make: Maker) -> None:
    driver, reference = make("qwen2")
    prompt = random_prompt(20, seed=4)
    driver.add(0, prompt)
    driver.run(0, until=30)
    back = driver.finish(0)
    driver.add(0, back.tokens, prompt=20)
    assert driver.run(0, until=45, chunk=16).tokens == reference.greedy(prompt, 25)


def test_step_handed_over_before_the_one_before_it_was_read(make: Maker) -> None:
    """The worker uses its own drawn tokens. The second plan is made without the first step's token."""
    driver, reference = make()
    prompt = random_prompt(15, seed=5)
    driver.add(0, prompt)
    first = driver.step({0: 15})
    plan = SchedulerOutput(1, [], [], [0], [15], [1], [True], [0], [])
    second = driver.runner.execute(plan)
    third = driver.runner.execute(
        dataclasses.replace(plan, step=2, num_computed=[16], new_block_counts=[1], new_block_ids=[driver.free[-1]])
    )
    assert prompt + first.token_ids + second.token_ids + third.token_ids == reference.greedy(prompt, 3)
    assert (third.step, third.seq_ids, third.token_counts, third.failed) == (2, [0], [1], [])


def test_nothing_is_drawn_before_the_prompts_end(make: Maker) -> None:
    driver, _ = make()
    driver.add(0, random_prompt(40, seed=6))
    output = driver.step({0: 39})
    assert (output.seq_ids, output.token_ids, output.token_counts) == ([], [], [])
    assert len(driver.step({0: 1}).token_ids) == 1


def test_step_that_only_finishes(make: Maker) -> None:
    driver, _ = make()
    driver.add(0, random_prompt(4, seed=7))
    driver.step({0: 4})
    driver.finish(0)
    output = driver.step({})
    assert (output.step, output.seq_ids) == (1, [])
    assert not driver.runner.batch._row_of


def test_not_a_number_fails_its_own_sequence_only(make: Maker) -> None:
    driver, reference = make("qwen3")
    prompts = [random_prompt(20, seed=seed) for seed in (8, 9)]
    for seq_id, prompt in enumerate(prompts):
        driver.add(seq_id, prompt, SamplingParams(temperature=0.0, logprobs=1))
    driver.step({0: 20, 1: 20})
    with torch.inference_mode():
        for kv in kv_caches(driver.runner):
            kv[:, driver.sequences[0].blocks[0]] = float("nan")
    output = driver.step({0: 1, 1: 1})
    assert [seq_id for seq_id, _ in output.failed] == [0]
    assert output.seq_ids == [1]
    assert output.token_counts == [1]
    assert output.logprobs is not None
    assert output.logprobs.token_ids[0] == output.token_ids[0]
    assert len(output.logprobs.counts) == 1
    assert reference.error(driver.sequences[1]) < LIMIT
    driver.finish(0)
    assert driver.run(1, until=40).tokens == reference.greedy(prompts[1], 20)


@pytest.mark.parametrize("chunk", [1000, 16, 1])
def test_prompt_logprobs_describe_every_prompt_token_but_the_first(
    make: Maker, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr("raylm.worker.model_runner._PROMPT_LOGITS_BYTES", 4 * 320 * 5)
    driver, reference = make("qwen2")
    prompt = random_prompt(41, seed=10)
    driver.add(0, prompt, SamplingParams(temperature=0.0, prompt_logprobs=2))
    driver.add(1, random_prompt(5, seed=11))
    told, chosen = [], []
    while driver.sequences[0].computed < 43:
        left = len(driver.sequences[0].tokens) - driver.sequences[0].computed
        step = {0: min(left, chunk)} | ({1: 5} if not driver.sequences[1].computed else {})
        for seq_id, logprobs in driver.step(step).prompt_logprobs:
            assert seq_id == 0
            assert set(logprobs.counts) == {3}
            told += logprobs.token_ids[::3]
            chosen += logprobs.logprobs[::3]
    with torch.inference_mode():
        wanted = reference.model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert told == prompt[1:]
    expected = wanted[torch.arange(40), torch.tensor(prompt[1:])]
    assert np.allclose(chosen, expected.numpy(), atol=1e-3)
    driver.finish(0)
    driver.add(0, prompt)
    assert driver.step({0: 41}).prompt_logprobs == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_computed": [17]}, "not known"),
        ({"num_scheduled": [0]}, "none of a sequence"),
        ({"num_computed": [0], "num_scheduled": [40]}, "exceeds"),
        ({"new_block_counts": [0], "new_block_ids": []}, "no KV block"),
    ],
)
def test_plans_that_contradict_the_worker_are_refused(make: Maker, change: dict[str, list[int]], message: str) -> None:
    driver, _ = make(scheduler={"max_num_batched_tokens": 32, "max_num_seqs": 32})
    driver.add(0, random_prompt(16, seed=12))
    driver.step({0: 16})
    plan = SchedulerOutput(1, [], [], [0], [16], [1], [True], [1], [driver.free[-1]])
    with pytest.raises(RuntimeError, match=message):
        driver.runner.execute(dataclasses.replace(plan, **change))


def test_sequences_with_one_token_must_come_first(make: Maker) -> None:
    driver, _ = make()
    driver.add(0, random_prompt(4, seed=13))
    driver.add(1, random_prompt(4, seed=14))
    new = [driver._new(0), driver._new(1)]
    for sequence, block in zip(new, (3, 4), strict=True):
        sequence.block_ids.append(block)
    plan = SchedulerOutput(0, [], new, [0, 1], [0, 0], [4, 1], [True, False], [0, 0], [])
    with pytest.raises(RuntimeError, match="one token first"):
        driver.runner.execute(plan)


@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_random_schedules(
    checkpoints: Callable[[str], Path], references: Callable[[str], Reference], data: st.DataObject
) -> None:
    family = data.draw(st.sampled_from(list(FAMILIES)))
    driver = Driver(checkpoints(family), num_blocks=128, seed=data.draw(st.integers(0, 99)))
    for seq_id in range(data.draw(st.integers(1, 5))):
        driver.add(seq_id, random_prompt(data.draw(st.integers(1, 60)), seq_id), GREEDY)
    for _ in range(12):
        wanted = {seq_id: data.draw(st.integers(0, 30)) for seq_id in driver.sequences}
        step = {}
        for seq_id, count in wanted.items():
            seq = driver.sequences[seq_id]
            if count:
                step[seq_id] = min(count, len(seq.tokens) - seq.computed)
        driver.step(step)
    for seq in driver.sequences.values():
        if seq.computed:
            assert references(family).error(seq) < LIMIT


@pytest.mark.parametrize("hidden_size", [60, 72])
def test_rows_of_a_stream_of_odd_width_do_not_overlap(tmp_path: Path, hidden_size: int) -> None:
    """The native kernels write 16 columns at once, so the decoder runs layer by layer for other widths."""
    make_checkpoint(tmp_path, tokenizer=False, hidden_size=hidden_size)
    driver, reference = Driver(tmp_path), Reference(tmp_path)
    for seq, length in enumerate((40, 23, 5)):
        driver.add(seq, random_prompt(length, seed=seq))
    driver.step({0: 17, 1: 23})
    driver.step({0: 23, 1: 1, 2: 5})
    driver.step({0: 1, 1: 1, 2: 1})
    assert max(reference.error(seq) for seq in driver.sequences.values()) < LIMIT
