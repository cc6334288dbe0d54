"""Interfaces of optional features of a step: drafts, asynchronous decoding, LoRA adapters, stages of a pipeline.

Each class is the interface of a feature and does nothing itself. It is used when the feature is off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from raylm.messages import ModelRunnerOutput, NewSequence
from raylm.native import AdapterRun
from raylm.worker.arrays import Ints
from raylm.worker.forward import Forward
from raylm.worker.input_batch import InputBatch
from raylm.worker.input_buffers import StepInputs
from raylm.worker.step_batch import StepBatch

Pending = Callable[[], ModelRunnerOutput]  # waits for a step's output, on any thread


class Speculator:
    """Adds draft tokens to the rows of a step. Every draft is verified by sampling.

    A draft is accepted if the sampler draws the same token from the logits and random numbers of its position. So the
    tokens are the same with any speculator and without one, for greedy and random sampling.
    """

    def add(self, row: int, new: NewSequence) -> None:
        """Assign the row to a new sequence."""

    def remove(self, row: int, batch: InputBatch) -> None:
        """Called when the sequence of the row has ended or was preempted."""

    def propose(self, step: StepBatch, batch: InputBatch) -> StepBatch:
        """The step with drafts and without finished rows. Drafts are written after the known tokens of ``batch``."""
        return step

    def observe(self, step: StepBatch, seconds: float) -> None:
        """Record the time of a step."""


class AsyncDecode:
    """Runs steps without waiting for their tokens on the host.

    ``has_deferred`` says that a row has skipped its draw in some step so far.
    """

    has_deferred = False

    def compile_at_start(self, vocab_size: int) -> None:
        """Compile the kernels that draw tokens."""

    def add(self, row: int) -> None:
        """The row belongs to another sequence from now on."""

    def takes(self, step: StepBatch, batch: InputBatch) -> bool:
        """Whether the step can run asynchronously."""
        return False

    def launch(
        self, number: int, step: StepBatch, batch: InputBatch, forward: Forward, adapters: Sequence[AdapterRun] = ()
    ) -> Pending:
        """Start a step for which ``takes`` is true."""
        raise AssertionError("it takes no step")

    def settle(self, batch: InputBatch) -> None:
        """Wait until the host knows all tokens. Steps of other kinds need them."""


class Adapters:
    """The LoRA adapters of a worker. ``load`` and ``unload`` may be called on another thread than the steps."""

    def load(self, adapter: int, path: str) -> str:
        """Read an adapter from a directory and convert it to the form of the forward pass.

        Returns the digest of the adapter's content.

        Raises:
            InvalidRequestError: the adapter cannot be served; the message says why.
        """
        raise AssertionError("the engine loads no adapters without lora.root")

    def unload(self, adapter: int) -> None:
        """Unload an adapter. No later step may use it."""

    def add(self, row: int, new: NewSequence) -> None:
        """The row belongs to another sequence from now on."""

    def arrange(self, step: StepBatch) -> StepBatch:
        """The step with sequences of the same adapter adjacent. Sequences with one token still come first."""
        return step

    def runs(self, step: StepBatch) -> list[AdapterRun]:
        """The runs of the step's tokens that use an adapter."""
        return []


class Pipeline:
    """The stages that a model is divided into, as one of their workers sees them.

    The last stage draws. Every other one needs the drawn tokens, because its sequences continue with them; the first
    stage computes their embeddings. ``waited_s`` is the time spent waiting for other stages so far, in seconds.
    ``has_deferred`` says that a row has skipped its draw in some step so far.
    """

    is_last = True
    has_deferred = False
    waited_s = 0.0

    def remove(self, row: int) -> None:
        """The sequence of the row has ended or was preempted. Its tokens still on their way are dropped."""

    def settle(self, step: StepBatch, batch: InputBatch) -> None:
        """Before the last stage, wait for the tokens that the rows of the step have drawn in earlier steps."""

    def begin(self, inputs: StepInputs, forward: Forward) -> StepInputs:
        """Wait for the stream of the stage before."""
        return inputs

    def end(self, stream: Tensor, step: StepBatch) -> None:
        """Before the last stage, pass the result of a step to the next stage."""
        raise AssertionError("no stage follows")

    def tell(self, token_ids: Ints) -> None:
        """On the last stage, tell the stages before which tokens a step has drawn, LATE for rows that skipped it."""
