"""Worker: LoRASlots, which owns the loaded LoRA adapters and knows which row of the batch uses which."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from raylm.config import LoRAConfig
from raylm.errors import ConfigError, InvalidRequestError
from raylm.messages import NewSequence
from raylm.models import AdapterRun, CausalLM, ModuleAdapter, adaptable_shapes, read_adapter
from raylm.native import PackedAdapter
from raylm.worker.forward import Forward
from raylm.worker.step_batch import StepBatch

BASE = 0  # the adapter of a row that has none


class Adapters(ABC):
    """What a step needs to know of adapters. ``load`` and ``unload`` may come from another thread than the steps."""

    @abstractmethod
    def load(self, adapter: int, path: str) -> None:
        """Read an adapter from a directory and bring it into the form that the forward pass reads.

        Raises:
            InvalidRequestError: it cannot be served; says why.
        """

    @abstractmethod
    def unload(self, adapter: int) -> None:
        """Let go of an adapter that no step will use any more."""

    @abstractmethod
    def add(self, row: int, new: NewSequence) -> None:
        """The row belongs to another sequence from now on."""

    @abstractmethod
    def arrange(self, step: StepBatch) -> StepBatch:
        """The step with sequences of the same adapter side by side; those with one token still come first."""

    @abstractmethod
    def runs(self, step: StepBatch) -> list[AdapterRun]:
        """Which tokens of the step have an adapter."""


class NoAdapters(Adapters):
    """The base model alone."""

    def load(self, adapter: int, path: str) -> None:
        """Refuse.

        Raises:
            InvalidRequestError: always.
        """
        raise InvalidRequestError(
            "This server serves no LoRA adapters; lora.root names no directory.", param="lora_path"
        )

    def unload(self, adapter: int) -> None:
        """There is none."""

    def add(self, row: int, new: NewSequence) -> None:
        """Nothing to know."""

    def arrange(self, step: StepBatch) -> StepBatch:
        """The step itself."""
        return step

    def runs(self, step: StepBatch) -> list[AdapterRun]:
        """None."""
        return []


class LoRASlots(Adapters):
    """The adapters by the numbers that the engine gave them, packed by ``forward``."""

    def __init__(self, config: LoRAConfig, model: CausalLM, forward: Forward, max_num_seqs: int) -> None:
        assert config.root is not None
        self._root, self._max_rank = Path(config.root), config.max_rank
        self._shapes = adaptable_shapes(model)
        self._forward = forward
        self._packed: dict[int, ModuleAdapter | PackedAdapter] = {}
        self._adapter_of = np.zeros(max_num_seqs, np.int64)

    def load(self, adapter: int, path: str) -> None:
        """Read, check and pack it beside the steps that run; a number is never given twice."""
        weights = read_adapter(inside(self._root, path), self._shapes, self._max_rank)
        self._packed[adapter] = self._forward.pack(weights)

    def unload(self, adapter: int) -> None:
        """Let go of its weights; the engine sees to it that no row uses them."""
        self._packed.pop(adapter, None)

    def add(self, row: int, new: NewSequence) -> None:
        """Note the sequence's adapter."""
        self._adapter_of[row] = new.adapter

    def arrange(self, step: StepBatch) -> StepBatch:
        """Sort by adapter, which makes a product of each run instead of each row."""
        adapters = self._adapter_of[step.rows]
        if not adapters.any():
            return step
        return step.take(np.lexsort((adapters, step.counts > 1)))

    def runs(self, step: StepBatch) -> list[AdapterRun]:
        """Neighbours with the same adapter are one run."""
        adapters = self._adapter_of[step.rows]
        if not adapters.any():
            return []
        firsts = np.flatnonzero(np.diff(adapters, prepend=-1))
        ends = np.cumsum(step.counts)
        starts = (ends - step.counts)[firsts]
        counts = np.append(starts[1:], ends[-1:]) - starts
        return self._as_runs(adapters[firsts], starts, counts)

    def _as_runs(
        self, adapters: NDArray[np.int64], starts: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> list[AdapterRun]:
        columns = zip(adapters.tolist(), starts.tolist(), counts.tolist(), strict=True)
        return [AdapterRun(self._packed[adapter], start, count) for adapter, start, count in columns if adapter != BASE]


def create_adapters(config: LoRAConfig, model: CausalLM, forward: Forward, max_num_seqs: int) -> Adapters:
    """The adapters that the configuration allows.

    Raises:
        ConfigError: the model cannot have any, or their root is no directory.
    """
    if config.root is None:
        return NoAdapters()
    if not Path(config.root).is_dir():
        raise ConfigError(f"lora.root: {config.root} is no directory on the machine of the worker.")
    if not model.adaptable:
        raise ConfigError("lora.root: adapters are served for the Llama, Qwen2, Qwen3 and Mistral families only.")
    forward.serve_adapters()
    return LoRASlots(config, model, forward, max_num_seqs)


def inside(root: Path, asked: str) -> Path:
    """The directory ``asked`` for, which must lie below ``root`` when every symbolic link is followed.

    Raises:
        InvalidRequestError: it does not, or is no directory; both sound alike, so that nobody explores the disk.
    """
    try:
        home, path = root.resolve(strict=True), (root / asked).resolve(strict=True)
        if path != home and path.is_relative_to(home) and path.is_dir():
            return path
    except (OSError, ValueError, RuntimeError):
        pass  # a broken link, a loop of links, or no path at all: as if it were not there
    raise InvalidRequestError("'lora_path' names no directory below the configured lora.root.", param="lora_path")
