"""NGramSpeculator with a formula for the time of steps: it gains if texts repeat, and loses nothing otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from raylm.config import SchedulerConfig
from raylm.errors import ConfigError
from raylm.messages import NewSequence
from raylm.models import Ranks
from raylm.native import drafts_library
from raylm.params import SamplingParams
from raylm.worker.attention import StepLimits
from raylm.worker.features import Speculator
from raylm.worker.input_batch import InputBatch
from raylm.worker.speculation.speculator import NGramSpeculator
from raylm.worker.startup import create_speculator
from raylm.worker.step_batch import StepBatch
from tests.ranks import on_all_ranks

LENGTH, BLOCK = 1024, 16
Cost = Callable[[int], float]


def memory_bound(tokens: int) -> float:
    """Seconds of a step. Reading the weights takes as long as computing 32 tokens."""
    return max(0.020, 0.020 / 32 * tokens)


def compute_bound(tokens: int) -> float:
    """Seconds of a step. Every token costs the same."""
    return 0.001 + 0.004 * tokens


def uneven(tokens: int) -> float:
    """Seconds of a step whose kernel computes 16 tokens at a time, and is slow for other counts."""
    return 0.020 + 0.004 * (tokens % 16 > 0) + 0.006 * (tokens // 16)


class World:
    """Sequences with given texts. Steps take the seconds of ``cost``."""

    def __init__(
        self, texts: list[list[int]], prompt: int, speculator: Speculator, cost: Cost, blocks: int = 64
    ) -> None:
        self.texts = np.array(texts)
        self.cost = cost
        self.speculator = speculator
        self.batch = InputBatch(len(texts), LENGTH, BLOCK, 50_000)
        self.seconds = self.drafted = self.accepted = 0.0
        self.planned_by = np.zeros(len(texts))  # text lengths at the next step's plan: two in flight
        for seq_id, text in enumerate(texts):
            table = list(range(blocks))
            new = NewSequence(seq_id, text[:prompt], prompt, table, SamplingParams(), seed=0, limit=len(text))
            self.speculator.add(self.batch.add(new), new)
        self.speculator.observe(self.plan([prompt] * len(texts)), cost(prompt * len(texts)))

    def plan(self, counts: list[int], seq_ids: list[int] | None = None) -> StepBatch:
        seq_ids = list(range(len(counts))) if seq_ids is None else seq_ids
        rows = self.batch.rows(seq_ids)
        known = self.batch.num_tokens[rows].astype(np.int64)
        ones = np.ones(len(rows), np.int64)
        return StepBatch(seq_ids, rows, known - 1, np.array(counts, np.int64), ones)

    def step(self) -> bool:
        """Run a step of all sequences that are not known to have ended. Returns False if there are none."""
        rows = self.batch.rows(list(range(len(self.texts))))
        live = np.flatnonzero(self.planned_by + 1 < self.batch.limits[rows]).tolist()  # one in flight
        self.planned_by = self.batch.num_tokens[rows].copy()
        step = self.speculator.propose(self.plan([1] * len(live), live), self.batch)
        if not step.seq_ids:
            return False
        taken = self.cost(int(step.counts.sum()))
        for seq_id, row, drafts in zip(step.seq_ids, step.rows.tolist(), step.drafts.tolist(), strict=True):
            known = int(self.batch.num_tokens[row])
            coming = self.texts[seq_id, known : known + drafts + 1]
            assert len(coming) == drafts + 1, "a draft beyond the limit"
            wrong = np.flatnonzero(self.batch.token_ids[row, known : known + drafts] != coming[:drafts])
            drawn = coming[: wrong[0] + 1] if wrong.size else coming
            self.batch.append_tokens(np.full(len(drawn), row), drawn, np.arange(len(drawn)))
            self.drafted += drafts
            self.accepted += len(drawn) - 1
        self.speculator.observe(step, taken)
        self.seconds += taken
        return True

    def run(self) -> float:
        while (self.batch.num_tokens < self.batch.limits).any() and self.step():
            pass
        return self.seconds


def limits(rows: int) -> StepLimits:
    return StepLimits(2048, rows, LENGTH // BLOCK, BLOCK)


def gain(texts: list[list[int]], prompt: int, cost: Cost) -> float:
    """The speedup by speculation."""
    plain = World(texts, prompt, Speculator(), cost)
    plain.batch.limits[:] = len(texts[0])
    return plain.run() / World(texts, prompt, NGramSpeculator(limits(len(texts)), 15), cost).run()


def random_text(rng: np.random.Generator, length: int, vocabulary: int = 30) -> list[int]:
    """Independent random tokens. Pairs repeat often, but do not predict the next token."""
    return rng.integers(0, vocabulary, length).tolist()  # type: ignore[no-any-return]


def copied(rng: np.random.Generator, prompt: int, answer: int) -> list[int]:
    """A prompt, and an answer that copies pieces of 20 to 60 tokens from it."""
    text = rng.integers(0, 5000, prompt).tolist()
    while len(text) < prompt + answer:
        start = int(rng.integers(0, prompt - 60))
        text += text[start : start + int(rng.integers(20, 60))]
    return text[: prompt + answer]  # type: ignore[no-any-return]


@pytest.mark.parametrize("cost", [memory_bound, compute_bound, uneven])
@pytest.mark.parametrize("rows", [1, 4, 32])
@pytest.mark.parametrize("vocabulary", [4, 30])
def test_where_nothing_repeats_nothing_is_lost(cost: Cost, rows: int, vocabulary: int) -> None:
    rng = np.random.default_rng(rows)
    assert gain([random_text(rng, 600, vocabulary) for _ in range(rows)], 100, cost) > 0.98


@pytest.mark.parametrize(("rows", "least"), [(1, 3.5), (4, 2.0), (16, 1.15), (32, 0.99)])
def test_where_the_prompt_is_copied_much_is_won(rows: int, least: float) -> None:
    rng = np.random.default_rng(rows)
    assert gain([copied(rng, 200, 400) for _ in range(rows)], 200, memory_bound) > least


@pytest.mark.parametrize("rows", [1, 8])
def test_where_tokens_cost_all_the_same_no_guess_pays_and_few_are_made(rows: int) -> None:
    rng = np.random.default_rng(rows)
    assert gain([copied(rng, 200, 400) for _ in range(rows)], 200, compute_bound) > 0.97


def test_one_that_copies_among_those_that_do_not() -> None:
    rng = np.random.default_rng(0)
    texts = [random_text(rng, 600, 1000) for _ in range(7)] + [copied(rng, 200, 400)]
    world = World(texts, 200, NGramSpeculator(limits(8), 15), memory_bound)
    for _ in range(80):
        world.step()
    lengths = world.batch.num_tokens[world.batch.rows(list(range(8)))]
    assert lengths[:7].max() < 300
    assert lengths[7] > 480


def test_a_row_that_begins_to_copy_late_is_noticed() -> None:
    rng = np.random.default_rng(1)
    text = rng.integers(0, 50_000, 400).tolist()
    text += text[100:350]
    world = World([text], 200, NGramSpeculator(limits(1), 15), memory_bound)
    steps = 0
    while world.batch.num_tokens[0] < len(text):
        steps += world.step()
    assert 200 < steps < 260


@pytest.mark.parametrize("blocks", [9, 10, 64])
def test_no_guess_lacks_a_block(blocks: int) -> None:
    text = [1, 2, 3, 4] * 100
    world = World([text], 140, NGramSpeculator(limits(1), 15), memory_bound, blocks)
    world.step(), world.step()
    for _ in range(10):
        known, row = int(world.batch.num_tokens[0]), 0
        if known > blocks * BLOCK:
            break
        step = world.speculator.propose(world.plan([1]), world.batch)
        assert step.computed[0] + step.counts[0] <= blocks * BLOCK
        world.batch.append_tokens(np.array([row]), np.array([text[known]]))


def test_a_step_stays_within_its_limits() -> None:
    speculator = NGramSpeculator(StepLimits(20, 4, LENGTH // BLOCK, BLOCK), 15)
    world = World([[1, 2, 3, 4] * 100] * 4, 100, speculator, memory_bound)
    world.step(), world.step()
    sizes = [int(world.speculator.propose(world.plan([1] * 4), world.batch).counts.sum()) for _ in range(3)]
    assert max(sizes) == 20


def test_rows_are_told_where_they_really_are_and_end_at_their_limit() -> None:
    world = World([[5, 6, 7, 8] * 20, list(range(80))], 70, NGramSpeculator(limits(2), 15), memory_bound)
    behind = world.plan([1, 1])
    while world.batch.num_tokens[0] < 80:
        world.step()
    step = world.speculator.propose(behind, world.batch)
    assert step.seq_ids == [1]
    assert step.computed.tolist() == [world.batch.num_tokens[1] - 1]
    alone = World([[5, 6, 7, 8] * 20], 70, NGramSpeculator(limits(1), 15), memory_bound)
    behind = alone.plan([1])
    while alone.batch.num_tokens[0] < 80:
        alone.step()
    assert alone.accepted > 0
    assert alone.speculator.propose(behind, alone.batch).seq_ids == []


def test_rows_of_one_token_come_first() -> None:
    rng = np.random.default_rng(0)
    texts = [[5, 6, 7, 8] * 20, random_text(rng, 80, 9999), [1, 2, 3] * 30, random_text(rng, 80, 9999)]
    world = World([text[:80] for text in texts], 60, NGramSpeculator(limits(4), 3), memory_bound)
    world.step(), world.step()
    step = world.speculator.propose(world.plan([1] * 4), world.batch)
    assert step.seq_ids == [1, 3, 0, 2]
    assert step.counts.tolist() == [1, 1, 4, 4]
    assert step.draws.tolist() == [1, 1, 4, 4]


def test_who_speculates_is_a_matter_of_configuration() -> None:
    assert type(create_speculator(SchedulerConfig(), limits(1))) is Speculator
    assert isinstance(create_speculator(SchedulerConfig(speculative_tokens=3), limits(1)), NGramSpeculator)


def test_without_a_compiler_speculation_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    drafts_library.cache_clear()
    with pytest.raises(ConfigError, match=r"^scheduler\.speculative_tokens: .* there is no C\+\+ compiler"):
        create_speculator(SchedulerConfig(speculative_tokens=3), limits(1))


@pytest.mark.parametrize("seed", range(5))
def test_disturbed_steps_do_not_end_it(seed: int) -> None:
    """One step in eight takes up to twenty times as long."""
    rng, luck = np.random.default_rng(seed), np.random.default_rng(seed)

    def disturbed(tokens: int) -> float:
        return memory_bound(tokens) * (1 if luck.random() > 1 / 8 else luck.uniform(2, 20))

    world = World([copied(rng, 200, 800)], 200, NGramSpeculator(limits(1), 15), disturbed)
    steps = 0
    while world.step():
        steps += 1
    assert steps < 300


def test_ranks_draft_the_same_though_their_steps_take_different_times() -> None:
    rng = np.random.default_rng(0)
    texts = [copied(rng, 200, 200) for _ in range(3)]

    def run(ranks: Ranks) -> tuple[list[list[int]], float]:
        slower = memory_bound if ranks.rank == 0 else compute_bound
        world = World(texts, 200, NGramSpeculator(limits(3), 7, ranks=ranks), slower)
        counts = []
        while (world.batch.num_tokens < world.batch.limits).any():
            behind = world.batch.num_tokens.sum()
            world.step()
            counts.append([int(world.batch.num_tokens.sum() - behind)])
        return counts, world.accepted

    (first, accepted), (second, _) = on_all_ranks(2, run)
    assert first == second
    assert accepted > 200


def test_an_answer_of_before_is_drafted_for_its_owner_alone() -> None:
    rng = np.random.default_rng(2)
    text = rng.integers(0, 50_000, 300).tolist()

    def steps(owner: str, *, shared: bool) -> int:
        world = World([text], 40, NGramSpeculator(limits(1), 15, shared), memory_bound)
        while world.step():
            pass
        world.speculator.remove(0, world.batch)
        world.batch.remove(0)
        new = NewSequence(0, text[:40], 40, list(range(64)), SamplingParams(), seed=0, limit=len(text), owner=owner)
        world.speculator.add(world.batch.add(new), new)
        found = 0
        while world.batch.num_tokens[0] < len(text):
            found += world.step()
        return found

    assert steps("", shared=False) < 60
    assert steps("other\0", shared=False) == 260
    assert steps("other\0", shared=True) < 60
    assert steps("other\0salt", shared=True) == 260
