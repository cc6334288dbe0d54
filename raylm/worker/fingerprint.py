"""The fingerprint of what an engine computes with: of two that are equal, equal requests get equal tokens."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from raylm.checkpoint import Checkpoint
from raylm.native import kernels
from raylm.version import VERSION

VARYING = "_varies"
_PIECES, _PIECE_BYTES = 64, 4096


def fingerprint(checkpoint: Checkpoint, model: str, *, batch_invariant: bool) -> str:
    """Of a loaded model, whose quantization, dtype, layout and attention ``model`` names.

    Where a position's logits may depend on what stands beside it in a step (``batch_invariant`` is False), as they do
    in torch's own products and on GPUs, it ends with ``_varies``: then it promises nothing.
    """
    parts = [VERSION, torch.__version__, model, kernels().name if batch_invariant else ""]
    digest = hashlib.sha256("\n".join(parts).encode())
    for name in ("config.json", "quantization_config.json"):
        if (file := checkpoint.path / name).exists():
            digest.update(file.read_bytes())
    for file in sorted(checkpoint.path.glob("*.safetensors")):
        digest.update(f"{file.name} {file.stat().st_size}".encode())
        _sample(file, digest)
    return f"fp_{digest.hexdigest()[:16]}{'' if batch_invariant else VARYING}"


def _sample(file: Path, digest: hashlib._Hash) -> None:
    """The header and pieces at even distances: all of a large model would be read for minutes."""
    size = file.stat().st_size
    with file.open("rb") as weights:
        digest.update(weights.read(int.from_bytes(weights.read(8), "little")))
        for piece in range(_PIECES):
            weights.seek(size * piece // _PIECES)
            digest.update(weights.read(_PIECE_BYTES))
