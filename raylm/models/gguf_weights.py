"""Reads weights from GGUF files, one tensor at a time: dequantized by the ``gguf`` package, or as they are stored."""

from __future__ import annotations

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from raylm.checkpoint import Checkpoint
from raylm.errors import ConfigError
from raylm.models.gguf_names import named_tensors

# The types whose dequantization is tested.
_FLOATS = frozenset({"F32", "F16", "BF16"})
KINDS = _FLOATS | frozenset({
    "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
})  # fmt: skip
_CHUNK = 2**22  # values that are dequantized at once


class GgufWeights:
    """The weights of a model in GGUF files, by their names in a Hugging Face checkpoint.

    Raises:
        ConfigError: a tensor has a type that is not served.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        assert checkpoint.gguf is not None
        self.tensors = named_tensors(checkpoint)
        for tensor in self.tensors.values():
            served = KINDS if len(tensor.shape) > 1 else _FLOATS
            if tensor.kind not in served:
                what = f"{tensor.name} of {checkpoint} has the type {tensor.kind}"
                raise ConfigError(f"model: {what}; served: {', '.join(sorted(served))}.")
        self._parts = checkpoint.gguf.parts
        self._mapped: dict[int, np.memmap[tuple[int], np.dtype[np.uint8]]] = {}
        self._heads: dict[str, int] = {}
        if checkpoint.config["model_type"] == "llama":
            config = checkpoint.config
            self._heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        self._shifted = checkpoint.config["model_type"] == "gemma3_text"

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """The weight ``name``, dequantized and rounded to ``dtype``, in the order of a Hugging Face checkpoint."""
        tensor = self.tensors[name]
        rows = self._rows(name)
        out = torch.empty(tensor.shape, dtype=dtype)
        flat = out.reshape(len(rows), -1)
        step = max(1, _CHUNK // max(1, flat.shape[1]))
        for start in range(0, len(rows), step):
            values = torch.from_numpy(dequantized(tensor.kind, rows[start : start + step]))
            flat[start : start + step] = values - 1 if self._shifted and name.endswith("norm.weight") else values
        return out

    def blocks(self, name: str) -> Tensor:
        """The stored bytes of a weight, (rows, bytes of a row), in the order of a Hugging Face checkpoint."""
        return torch.from_numpy(np.array(self._rows(name)))

    def _rows(self, name: str) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
        """The stored bytes, a row of the weight a line; of a vector, a value a line."""
        tensor = self.tensors[name]
        if tensor.part not in self._mapped:
            self._mapped[tensor.part] = np.memmap(self._parts[tensor.part], np.uint8, "r")
        stored = self._mapped[tensor.part][tensor.offset : tensor.offset + tensor.nbytes]
        rows = np.asarray(stored).reshape(max(1, tensor.shape[0]), -1)
        module = name.rpartition(".")[0].rpartition(".")[2]
        return rows[_order(len(rows), self._heads[module])] if module in self._heads else rows


def dequantized(
    kind: str, rows: np.ndarray[tuple[int, int], np.dtype[np.uint8]]
) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """(rows, bytes) of a type of ggml -> (rows, values) float32, as the ``gguf`` package dequantizes them."""
    found = dequantize(np.ascontiguousarray(rows), GGMLQuantizationType[kind])
    return np.array(found.reshape(len(rows), -1))


def _order(rows: int, heads: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The rows of q or k in the order of Hugging Face: llama.cpp has the two halves of a head in turns."""
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
