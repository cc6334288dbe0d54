"""Asynchronous decoding: launches a step before the host has the tokens of the previous step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raylm import logprob_columns
from raylm.messages import ModelRunnerOutput
from raylm.native import AdapterRun
from raylm.worker.arrays import Ints, Mask
from raylm.worker.attention import StepLimits
from raylm.worker.features import AsyncDecode, Pending
from raylm.worker.forward import Forward
from raylm.worker.gpu.device_bad_words import DeviceBadWords
from raylm.worker.gpu.device_logprobs import DeviceLogprobs, LogprobsOnTheirWay
from raylm.worker.gpu.device_masks import DeviceMasks
from raylm.worker.gpu.device_penalties import DevicePenalties
from raylm.worker.gpu.device_sampler import Peaks, SamplingUploads, sampler_for
from raylm.worker.input_batch import InputBatch
from raylm.worker.input_buffers import Column, InputBuffers, StepInputs
from raylm.worker.sampling.logits_processors import BadWords, LogitsProcessor, Penalties
from raylm.worker.sampling.sampler import NOT_FINITE, failures
from raylm.worker.sampling.structured_outputs import Restriction, StructuredOutputsProcessor
from raylm.worker.step_batch import StepBatch


@dataclass(slots=True)
class StepTimes:
    """The time at which a step was ``launched``, and at which the host saw its end, in seconds; None before."""

    launched: float
    ended: float | None = None


@dataclass(frozen=True, slots=True)
class AsyncStep:
    """A launched step. After ``done``, the host has its ``tokens`` (rows,) and its largest logits.

    ``peaks`` (rows,) are the largest logits of the model, ``processed`` (rows,) the largest after the processors. Rows
    that are not ``drawing`` skip the step. ``reasons`` has, by row of the step, why it may have no token to draw.
    """

    number: int
    seq_ids: list[int]
    rows: Ints
    positions: Ints
    owners: Ints
    drawing: Mask
    reasons: dict[int, str]
    logprobs: LogprobsOnTheirWay | None
    tokens: Tensor
    peaks: Tensor
    processed: Tensor
    done: torch.cuda.Event | None
    times: StepTimes
    before: StepTimes | None

    def wait(self) -> None:
        """Wait until the device has computed the step. May be called from any thread."""
        if self.done is not None:
            self.done.synchronize()
        if self.times.ended is None:
            self.times.ended = time.perf_counter()

    def output(self) -> ModelRunnerOutput:
        """Wait for the step and return its output. May be called from another thread than ``launch``."""
        self.wait()
        failed = failures(self.peaks.numpy(), self.processed.numpy())
        fine = self.drawing.copy()
        fine[list(failed)] = False
        told = [
            (self.seq_ids[at], self.reasons.get(at, reason) if reason != NOT_FINITE else reason)
            for at, reason in failed.items()
            if self.drawing[at]
        ]
        logprobs = None if self.logprobs is None else self.logprobs.columns(fine)
        seconds = self._seconds()
        return ModelRunnerOutput(
            step=self.number,
            seq_ids=[seq_id for seq_id, drew in zip(self.seq_ids, fine.tolist(), strict=True) if drew],
            token_counts=[1] * int(fine.sum()),
            token_ids=self.tokens.numpy()[fine].tolist(),
            logprobs=logprobs and logprob_columns.select(logprobs, np.flatnonzero(fine).tolist()),
            deferred=[self.seq_ids[at] for at in np.flatnonzero(~self.drawing).tolist()],
            failed=[row for row in told if row[1] == NOT_FINITE],
            undrawable=[row for row in told if row[1] != NOT_FINITE],
            forward_s=seconds,
            step_s=seconds,
        )

    def _seconds(self) -> float:
        """The duration of this step alone. The device computes one step after another."""
        assert self.times.ended is not None, "an output is asked for when its step has ended"
        began = self.times.launched
        if self.before is not None and self.before.ended is not None:
            began = max(began, self.before.ended)
        return max(0.0, self.times.ended - began)


class GPUAsyncDecode(AsyncDecode):
    """Runs steps in which a sequence draws at most one token. Logits stay on the device.

    Each row's last token stays on the device, where the next step reads it. It is also copied to pinned memory of the
    host. The host waits for the copy when it needs the step's output; the next step is launched by then. At most two
    steps are in progress, so the memory of these copies exists twice.

    The mask of a structured row depends on the previous token. So the host waits for that token after it has launched
    the forward pass. It computes the masks while the device runs, and applies them after the forward pass.
    """

    def __init__(self, limits: StepLimits, device: torch.device) -> None:
        self._buffers = InputBuffers(limits, device), InputBuffers(limits, device)
        self._device, max_num_seqs = device, limits.max_num_seqs
        self._sampler = sampler_for(device)
        self._last = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._sampling = [SamplingUploads(max_num_seqs, device) for _ in self._buffers]
        self._rows = [Column((4, max_num_seqs), torch.int64, device) for _ in self._buffers]
        pinned = device.type == "cuda"
        self._tokens = [torch.zeros(max_num_seqs, dtype=torch.int64, pin_memory=pinned) for _ in self._buffers]
        self._peaks = [torch.zeros(2, max_num_seqs, pin_memory=pinned) for _ in self._buffers]
        self._followers: dict[type[LogitsProcessor[Any]], Any] = {
            Penalties: DevicePenalties(max_num_seqs, device),
            BadWords: DeviceBadWords(max_num_seqs, device),
        }
        self._logprobs = DeviceLogprobs(device)
        self._masks: list[DeviceMasks] = []  # created for the first structured row
        self._under_way: deque[AsyncStep] = deque()
        self._owners = np.zeros(max_num_seqs, np.int64)  # how many sequences have had the row
        self._newest = np.full(max_num_seqs, -1, np.int64)  # the step in progress that draws the row's last token
        self._turn, self.has_deferred = 0, False
        self._before: StepTimes | None = None  # of the last launched step

    def compile_at_start(self, vocab_size: int) -> None:
        self._sampler.compile_all(vocab_size, self._device)

    def add(self, row: int) -> None:
        self._owners[row] += 1
        self._newest[row] = -1
        self._forget(row)

    def _forget(self, row: int) -> None:
        for follower in self._followers.values():
            follower.forget(row)

    def takes(self, step: StepBatch, batch: InputBatch) -> bool:
        return bool((step.draws <= 1).all())

    def launch(
        self,
        number: int,
        step: StepBatch,
        batch: InputBatch,
        forward: Forward,
        adapters: Sequence[AdapterRun] = (),
    ) -> Pending:
        while len(self._under_way) > 1:
            self._settle_oldest(batch)
        times = StepTimes(time.perf_counter())
        self._turn ^= 1
        inputs = self._buffers[self._turn].build(step, batch, adapters)
        places = np.flatnonzero(step.draws)
        rows, tokens = self._feed(inputs, step, places)
        hidden = forward.hidden(inputs)
        if len(places) < len(hidden):
            hidden = hidden.index_select(0, tokens)
        drawing = step if len(places) == len(step.rows) else step.take(places)
        started = self._draw(number, drawing, batch, forward.logits(hidden), rows, times)
        self._before = times
        self._note(started, batch)
        return started.output

    def _feed(self, inputs: StepInputs, step: StepBatch, places: Ints) -> tuple[Tensor, Tensor]:
        """Fill in the tokens of the step that only the device has: each is the last of a row with one token.

        Returns the rows of the sequences at ``places`` and the index of their last token in the step, (draws,) each.
        """
        column, alone = self._rows[self._turn], step.rows[step.counts == 1]
        column.host[0, : len(alone)] = alone
        column.host[1, : len(alone)] = self._newest[alone] >= 0
        column.host[2, : len(places)] = step.rows[places]
        column.host[3, : len(places)] = np.cumsum(step.counts)[places] - 1
        uploaded = column.upload(len(column.host))
        fed, on_device = inputs.input_ids[: len(alone)], uploaded[1, : len(alone)].bool()
        fed.copy_(torch.where(on_device, self._last[uploaded[0, : len(alone)]], fed))
        return uploaded[2, : len(places)], uploaded[3, : len(places)]

    def _draw(
        self, number: int, step: StepBatch, batch: InputBatch, logits: Tensor, rows: Tensor, times: StepTimes
    ) -> AsyncStep:
        """Draw a token for each sequence of ``step``. ``rows`` are their rows, on the device."""
        owners = self._owners[step.rows]
        asked = self._logprobs.asked(step.rows, owners, batch)
        raw = self._logprobs.keep(logits) if asked is not None else logits
        peaks = [self._sampler.peaks(logits)]
        changes = self._process(logits, step.rows, batch)
        if changes is not None:
            peaks.append(self._sampler.peaks(logits))
        late, reasons = changes or ([], {})
        drawn = self._sampled(logits, peaks[-1], step, batch)
        for follower in self._followers.values():
            follower.count(drawn)
        self._last[rows] = drawn
        described = self._logprobs.describe(asked, raw, drawn) if asked is not None else None
        count = len(step.rows)
        token_ids, maxima = self._tokens[self._turn][:count], self._peaks[self._turn][: len(peaks), :count]
        token_ids.copy_(drawn, non_blocking=True)
        for place, peak in zip(maxima, peaks, strict=True):
            place.copy_(peak.values, non_blocking=True)
        done = None
        if self._device.type == "cuda":
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        drawing = np.ones(count, np.bool_)
        drawing[late] = False
        positions = batch.num_tokens[step.rows].astype(np.int64)
        about = number, step.seq_ids, step.rows, positions, owners, drawing, reasons, described
        return AsyncStep(*about, token_ids, maxima[0], maxima[-1], done, times, self._before)

    def _note(self, step: AsyncStep, batch: InputBatch) -> None:
        """Record a launched step, whose tokens are not known yet."""
        for row in step.rows[~step.drawing].tolist():
            self.has_deferred = True
            self._forget(row)
        rows = step.rows[step.drawing]
        batch.num_tokens[rows] += 1
        self._newest[rows] = step.number
        self._under_way.append(step)

    def _process(self, logits: Tensor, rows: Ints, batch: InputBatch) -> tuple[list[int], dict[int, str]] | None:
        """Apply the processors of the rows, in order. None if no processor applies.

        Returns the rows of the step that are late, and reasons why rows may have no token to draw.
        """
        if any(isinstance(each, StructuredOutputsProcessor) and each.owned(rows).size for each in batch.processors):
            self.settle(batch)
        plans = [(processor, processor.owned(rows)) for processor in batch.processors if processor.states]
        plans = [plan for plan in plans if plan[1].size]
        late: list[int] = []
        reasons: dict[int, str] = {}
        for processor, positions in plans:
            mine = rows[positions]
            follower = self._followers.get(type(processor))
            if follower is not None:
                if not follower.knows(mine, batch):
                    self.settle(batch)
                follower.apply(logits, positions, mine, batch, processor)
            elif isinstance(processor, StructuredOutputsProcessor):
                self._structure(logits, processor.restrictions(positions, mine, len(rows), batch), batch.vocab_size)
                late = processor.late
                told = ((at, processor.reason(row)) for at, row in zip(positions.tolist(), mine.tolist(), strict=True))
                reasons = {at: reason for at, reason in told if reason is not None}
            else:
                processor.apply(logits, positions, mine, batch)
        return (late, reasons) if plans else None

    def _structure(self, logits: Tensor, restrictions: list[Restriction], vocab_size: int) -> None:
        if not self._masks:
            self._masks = [DeviceMasks(len(self._newest), vocab_size, self._device) for _ in self._buffers]
        if restrictions:
            self._masks[self._turn].apply(logits, restrictions)

    def _sampled(self, logits: Tensor, peaks: Peaks, step: StepBatch, batch: InputBatch) -> Tensor:
        sampling = batch.sampling[step.rows]
        if not (sampling["temperature"] > 0).any():
            return peaks.tokens
        columns = self._sampling[self._turn].upload(sampling, batch.num_tokens[step.rows], batch.vocab_size)
        return self._sampler.draw(logits, peaks, columns)

    def settle(self, batch: InputBatch) -> None:
        while self._under_way:
            self._settle_oldest(batch)

    def _settle_oldest(self, batch: InputBatch) -> None:
        """Wait for the oldest step, and write its tokens to the rows that still have the same sequence."""
        step = self._under_way.popleft()
        step.wait()
        same = (self._owners[step.rows] == step.owners) & step.drawing
        rows = step.rows[same]
        token_ids = step.tokens.numpy()[same]
        batch.token_ids[rows, step.positions[same]] = token_ids
        for processor in batch.processors:
            if processor.states:
                processor.append_tokens(rows, token_ids)
        self._newest[rows[self._newest[rows] == step.number]] = -1
