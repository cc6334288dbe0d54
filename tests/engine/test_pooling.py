"""Pooling requests in the engine core: chunks, cached prefixes, preemption, and other sequences in the same steps."""

from __future__ import annotations

import struct
from random import Random

import pytest

from raylm.config import SchedulerConfig
from raylm.engine.kv_cache_manager import KVCacheManager
from raylm.engine.scheduler import Scheduler
from raylm.errors import ContextLengthError
from raylm.messages import EngineCoreRequest
from raylm.params import PoolingParams, SamplingParams
from tests.engine.integrity import check_kv
from tests.fakes import FakeWorker, read, write


def fold_of(prompt: list[int]) -> int:
    fold = 0
    for position, token in enumerate(prompt):
        fold = read(fold, write(fold, token, position))
    return fold


def pooling_request(key: int, prompt: list[int], pooling: str = "last") -> EngineCoreRequest:
    params = PoolingParams(pooling=pooling)  # type: ignore[arg-type]
    return EngineCoreRequest(key, str(key), prompt, SamplingParams(max_tokens=1, seed=0), pooling=params)


class Run:
    """A scheduler with a fake worker and two steps in flight."""

    def __init__(self, num_blocks: int = 40, drafts: int = 0) -> None:
        self.worker = FakeWorker(num_blocks=num_blocks, max_num_batched_tokens=24, speculative_tokens=drafts)
        config = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=24, speculative_tokens=drafts)
        self.kv = KVCacheManager(num_blocks, 16, prefix_caching=True)
        self.scheduler = Scheduler(config, self.kv, 256)
        self.vectors: dict[int, tuple[int, int]] = {}
        self.tokens: dict[int, list[int]] = {}

    def until_idle(self) -> None:
        flying = []
        while self.scheduler.has_work or flying:
            while len(flying) < 2 and (plan := self.scheduler.schedule()):
                flying.append((plan, self.worker.execute(plan)))
            plan, result = flying.pop(0)
            check_kv(self.kv)
            for outputs in self.scheduler.update(plan, result).values():
                self.vectors |= {key: struct.unpack("qq", vector) for key, vector in outputs.pooled}
                start = 0
                for key, count in zip(outputs.keys, outputs.token_counts, strict=True):
                    self.tokens.setdefault(key, []).extend(outputs.token_ids[start : start + count])
                    start += count
        self.kv.check_idle()


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("num_blocks", [18, 40])
def test_vectors_among_tokens(num_blocks: int, drafts: int) -> None:
    run, rng = Run(num_blocks, drafts), Random(5)
    head = rng.choices(range(1, 50), k=40)
    prompts = [head[: rng.randint(0, 40)] + rng.choices(range(1, 50), k=rng.randint(1, 90)) for _ in range(40)]
    for key, prompt in enumerate(prompts):
        if key % 2:
            run.scheduler.add("c", pooling_request(key, prompt, rng.choice(["last", "mean", "cls"])))
        else:
            params = SamplingParams(max_tokens=30, seed=key, ignore_eos=True)
            run.scheduler.add("c", EngineCoreRequest(key, str(key), prompt, params))
    run.until_idle()
    for key, prompt in enumerate(prompts):
        if key % 2:
            assert run.vectors[key] == (fold_of(prompt), len(prompt))
        else:
            assert run.tokens[key] == run.worker.model.continuation(prompt, key, 30)
    assert run.vectors.keys() == set(range(1, 40, 2))


def test_only_the_last_token_is_pooled_from_a_cached_prefix() -> None:
    prompt = [1 + n % 40 for n in range(100)]
    computed = {}
    for pooling in ("last", "mean", "cls"):
        run = Run()
        for key in range(2):
            run.scheduler.add("c", pooling_request(key, prompt, pooling))
            run.until_idle()
        assert run.vectors[0] == run.vectors[1]
        computed[pooling] = run.worker.tokens_computed
    assert computed == {"last": 104, "mean": 200, "cls": 200}


def test_a_prompt_may_fill_the_context() -> None:
    run = Run()
    run.scheduler.add("c", pooling_request(0, [3] * 256))
    run.until_idle()
    assert run.vectors[0] == (fold_of([3] * 256), 256)
    with pytest.raises(ContextLengthError):
        run.scheduler.add("c", pooling_request(1, [3] * 257))


def test_an_aborted_one_leaves_nothing() -> None:
    run = Run()
    run.scheduler.add("c", pooling_request(0, [3] * 200))
    plan = run.scheduler.schedule()
    assert plan is not None
    result = run.worker.execute(plan)
    run.scheduler.abort("c", 0)
    assert not run.scheduler.update(plan, result)
    run.kv.check_idle()
