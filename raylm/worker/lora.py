"""LoRASlots: the loaded LoRA adapters, and the adapter of each row of the batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from raylm.config import LoRAConfig
from raylm.errors import ConfigError, InvalidRequestError
from raylm.messages import NewSequence
from raylm.models import AdapterLimits, CausalLM, adaptable_shapes, read_adapter_with_digest
from raylm.native import AdapterRun
from raylm.worker.attention import StepLimits
from raylm.worker.features import Adapters
from raylm.worker.forward import Forward
from raylm.worker.step_batch import StepBatch

BASE = 0  # the number of the base model: no adapter


class LoRASlots(Adapters):
    """Owns the adapters by their numbers, packed by ``forward``. The engine never uses a number twice."""

    def __init__(self, config: LoRAConfig, model: CausalLM, forward: Forward, max_num_seqs: int) -> None:
        assert config.root is not None
        self._root, self._max_rank = Path(config.root), config.max_rank
        self._shapes, self._dtype = adaptable_shapes(model), model.dtype
        self._forward = forward
        self._packed: dict[int, object] = {}
        self._adapter_of = np.zeros(max_num_seqs, np.int64)

    def load(self, adapter: int, path: str) -> str:
        directory = inside(self._root, path)
        weights, digest = read_adapter_with_digest(directory, self._shapes, self._max_rank, self._dtype)
        self._packed[adapter] = self._forward.pack(weights)
        return digest

    def unload(self, adapter: int) -> None:
        self._packed.pop(adapter, None)

    def add(self, row: int, new: NewSequence) -> None:
        self._adapter_of[row] = new.adapter

    def arrange(self, step: StepBatch) -> StepBatch:
        adapters = self._adapter_of[step.rows]
        if not adapters.any():
            return step
        return step.take(np.lexsort((adapters, step.counts > 1)))

    def runs(self, step: StepBatch) -> list[AdapterRun]:
        """Runs of adjacent tokens with the same adapter. A run is computed as one matrix product."""
        adapters = self._adapter_of[step.rows]
        if not adapters.any():
            return []
        firsts = np.flatnonzero(np.diff(adapters, prepend=-1))
        ends = np.cumsum(step.counts)
        starts = (ends - step.counts)[firsts]
        counts = np.append(starts[1:], ends[-1:]) - starts
        columns = zip(adapters[firsts].tolist(), starts.tolist(), counts.tolist(), strict=True)
        return [AdapterRun(self._packed[adapter], start, count) for adapter, start, count in columns if adapter != BASE]


def create_adapters(config: LoRAConfig, model: CausalLM, forward: Forward, limits: StepLimits) -> Adapters:
    if config.root is None:
        return Adapters()
    if not Path(config.root).is_dir():
        raise ConfigError(f"lora.root: {config.root} is not a directory on the worker's machine.")
    if not model.adaptable:
        raise ConfigError("lora.root: adapters are served for the Llama, Qwen2, Qwen3 and Mistral families only.")
    forward.serve_adapters(AdapterLimits(limits.max_num_tokens, limits.max_num_seqs, config.max_rank))
    return LoRASlots(config, model, forward, limits.max_num_seqs)


def inside(root: Path, asked: str) -> Path:
    """The directory ``asked``, if it lies below ``root`` after all symbolic links are resolved.

    Raises:
        InvalidRequestError: it does not. The message is the same in all cases, so that it reveals nothing of the disk.
    """
    try:
        home, path = root.resolve(strict=True), (root / asked).resolve(strict=True)
        if path != home and path.is_relative_to(home) and path.is_dir():
            return path
    except (OSError, ValueError, RuntimeError):
        pass  # a broken link, a loop of links, or an invalid path
    raise InvalidRequestError("'lora_path' is not a directory below the configured lora.root.", param="lora_path")
