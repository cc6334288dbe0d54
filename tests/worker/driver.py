"""Drives a ModelRunner like a scheduler, with scattered blocks in a pool of NaN, and keeps all logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from raylm.config import Config
from raylm.messages import ModelRunnerOutput, NewSequence, SchedulerOutput
from raylm.params import SamplingParams
from raylm.worker.distributed.rendezvous import Rendezvous
from raylm.worker.model_runner import ModelRunner
from raylm.worker.startup import start_runner

GREEDY = SamplingParams(temperature=0.0)


def kv_caches(runner: ModelRunner) -> list[Tensor]:
    """The KV cache of each layer."""
    pools = runner.forward._kv_caches  # type: ignore[attr-defined]
    return list(pools)


@dataclass
class Tracked:
    """The driver's state of a sequence: tokens, number of computed tokens, blocks, and logits by position."""

    tokens: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    logits: dict[int, Tensor] = field(default_factory=dict)
    is_new: bool = True


class Driver:
    """Runs steps that are given as {sequence: tokens to compute}."""

    def __init__(
        self,
        path: Path,
        num_blocks: int = 64,
        block_size: int = 16,
        seed: int = 0,
        rendezvous: Rendezvous | None = None,
        **config: Any,
    ) -> None:
        cache = {"num_blocks": num_blocks, "block_size": block_size}
        engine = {"threads": 1} | config.pop("engine", {})
        self.runner, self.info = start_runner(
            Config.model_validate({"model": str(path), "cache": cache, "engine": engine, **config}), rendezvous
        )
        self.block_size = block_size
        self.sequences: dict[int, Tracked] = {}
        self.finished: list[int] = []
        self.free = [int(block) for block in np.random.default_rng(seed).permutation(num_blocks)]
        self.steps = 0
        self._record_logits(self.runner)
        with torch.inference_mode():
            for kv in kv_caches(self.runner):
                kv.fill_(float("nan"))

    def _record_logits(self, runner: ModelRunner) -> None:
        forward = runner.forward.hidden

        def recorded(inputs: object) -> Tensor:
            self.hidden = forward(inputs)  # type: ignore[arg-type]
            return self.hidden

        runner.forward.hidden = recorded  # type: ignore[method-assign, assignment]

    def add(
        self, seq_id: int, tokens: Sequence[int], params: SamplingParams = GREEDY, prompt: int | None = None
    ) -> None:
        """Add a sequence. For a sequence that returns after preemption, ``prompt`` is the length of its prompt."""
        self.sequences[seq_id] = Tracked(list(tokens), prompt or len(tokens), params)

    def share_prefix(self, seq_id: int, source: int, num_blocks: int) -> None:
        """Let a sequence begin with computed blocks of another sequence."""
        self.sequences[seq_id].blocks = self.sequences[source].blocks[:num_blocks]
        self.sequences[seq_id].computed = num_blocks * self.block_size

    def finish(self, seq_id: int) -> Tracked:
        if not self.sequences[seq_id].is_new:  # otherwise the worker does not know it
            self.finished.append(seq_id)
        self.free += self.sequences[seq_id].blocks
        return self.sequences.pop(seq_id)

    def step(self, scheduled: Mapping[int, int]) -> ModelRunnerOutput:
        """Run one step. Append drawn tokens, and keep the logits of all computed positions."""
        order = sorted(scheduled, key=lambda seq_id: scheduled[seq_id] > 1)
        appended = [self._allocate(seq_id, scheduled[seq_id]) for seq_id in order]
        known = [self.sequences[seq_id].is_new for seq_id in order]
        plan = SchedulerOutput(
            step=self.steps,
            finished=self.finished,
            new=[self._new(seq_id) for seq_id in order if self.sequences[seq_id].is_new],
            seq_ids=order,
            num_computed=[self.sequences[seq_id].computed for seq_id in order],
            num_scheduled=[scheduled[seq_id] for seq_id in order],
            samples=[self._samples(seq_id, scheduled[seq_id]) for seq_id in order],
            new_block_counts=[0 if new else len(blocks) for new, blocks in zip(known, appended, strict=True)],
            new_block_ids=[block for new, blocks in zip(known, appended, strict=True) if not new for block in blocks],
        )
        output = self.runner.execute(plan)
        self.finished, self.steps = [], self.steps + 1
        self._keep(plan, output)
        return output

    def _samples(self, seq_id: int, count: int) -> bool:
        seq = self.sequences[seq_id]
        return seq.computed + count == len(seq.tokens)

    def _allocate(self, seq_id: int, count: int) -> list[int]:
        seq = self.sequences[seq_id]
        wanted = -(-(seq.computed + count) // self.block_size)
        appended = [self.free.pop() for _ in range(wanted - len(seq.blocks))]
        seq.blocks += appended
        return appended

    def _new(self, seq_id: int) -> NewSequence:
        seq = self.sequences[seq_id]
        seq.is_new = False
        return NewSequence(seq_id, list(seq.tokens), seq.num_prompt_tokens, list(seq.blocks), seq.params, seed=0)

    def _keep(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> None:
        if not plan.seq_ids:
            return
        with torch.inference_mode():
            logits = self.runner.forward.logits(self.hidden)
        at = 0
        for seq_id, count in zip(plan.seq_ids, plan.num_scheduled, strict=True):
            seq = self.sequences[seq_id]
            for position in range(seq.computed, seq.computed + count):
                seq.logits[position] = logits[at]
                at += 1
            seq.computed += count
        for seq_id, token in zip(output.seq_ids, output.token_ids, strict=True):
            self.sequences[seq_id].tokens.append(token)

    def run(self, seq_id: int, until: int, chunk: int = 1 << 20) -> Tracked:
        """Compute and draw for one sequence alone until it has ``until`` tokens."""
        seq = self.sequences[seq_id]
        while len(seq.tokens) < until:
            self.step({seq_id: min(chunk, len(seq.tokens) - seq.computed)})
        return seq


class Reference:
    """transformers' model of the same checkpoint."""

    def __init__(self, path: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")

    def error(self, seq: Tracked) -> float:
        """The largest difference of any recorded logit, relative to the largest logit."""
        with torch.inference_mode():
            wanted = self.model(torch.tensor([seq.tokens[: seq.computed]])).logits[0]
        positions = sorted(seq.logits)
        got = torch.stack([seq.logits[position] for position in positions])
        return float((got - wanted[positions]).abs().max() / wanted.abs().max())

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The prompt and ``count`` tokens after it."""
        ids = torch.tensor([list(prompt)])
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None
        )
        return out[0].tolist()  # type: ignore[no-any-return]


def random_prompt(length: int, seed: int) -> list[int]:
    """``length`` token ids of the small vocabulary, without special tokens."""
    return [int(token) for token in np.random.default_rng(seed).integers(5, 320, length)]
