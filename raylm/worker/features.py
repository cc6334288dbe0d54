"""What a step may have beside its forward pass and its draw: draft tokens, asynchronous decoding, LoRA adapters.

Each class is the interface of a feature and does nothing itself: it stands where the feature is off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from raylm.messages import ModelRunnerOutput, NewSequence
from raylm.native import AdapterRun
from raylm.worker.forward import Forward
from raylm.worker.input_batch import InputBatch
from raylm.worker.step_batch import StepBatch

Pending = Callable[[], ModelRunnerOutput]  # waits for a step's output, on any thread


class Speculator:
    """Adds draft tokens to the rows of a step; whether they were right is seen by the draw, never trusted.

    A draft counts if it is the token that the sampler draws at its position, from the logits and the random numbers of
    that position. So the tokens are the same with any speculator and with none, greedy and sampled.
    """

    def add(self, row: int, new: NewSequence) -> None:
        """Another sequence has the row from now on."""

    def remove(self, row: int, batch: InputBatch) -> None:
        """The sequence of the row has ended, or was preempted."""

    def propose(self, step: StepBatch, batch: InputBatch) -> StepBatch:
        """The step with drafts, which are written behind the known tokens of ``batch``, and without finished rows."""
        return step

    def observe(self, step: StepBatch, seconds: float) -> None:
        """Take note of how long a step took."""


class AsyncDecode:
    """Runs steps without the host waiting for what they draw; one of them ``has_deferred`` if a row sat it out."""

    has_deferred = False

    def add(self, row: int) -> None:
        """The row belongs to another sequence from now on."""

    def takes(self, step: StepBatch, batch: InputBatch) -> bool:
        """Whether the step can run this way."""
        return False

    def launch(
        self, number: int, step: StepBatch, batch: InputBatch, forward: Forward, adapters: Sequence[AdapterRun] = ()
    ) -> Pending:
        """Start a step that it takes."""
        raise AssertionError("it takes no step")

    def settle(self, batch: InputBatch) -> None:
        """Wait until all tokens are known to the host; steps of other kinds need them."""


class Adapters:
    """The LoRA adapters. ``load`` and ``unload`` may come from another thread than the steps."""

    def load(self, adapter: int, path: str) -> str:
        """Read an adapter from a directory and bring it into the form that the forward pass reads.

        Returns the digest of its content.

        Raises:
            InvalidRequestError: it cannot be served; says why.
        """
        raise AssertionError("the engine loads no adapters without lora.root")

    def unload(self, adapter: int) -> None:
        """Let go of an adapter that no step will use any more."""

    def add(self, row: int, new: NewSequence) -> None:
        """The row belongs to another sequence from now on."""

    def arrange(self, step: StepBatch) -> StepBatch:
        """The step with sequences of the same adapter side by side; those with one token still come first."""
        return step

    def runs(self, step: StepBatch) -> list[AdapterRun]:
        """Which tokens of the step have an adapter."""
        return []
