"""Decoding that goes on from tokens which the host has not seen yet."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from raylm.messages import ModelRunnerOutput
from raylm.worker.arrays import Ints
from raylm.worker.attention import StepLimits
from raylm.worker.features import AsyncDecode, Pending
from raylm.worker.forward import Forward
from raylm.worker.gpu.device_penalties import DevicePenalties
from raylm.worker.gpu.device_sampler import SamplingUploads, draw
from raylm.worker.input_batch import NO_LOGPROBS, InputBatch
from raylm.worker.input_buffers import Column, InputBuffers
from raylm.worker.sampling.logits_processors import Penalties
from raylm.worker.sampling.sampler import NOT_FINITE, failures
from raylm.worker.step_batch import StepBatch


@dataclass(frozen=True, slots=True)
class AsyncStep:
    """A step on its way: once ``done``, what it drew is on the host, as ``tokens`` (rows,), and the largest logits.

    These are the ``peaks`` of what the model gave, and of what was ``processed``, (rows,).
    """

    number: int
    seq_ids: list[int]
    rows: Ints
    positions: Ints
    owners: Ints
    tokens: Tensor
    peaks: Tensor
    processed: Tensor
    done: torch.cuda.Event | None
    started: float = field(default_factory=time.perf_counter)

    def output(self) -> ModelRunnerOutput:
        """Wait for what it drew; may be called from another thread than the one that launches steps."""
        if self.done is not None:
            self.done.synchronize()
        failed = failures(self.peaks.numpy(), self.processed.numpy())
        fine = np.ones(len(self.seq_ids), np.bool_)
        fine[list(failed)] = False
        reasons = [(self.seq_ids[at], reason) for at, reason in failed.items()]
        seconds = time.perf_counter() - self.started
        return ModelRunnerOutput(
            step=self.number,
            seq_ids=[seq_id for seq_id, drew in zip(self.seq_ids, fine.tolist(), strict=True) if drew],
            token_counts=[1] * int(fine.sum()),
            token_ids=self.tokens.numpy()[fine].tolist(),
            failed=[row for row in reasons if row[1] == NOT_FINITE],
            undrawable=[row for row in reasons if row[1] != NOT_FINITE],
            forward_s=seconds,
            step_s=seconds,
        )


class GPUAsyncDecode(AsyncDecode):
    """Steps in which every sequence decodes, and none needs its logits on the host.

    Each row's last token stays on the device, where the next step finds it. The host learns of it by a copy into
    pinned memory, which is awaited when the step's output is, while the next step is launched already. All memory that
    such copies read and write is there twice, for no more than two steps are on their way at a time.
    """

    def __init__(self, limits: StepLimits, device: torch.device) -> None:
        self._buffers = InputBuffers(limits, device), InputBuffers(limits, device)
        self._device, max_num_seqs = device, limits.max_num_seqs
        self._last = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._sampling = [SamplingUploads(max_num_seqs, device) for _ in self._buffers]
        self._rows = [Column((2, max_num_seqs), torch.int64, device) for _ in self._buffers]
        pinned = device.type == "cuda"
        self._tokens = [torch.zeros(max_num_seqs, dtype=torch.int64, pin_memory=pinned) for _ in self._buffers]
        self._peaks = [torch.zeros(2, max_num_seqs, pin_memory=pinned) for _ in self._buffers]
        self._penalties = DevicePenalties(max_num_seqs, device)
        self._under_way: deque[AsyncStep] = deque()
        self._owners = np.zeros(max_num_seqs, np.int64)  # how many sequences have had the row
        self._newest = np.full(max_num_seqs, -1, np.int64)  # the step on its way that draws the row's last token
        self._turn = 0

    def add(self, row: int) -> None:
        self._owners[row] += 1
        self._newest[row] = -1
        self._penalties.forget(row)

    def takes(self, step: StepBatch, batch: InputBatch) -> bool:
        if not (step.counts == 1).all() or not (step.draws == 1).all():
            return False
        sampling = batch.sampling[step.rows]
        if (sampling["logprobs"] != NO_LOGPROBS).any():
            return False
        return not any(
            processor.reads_tokens and not isinstance(processor, Penalties) and processor.owned(step.rows).size
            for processor in batch.processors
        )

    def launch(self, number: int, step: StepBatch, batch: InputBatch, forward: Forward) -> Pending:
        while len(self._under_way) > 1:
            self._settle_oldest(batch)
        self._turn ^= 1
        inputs = self._buffers[self._turn].build(step, batch)
        rows, on_device = self._upload_rows(step.rows)
        inputs.input_ids.copy_(torch.where(on_device, self._last[rows], inputs.input_ids))
        logits = forward.logits(forward.hidden(inputs))
        peaks = [logits.amax(dim=1)]
        if self._process(logits, step.rows, batch):
            peaks.append(logits.amax(dim=1))
        drawn = self._draw(logits, step, batch)
        self._penalties.count(drawn)
        self._last[rows] = drawn
        count = len(step.rows)
        token_ids, maxima = self._tokens[self._turn][:count], self._peaks[self._turn][: len(peaks), :count]
        token_ids.copy_(drawn, non_blocking=True)
        for place, peak in zip(maxima, peaks, strict=True):
            place.copy_(peak, non_blocking=True)
        done = None
        if self._device.type == "cuda":
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        positions = batch.num_tokens[step.rows].astype(np.int64)
        owners = self._owners[step.rows]
        about = number, step.seq_ids, step.rows, positions, owners
        started = AsyncStep(*about, token_ids, maxima[0], maxima[-1], done)
        batch.num_tokens[step.rows] += 1
        self._newest[step.rows] = number
        self._under_way.append(started)
        return started.output

    def _process(self, logits: Tensor, rows: Ints, batch: InputBatch) -> bool:
        """Apply what the rows ask for, in the order of the processors; whether there was anything."""
        plans = [(processor, processor.owned(rows)) for processor in batch.processors if processor.states]
        plans = [plan for plan in plans if plan[1].size]
        for processor, positions in plans:
            if isinstance(processor, Penalties):
                if not self._penalties.knows(rows[positions], batch):
                    self.settle(batch)
                self._penalties.apply(logits, positions, rows[positions], batch, processor)
            else:
                processor.apply(logits, positions, rows[positions], batch)
        return bool(plans)

    def _draw(self, logits: Tensor, step: StepBatch, batch: InputBatch) -> Tensor:
        sampling = batch.sampling[step.rows]
        if not (sampling["temperature"] > 0).any():
            return logits.argmax(dim=1)
        columns = self._sampling[self._turn].upload(sampling, batch.num_tokens[step.rows], batch.vocab_size)
        return draw(logits, columns)

    def settle(self, batch: InputBatch) -> None:
        while self._under_way:
            self._settle_oldest(batch)

    def _upload_rows(self, rows: Ints) -> tuple[Tensor, Tensor]:
        """The rows, and which of them have their last token on the device only."""
        column = self._rows[self._turn]
        column.host[0, : len(rows)] = rows
        column.host[1, : len(rows)] = self._newest[rows] >= 0
        both = column.upload(2)[:, : len(rows)]
        return both[0], both[1].bool()

    def _settle_oldest(self, batch: InputBatch) -> None:
        """Write what the oldest step drew to the rows that still belong to the same sequences."""
        step = self._under_way.popleft()
        if step.done is not None:
            step.done.synchronize()
        same = self._owners[step.rows] == step.owners
        rows = step.rows[same]
        token_ids = step.tokens.numpy()[same]
        batch.token_ids[rows, step.positions[same]] = token_ids
        for processor in batch.processors:
            if processor.states:
                processor.append_tokens(rows, token_ids)
        self._newest[rows[self._newest[rows] == step.number]] = -1
