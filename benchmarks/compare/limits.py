"""The best possible figures of this machine and a checkpoint, from the measured read bandwidth and GEMM peak.

    python -m benchmarks.compare.limits [THREADS]     measures, prints one JSON object

A bound counts only necessary work. Each step reads every weight of the matrices once, and the keys and values of its
sequences. Each token costs two operations per weight, and its attention. A step takes the longer of the two times.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGUFReader

from raylm.checkpoint import resolve

RUNS = 7
READ_BYTES, GEMM_SIZE = 1 << 30, 4096


@dataclass(frozen=True)
class Limits:
    """The machine's limits: bytes per second read from memory, and operations per second in a bf16 GEMM."""

    read: float
    gemm: float

    def __str__(self) -> str:
        return f"{self.read / 1e9:.1f} GB/s read, {self.gemm / 1e12:.2f} TFLOP/s bf16 GEMM"


@dataclass(frozen=True)
class Shape:
    """The sizes of a model: weights in the decoder's matrices and in the head, and the cost of attention per token."""

    layer_weights: int
    head_weights: int
    attention_size: int  # layers x query heads x head_dim
    kv_size: int  # layers x key-value heads x head_dim x 2
    bytes_each: float = 2.0

    @property
    def decode_bytes(self) -> float:
        """Bytes of weights that a decode step reads."""
        return self.bytes_each * (self.layer_weights + self.head_weights)


def read_shape(model: Path) -> Shape:
    """Read the shape of a checkpoint's directory or of a GGUF file."""
    checkpoint = resolve(str(model))
    config = checkpoint.config
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    head = config["vocab_size"] * config["hidden_size"]
    files, size = checkpoint.weight_files, 2.0
    if checkpoint.gguf is None:
        matrices = sum(_weights(shape) for file in files for shape in _matrix_shapes(file))
    else:
        matrices, size = _matrices_of_gguf(files)
    return Shape(
        layer_weights=matrices,
        head_weights=head,
        attention_size=layers * heads * head_dim,
        kv_size=2 * layers * config.get("num_key_value_heads", heads) * head_dim,
        bytes_each=size,
    )


def _matrix_shapes(file: Path) -> list[list[int]]:
    """Shapes of the matrices in a safetensors file, without embedding and head."""
    with file.open("rb") as opened:
        header: dict[str, Any] = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    return [
        entry["shape"]
        for name, entry in header.items()
        if name != "__metadata__" and len(entry["shape"]) == 2 and "embed_tokens" not in name and "lm_head" not in name
    ]


def _matrices_of_gguf(files: list[Path]) -> tuple[int, float]:
    """The weights in the decoder's matrices, and the bytes of one of them."""
    tensors = [tensor for file in files for tensor in GGUFReader(file).tensors]
    found = [tensor for tensor in tensors if tensor.name.startswith("blk.") and len(tensor.shape) == 2]
    weights = sum(int(tensor.n_elements) for tensor in found)
    return weights, sum(int(tensor.n_bytes) for tensor in found) / weights


def _weights(shape: list[int]) -> int:
    return shape[0] * shape[1]


def phase_seconds(
    limits: Limits, shape: Shape, tokens: int, rows: int, seen: float, held: float
) -> dict[str, tuple[float, float]]:
    """The least time of the linear layers and of attention in one step: (for operations, for memory reads), in seconds.

    Args:
        tokens: Tokens computed in this step. ``rows`` of them get logits.
        seen: Average number of tokens that each of them attends to.
        held: Tokens whose keys and values are read, over all sequences.
    """
    products = 2 * tokens * shape.layer_weights + 2 * rows * shape.head_weights
    attention = 4 * tokens * seen * shape.attention_size
    return {
        "linear": (products / limits.gemm, shape.decode_bytes / limits.read),
        "attention": (attention / limits.gemm, 2.0 * held * shape.kv_size / limits.read),
    }


def step_seconds(limits: Limits, shape: Shape, tokens: int, rows: int, seen: float, held: float) -> float:
    """The bound for one step whose phases overlap as if they were one; arguments as of phase_seconds."""
    phases = phase_seconds(limits, shape, tokens, rows, seen, held).values()
    return max(sum(computing for computing, _ in phases), sum(reading for _, reading in phases))


def prefill_seconds(limits: Limits, shape: Shape, prompts: int, tokens: int, cached: int = 0) -> float:
    """The bound for computing ``prompts`` prompts in one step, if ``cached`` tokens of each are in the cache."""
    return step_seconds(limits, shape, prompts * tokens, prompts, cached + tokens / 2, cached)


def decode_seconds(limits: Limits, shape: Shape, rows: int, start: int, steps: int, shared: int = 0) -> float:
    """The bound for ``steps`` decode steps of ``rows`` sequences of ``start`` tokens, ``shared`` of them common."""
    length = start + steps / 2
    return steps * step_seconds(limits, shape, rows, rows, length, shared + rows * (length - shared))


def bounds(limits: Limits, shape: Shape, concurrency: Sequence[int]) -> dict[tuple[str, str], float]:
    """The best possible figure of the machine, by (workload, figure). Serving has a figure for each concurrency."""
    batch = prefill_seconds(limits, shape, 32, 128) + decode_seconds(limits, shape, 32, 128, 127)
    shared = prefill_seconds(limits, shape, 32, 32, 512) + decode_seconds(limits, shape, 32, 544, 31, 512)
    found = {
        ("W1", "out_tok_s"): 32 * 128 / batch,
        ("W2", "ttft_ms"): 1e3 * prefill_seconds(limits, shape, 1, 128),
        ("W2", "ms_per_token"): 1e3 * decode_seconds(limits, shape, 1, 128, 127) / 127,
        ("W4", "out_tok_s"): 32 * 32 / shared,
        ("W5", "ttft_ms"): 1e3 * prefill_seconds(limits, shape, 1, 2048),
    }
    for clients in concurrency:
        wave = prefill_seconds(limits, shape, clients, 128) + decode_seconds(limits, shape, clients, 128, 63)
        found["HTTP", f"out_tok_s at {clients}"] = clients * 64 / wave
    return found


def measure(threads: int) -> Limits:
    """Measure with torch a sum over 1 GiB and a 4096-cubed bf16 GEMM.

    Takes the best run, because other load only slows it.
    """
    import torch

    torch.set_num_threads(threads)
    numbers = torch.ones(READ_BYTES // 4)
    read = READ_BYTES / _seconds(numbers.sum)
    del numbers
    left, right = (torch.randn(GEMM_SIZE, GEMM_SIZE).bfloat16() for _ in range(2))
    return Limits(read, 2 * GEMM_SIZE**3 / _seconds(lambda: left @ right))


def _seconds(work: Callable[[], object]) -> float:
    work()
    found = []
    for _ in range(RUNS):
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return min(found)


def main() -> None:
    found = measure(int(sys.argv[1]))
    print(json.dumps({"read": found.read, "gemm": found.gemm}))


if __name__ == "__main__":
    main()
