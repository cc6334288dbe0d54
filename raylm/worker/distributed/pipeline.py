"""PipelineLink: passes streams from stage to stage, and drawn tokens from the last stage to all stages before it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup, Work

from raylm.errors import PeerLostError
from raylm.models import Ranks
from raylm.worker.arrays import Ints
from raylm.worker.features import Pipeline
from raylm.worker.forward import Forward
from raylm.worker.input_batch import InputBatch
from raylm.worker.input_buffers import StepInputs
from raylm.worker.sampling.sampler import LATE
from raylm.worker.step_batch import DrawRows, StepBatch

_STREAM, _TOKENS = 0, 1  # tags of messages
_GONE = -1  # in place of a row whose sequence was removed


@dataclass(slots=True)
class _Draws:
    """Tokens [D] int64 that arrive by ``receipt`` from the last stage, for the rows [D]."""

    rows: Ints
    token_ids: Tensor
    receipt: Work


class PipelineLink(Pipeline):
    """The end of one worker. Each rank of a stage exchanges messages with the same rank of the other stages.

    A stage asks for the tokens of a step before it passes the step on, so the last stage never waits to send them.
    Streams are sent in the background: a stage computes its next step while the next stage is still busy. At most
    ``stages + 1`` steps are in flight, so older messages have arrived.
    """

    def __init__(self, group: ProcessGroup, ranks: Ranks) -> None:
        """``group`` has all workers of the engine: rank r of stage s is number s * ranks of a stage + r."""
        self._group, self._stage = group, ranks.stage
        self.is_last = self._stage.is_last
        self._peers = [stage * ranks.world_size + ranks.rank for stage in range(self._stage.count)]
        self._most = self._stage.count + 1
        self._draws: deque[_Draws] = deque()
        self._sent: deque[tuple[Work, Tensor]] = deque()

    def remove(self, row: int) -> None:
        for draws in self._draws:
            draws.rows[draws.rows == row] = _GONE

    def settle(self, step: StepBatch, batch: InputBatch) -> None:
        needed = [at for at, draws in enumerate(self._draws) if np.isin(step.rows, draws.rows).any()]
        for _ in range(max(len(self._draws) - self._most, needed[-1] + 1 if needed else 0)):
            self._take(self._draws.popleft(), batch)

    def _take(self, draws: _Draws, batch: InputBatch) -> None:
        with self._waiting():
            draws.receipt.wait()
        token_ids = draws.token_ids.numpy()
        self.has_deferred |= bool((token_ids == LATE).any())
        known = (token_ids != LATE) & (draws.rows != _GONE)
        batch.append_tokens(draws.rows[known], token_ids[known])

    def begin(self, inputs: StepInputs, forward: Forward) -> StepInputs:
        if self._stage.is_first:
            return inputs
        stream = forward.empty_stream(len(inputs.input_ids))
        with self._waiting():
            self._group.recv([stream], self._peers[self._stage.number - 1], _STREAM).wait()
        return replace(inputs, stream=stream)

    def end(self, stream: Tensor, step: StepBatch) -> None:
        places = DrawRows.of(step).places
        if len(places):
            token_ids = torch.empty(len(places), dtype=torch.int64)
            with self._waiting():
                receipt = self._group.recv([token_ids], self._peers[-1], _TOKENS)
            self._draws.append(_Draws(step.rows[places], token_ids, receipt))
        self._send(stream, self._peers[self._stage.number + 1], _STREAM)

    def tell(self, token_ids: Ints) -> None:
        if len(token_ids):
            for peer in self._peers[:-1]:
                self._send(torch.from_numpy(token_ids.copy()), peer, _TOKENS)

    def _send(self, x: Tensor, peer: int, tag: int) -> None:
        with self._waiting():
            self._sent.append((self._group.send([x], peer, tag), x))
            while len(self._sent) > self._most * self._stage.count:
                self._sent.popleft()[0].wait()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        except RuntimeError as error:
            lost = f"Stage {self._stage.number} of {self._stage.count} lost another one: {str(error).splitlines()[0]}"
            raise PeerLostError(lost[:300]) from error
        finally:
            self.waited_s += time.perf_counter() - started
