"""The fingerprint of an engine: engines with equal fingerprints give equal requests equal tokens."""

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
    """The fingerprint of a loaded model. ``model`` names its quantization, dtype, layout and attention backend.

    If logits may depend on the other rows of a step (``batch_invariant`` is False), as with torch's matrix products and
    on GPUs, the fingerprint ends with ``_varies`` and guarantees nothing.
    """
    parts = [VERSION, torch.__version__, model, kernels().name if batch_invariant else ""]
    digest = hashlib.sha256("\n".join(parts).encode())
    for name in ("config.json", "quantization_config.json"):
        if (file := checkpoint.path / name).exists():
            digest.update(file.read_bytes())
    for file in checkpoint.weight_files:
        digest.update(f"{file.name} {file.stat().st_size}".encode())
        _sample(file, digest)
    return f"fp_{digest.hexdigest()[:16]}{'' if batch_invariant else VARYING}"


def _sample(file: Path, digest: hashlib._Hash) -> None:
    """Hash evenly spaced pieces of a file, and safetensors' header: reading all of a large model would take minutes."""
    size = file.stat().st_size
    with file.open("rb") as weights:
        if file.suffix == ".safetensors":
            digest.update(weights.read(int.from_bytes(weights.read(8), "little")))
        for piece in range(_PIECES):
            weights.seek(size * piece // _PIECES)
            digest.update(weights.read(_PIECE_BYTES))
