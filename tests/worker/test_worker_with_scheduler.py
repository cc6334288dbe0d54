"""The real scheduler and worker together: greedy tokens equal transformers', with all kinds of scarce resources."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from raylm.config import Config
from raylm.engine.kv_cache_manager import KVCacheManager
from raylm.engine.scheduler import Scheduler
from raylm.messages import EngineCoreRequest
from raylm.params import SamplingParams
from raylm.worker import Worker
from tests.checkpoints import EOS, FAMILIES, make_checkpoint
from tests.worker.driver import Reference, random_prompt
from tests.worker.two_in_flight import play

NEW_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)


def serve(
    path: Path,
    prompts: list[list[int]],
    cache: dict[str, Any],
    scheduler: dict[str, Any],
    params: Sequence[SamplingParams] = (),
    device: str = "auto",
) -> tuple[dict[int, list[int]], Scheduler]:
    """Serve all prompts at once with two steps in flight. Returns the drawn tokens by prompt, and the scheduler."""
    config = Config.model_validate(
        {"model": str(path), "cache": cache, "scheduler": scheduler, "engine": {"threads": 1}, "device": device}
    )
    worker = Worker(config)
    info = worker.start()
    core = Scheduler(config.scheduler, KVCacheManager(info.num_blocks, info.block_size), info.max_model_len)
    for key, (prompt, wish) in enumerate(zip(prompts, params or [GREEDY] * len(prompts), strict=True)):
        core.add("client", EngineCoreRequest(key, str(key), prompt, wish, eos_token_ids=(EOS,)))
    drawn: dict[int, list[int]] = defaultdict(list)
    for news in play(core, worker):
        at = 0
        for key, count in zip(news.keys, news.token_counts, strict=True):
            drawn[key] += news.token_ids[at : at + count]
            at += count
    return drawn, core


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    path = make_checkpoint(tmp_path_factory.mktemp(request.param), request.param, tokenizer=False)
    return path, Reference(path)


PROMPTS = [random_prompt(20 + 7 * seed, seed) for seed in range(8)]
SHARING = [random_prompt(48, 99) + random_prompt(5, seed) for seed in range(8)]


@pytest.mark.parametrize(
    ("prompts", "cache", "scheduler"),
    [
        (PROMPTS, {"num_blocks": 96}, {}),
        (PROMPTS, {"num_blocks": 96}, {"max_num_batched_tokens": 16, "max_num_seqs": 16}),
        (PROMPTS, {"num_blocks": 12}, {}),
        (PROMPTS, {"num_blocks": 12}, {"max_num_batched_tokens": 16, "max_num_seqs": 5}),
        (SHARING, {"num_blocks": 96}, {"max_num_seqs": 2}),
    ],
    ids=["8-at-once", "chunks-of-16", "preempted", "preempted-in-chunks", "warm-prefix-cache"],
)
def test_greedy_tokens_equal_transformers(
    family: tuple[Path, Reference], prompts: list[list[int]], cache: dict[str, Any], scheduler: dict[str, Any]
) -> None:
    path, reference = family
    drawn, core = serve(path, prompts, cache, scheduler)
    for key, prompt in enumerate(prompts):
        assert prompt + drawn[key] == reference.greedy(prompt, NEW_TOKENS)
    assert (core.counters.preemptions > 0) == (cache["num_blocks"] == 12)
    assert (core.counters.prefix_hits >= 6 * 48) == (prompts is SHARING)
