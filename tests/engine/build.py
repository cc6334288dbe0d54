"""Short functions that build objects for the engine's tests."""

from __future__ import annotations

from array import array
from typing import Any

from raylm.config import SchedulerConfig
from raylm.engine.kv_cache_manager import KVCacheManager
from raylm.engine.scheduler import Scheduler
from raylm.engine.sequence import RequestState, Sequence
from raylm.messages import EngineCoreOutputs, EngineCoreRequest, ModelRunnerOutput, SchedulerOutput
from raylm.params import SamplingParams
from tests.engine.integrity import check_kv

EOS = 0
CLIENT = "client"


def request(prompt: list[int], key: int = 0, *, priority: int = 0, salt: str | None = None, **params: Any) -> Any:
    """A request with EOS 0. ``params`` are SamplingParams; the default seed is 7."""
    return EngineCoreRequest(
        key=key,
        request_id=str(key),
        prompt_token_ids=array("I", prompt),
        params=SamplingParams(**{"seed": 7, **params}),
        eos_token_ids=(EOS,),
        priority=priority,
        cache_salt=salt,
    )


def sequence(tokens: list[int], seq_id: int = 0, arrival: int = 0, index: int = 0, **fields: Any) -> Sequence:
    """A sequence that no Scheduler knows."""
    state = RequestState(CLIENT, request(tokens, key=arrival, **fields), arrival, seed=7, limit=1000, num_unforked=0)
    return state.sequence(seq_id, index)


class Engine:
    """A scheduler with small numbers. The test acts as the worker."""

    def __init__(
        self, num_blocks: int = 8, block_size: int = 4, max_model_len: int = 1000, stages: int = 1, **fields: Any
    ) -> None:
        config = SchedulerConfig.model_construct(
            **{"max_num_seqs": 8, "max_num_batched_tokens": 64, "policy": "fcfs", "steps_in_flight": 2, **fields}
        )
        self.kv = KVCacheManager(num_blocks, block_size)
        self.scheduler = Scheduler(config, self.kv, max_model_len, stages=stages)

    def add(self, prompt: list[int], key: int = 0, **fields: Any) -> None:
        """Add a request of the only client."""
        self.scheduler.add(CLIENT, request(prompt, key, **fields))

    def schedule(self) -> SchedulerOutput:
        """Schedule a step, which must not be empty."""
        plan = self.scheduler.schedule()
        assert plan is not None
        return plan

    def update(self, plan: SchedulerOutput, *tokens: int, **fields: Any) -> EngineCoreOutputs | None:
        """Process a result in which the sequences that drew have drawn ``tokens`` (5 each by default)."""
        seq_ids = [seq_id for seq_id, samples in zip(plan.seq_ids, plan.samples, strict=True) if samples]
        failed = {seq_id for seq_id, _ in (*fields.get("failed", ()), *fields.get("undrawable", ()))}
        seq_ids = [seq_id for seq_id in seq_ids if seq_id not in failed]
        drawn = list(tokens) or [5] * len(seq_ids)
        result = ModelRunnerOutput(plan.step, seq_ids, [1] * len(seq_ids), drawn, **fields)
        news = self.scheduler.update(plan, result)
        check_kv(self.kv)
        return news.get(CLIENT)

    def step(self, *tokens: int) -> EngineCoreOutputs | None:
        """Schedule a step and process its result."""
        return self.update(self.schedule(), *tokens)

    def lengths(self) -> dict[int, int]:
        """Known tokens of the running sequences, by the key of their request."""
        return {seq.key: len(seq.token_ids) for seq in self.scheduler.running}


def crowd(engine: Engine, *lengths: int, **fields: list[int]) -> None:
    """Start sequences of the given lengths. If a length is a multiple of 4, the next token needs a new block."""
    for key, length in enumerate(lengths):
        engine.add([key + 1] * length, key=key, **{name: values[key] for name, values in fields.items()})
    admit = engine.kv.admit
    engine.kv.admit = lambda seq, spare, **kwargs: admit(seq, 0, **kwargs)  # type: ignore[method-assign]
    engine.step()
    engine.kv.admit = admit  # type: ignore[method-assign]
    assert len(engine.scheduler.running) == len(lengths)
