"""The real scheduler and worker with speculation: tokens equal those without it, however many drafts are right."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raylm.config import Config
from raylm.engine.kv_cache_manager import KVCacheManager
from raylm.engine.scheduler import Scheduler
from raylm.messages import EngineCoreRequest, Logprobs
from raylm.params import SamplingParams
from raylm.step_cost import StepCost
from raylm.worker import Worker
from raylm.worker.attention import StepLimits
from raylm.worker.speculation.drafts import Drafts
from raylm.worker.speculation.speculator import NGramSpeculator
from tests.checkpoints import make_checkpoint
from tests.worker.driver import random_prompt
from tests.worker.two_in_flight import play

MOST = 5
EOS = 1


@dataclass
class Answers:
    """Tokens and finish reasons by (request, index), logprobs, and the scheduler."""

    tokens: dict[tuple[int, int], list[int]] = field(default_factory=lambda: defaultdict(list))
    finish: dict[tuple[int, int], str | None] = field(default_factory=dict)
    logprobs: list[Logprobs] = field(default_factory=list)
    core: Any = None


@dataclass(frozen=True)
class Guesses:
    """The tokens of the same requests without speculation, each one changed with probability ``spoilt``."""

    texts: list[list[int]]
    spoilt: float
    seed: int
    lapses: float = 0.0  # the share of steps without drafts


class KnownDrafts(Drafts):
    """Drafts that come from Guesses, as many as fit into a step."""

    def __init__(self, guesses: Guesses, limits: StepLimits) -> None:
        super().__init__(limits.max_num_seqs, MOST, limits.block_size)
        self._guesses, self._rng = guesses, np.random.default_rng(guesses.seed)

    def renew(self, count: int) -> bool:
        assert self._batch is not None
        if self._rng.random() < self._guesses.lapses:
            return False
        for row in self.rows[:count][self.may[:count] > 0].tolist():
            known = int(self._batch.num_tokens[row])
            begun = self._batch.token_ids[row, :known].tolist()
            coming = next((text[known:] for text in self._guesses.texts if text[:known] == begun), [])
            wrong = self._rng.random(MOST) < self._guesses.spoilt
            self.tokens[row] = np.where(wrong, 9, (coming + [7] * MOST)[:MOST])
            self.counts[row], self.chances[row] = MOST, 0.9
        return True

    def renew_and_choose(self, count: int, most: int, cost: StepCost) -> int:
        return self.choose(count, most, cost) if self.renew(count) else 0


class NoCost(StepCost):
    """All steps take the same time."""

    largest = 1 << 20

    def times_seen(self, tokens: int) -> int:
        return 9

    def curve(self) -> tuple[list[int], list[float]]:
        return [1, self.largest], [1.0, 1.0]


def serve(
    path: Path,
    requests: list[EngineCoreRequest],
    guesses: Guesses | None = None,
    cache: dict[str, Any] | None = None,
    **scheduler: Any,
) -> Answers:
    """Serve all requests at once with two steps in flight, with as many drafts as allowed, or none."""
    config = Config.model_validate(
        {
            "model": str(path),
            "cache": {"num_blocks": 96} | (cache or {}),
            "scheduler": {"speculative_tokens": MOST if guesses else 0, **scheduler},
            "engine": {"threads": 1},
        }
    )
    worker = Worker(config)
    info = worker.start()
    if guesses is not None:
        speculator = worker._runner.speculator  # type: ignore[union-attr]
        assert isinstance(speculator, NGramSpeculator)
        speculator._drafts, speculator._cost = KnownDrafts(guesses, speculator._limits), NoCost()
    core = Scheduler(config.scheduler, KVCacheManager(info.num_blocks, info.block_size), info.max_model_len)
    answers = Answers(core=core)
    for request in requests:
        core.add("client", request)
    for news in play(core, worker):
        take(answers, news)
    return answers


def take(answers: Answers, news: Any) -> None:
    at = 0
    for entry, (key, index, count) in enumerate(zip(news.keys, news.indexes, news.token_counts, strict=True)):
        answers.tokens[key, index] += news.token_ids[at : at + count]
        answers.finish[key, index] = news.finish_reasons[entry]
        at += count
    if news.logprobs is not None:
        answers.logprobs.append(news.logprobs)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), tokenizer=False)


def some(count: int = 6, sharing: int = 0, eos: tuple[int, ...] = (), **params: Any) -> list[EngineCoreRequest]:
    shared = random_prompt(sharing, 99) if sharing else []
    made = {"temperature": 0.0, "max_tokens": 30, "seed": 3, **params}
    return [
        EngineCoreRequest(key, str(key), shared + random_prompt(11 + 7 * key, key), SamplingParams(**made), eos)
        for key in range(count)
    ]


def known(
    requests: list[EngineCoreRequest], answers: Answers, spoilt: float = 0.3, seed: int = 0, lapses: float = 0.0
) -> Guesses:
    texts = [requests[key].prompt_token_ids + tokens for (key, _), tokens in answers.tokens.items()]
    return Guesses(texts, spoilt, seed, lapses)


@pytest.mark.parametrize("spoilt", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("count", [1, 6])
def test_tokens_are_the_same(path: Path, spoilt: float, temperature: float, count: int) -> None:
    requests = some(count, temperature=temperature)
    plain = serve(path, requests)
    answers = serve(path, requests, known(requests, plain, spoilt))
    assert answers.tokens == plain.tokens
    assert answers.finish == plain.finish
    counters = answers.core.counters
    assert counters.drafted_tokens > 20
    assert counters.accepted_tokens > counters.drafted_tokens * (1 - spoilt) ** MOST / 2 - 1
    assert (counters.accepted_tokens == counters.drafted_tokens) == (spoilt == 0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("sharing", "cache", "scheduler"),
    [
        (0, {}, {"max_num_batched_tokens": 16, "max_num_seqs": 16}),
        (0, {"num_blocks": 12}, {}),
        (0, {"num_blocks": 12}, {"max_num_batched_tokens": 24, "max_num_seqs": 5}),
        (48, {}, {"max_num_seqs": 2}),
        (0, {"prefix_caching": False}, {"steps_in_flight": 1}),
    ],
    ids=["chunks-of-16", "preempted", "preempted-in-chunks", "warm-prefix-cache", "one-in-flight"],
)
def test_tokens_are_the_same_under_pressure(
    path: Path, temperature: float, sharing: int, cache: dict[str, Any], scheduler: dict[str, Any]
) -> None:
    requests = some(8, sharing, temperature=temperature, max_tokens=40)
    plain = serve(path, requests)
    answers = serve(path, requests, known(requests, plain), cache, **scheduler)
    assert answers.tokens == plain.tokens
    assert answers.core.counters.accepted_tokens > 20
    assert (answers.core.counters.preemptions > 0) == (cache.get("num_blocks") == 12)
    assert (answers.core.counters.prefix_hits > 0) == (sharing > 0)


@pytest.mark.parametrize("seed", range(4))
def test_tokens_are_the_same_where_steps_are_not_looked_at(path: Path, seed: int) -> None:
    requests = some(4, temperature=1.0, max_tokens=60)
    plain = serve(path, requests)
    answers = serve(path, requests, known(requests, plain, 0.1, seed, lapses=0.6))
    assert answers.tokens == plain.tokens
    assert answers.finish == plain.finish
    assert answers.core.counters.accepted_tokens > 20


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_the_last_token_may_lie_within_accepted_guesses(path: Path, max_tokens: int) -> None:
    longer = some(3, max_tokens=20)
    requests = some(3, max_tokens=max_tokens)
    answers = serve(path, requests, known(longer, serve(path, longer), spoilt=0.1))
    assert answers.tokens == serve(path, requests).tokens
    assert set(answers.finish.values()) == {"length"}


def test_a_stop_token_may_lie_within_accepted_guesses(path: Path) -> None:
    free = some(6, temperature=1.0, ignore_eos=True)
    plain = serve(path, free)
    stops = tuple({tokens[5 + key] for (key, _), tokens in plain.tokens.items()})
    requests = some(6, eos=stops, temperature=1.0)
    guesses = known(free, plain, spoilt=0.1)
    answers = serve(path, requests, guesses)
    assert answers.tokens == serve(path, requests).tokens
    assert set(answers.finish.values()) == {"stop"}


def test_every_sequence_of_a_request(path: Path) -> None:
    requests = some(3, temperature=0.8, n=3)
    plain = serve(path, requests)
    assert len({tuple(tokens) for tokens in plain.tokens.values()}) == 9
    answers = serve(path, requests, known(requests, plain))
    assert answers.tokens == plain.tokens


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.3},
        {"frequency_penalty": 1.0},
        {"min_tokens": 12},
        {"logit_bias": {5: 30.0, 6: 29.0}},
        {"allowed_token_ids": tuple(range(20, 60))},
        {"top_k": 5},
        {"top_p": 0.7, "min_p": 0.05},
    ],
)
def test_what_changes_logits_changes_them_at_every_guess(path: Path, params: dict[str, Any]) -> None:
    requests = some(4, eos=tuple(range(2, 40)), temperature=1.0, **params)
    plain = serve(path, requests)
    assert serve(path, requests, known(requests, plain)).tokens == plain.tokens


def test_logprobs_are_those_of_the_tokens_that_count(path: Path) -> None:
    requests = some(1, temperature=1.0, logprobs=2, max_tokens=12)
    plain = serve(path, requests)
    answers = serve(path, requests, known(requests, plain))
    assert answers.core.counters.accepted_tokens > 0
    parts = [[value for one in found.logprobs for value in one.logprobs] for found in (plain, answers)]
    ids = [[token for one in found.logprobs for token in one.token_ids] for found in (plain, answers)]
    assert len(ids[0]) == 36
    assert ids[0] == ids[1]
    assert np.allclose(*parts, atol=1e-4)


def test_not_a_number_behind_a_wrong_guess_fails_nobody(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = some(1)
    plain = serve(path, requests)
    sample = "raylm.worker.sampling.sampler.Sampler.sample"
    from raylm.worker.sampling.sampler import Sampler

    original = Sampler.sample

    def spoil(self: Any, logits: Any, rows: Any, batch: Any, offsets: Any = None) -> Any:
        logits = logits.clone()
        logits[np.flatnonzero(offsets > 1)] = float("nan")
        return original(self, logits, rows, batch, offsets)

    monkeypatch.setattr(sample, spoil)
    assert serve(path, requests, known(requests, plain, spoilt=1.0)).tokens == plain.tokens
    failed = serve(path, requests, known(requests, plain, spoilt=0.0))
    assert failed.core.counters.generation_tokens < 30
