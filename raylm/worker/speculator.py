"""Worker: the Speculator family, which guesses the tokens that a step verifies beside the one it computes anyway."""

from __future__ import annotations

from abc import ABC, abstractmethod

from raylm.worker.input_batch import InputBatch
from raylm.worker.step_rows import StepRows


class Speculator(ABC):
    """Adds guesses to the rows of a step; whether they were right is seen by the draw, never trusted.

    A guess counts if it is the token that the sampler draws at its position, from the logits and the random numbers of
    that position. So the tokens are the same with any speculator and with none, greedy and sampled.
    """

    @abstractmethod
    def add(self, row: int) -> None:
        """The row belongs to another sequence from now on."""

    @abstractmethod
    def lay_out(self, step: StepRows, batch: InputBatch) -> StepRows:
        """The step with guesses, which are written behind the known tokens of ``batch``, and without finished rows."""

    @abstractmethod
    def observe(self, step: StepRows, seconds: float) -> None:
        """Take note of how long a step took."""


class NoSpeculation(Speculator):
    """No guesses: every step runs as it was planned."""

    def add(self, row: int) -> None:
        """Nothing to know."""

    def lay_out(self, step: StepRows, batch: InputBatch) -> StepRows:
        """The step itself."""
        return step

    def observe(self, step: StepRows, seconds: float) -> None:
        """Nothing to learn."""
