"""Worker: what is told when the memory of a GPU does not suffice: what was asked for, what there is, what would fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from raylm.checkpoint import Checkpoint
from raylm.errors import ConfigError
from raylm.worker.attention import StepLimits
from raylm.worker.cgroup import available_memory

_GIB = 1 << 30
_FEWEST_TOKENS = 16


@contextmanager
def loading(checkpoint: Checkpoint, device: torch.device) -> Iterator[None]:
    """Under it the weights are loaded.

    Raises:
        ConfigError: the device cannot hold them.
    """
    free = _free(device)
    try:
        yield
    except torch.OutOfMemoryError as error:
        files = sum(file.stat().st_size for file in checkpoint.path.glob("*.safetensors"))
        raise ConfigError(
            f"model: its weights take {files / _GIB:.1f} GiB as they lie in {checkpoint.path}, and {device} had "
            f"{free / _GIB:.1f} GiB free. A smaller model, or a quantized one, would fit."
        ) from error


def largest_step(run: Callable[[StepLimits], int], limits: StepLimits) -> int:
    """What ``run`` returns for a step of these limits, bytes of memory.

    Raises:
        ConfigError: there is not enough; it names a step that fits, found by trying.
    """
    try:
        return run(limits)
    except torch.OutOfMemoryError as error:
        cause = error.with_traceback(None)  # its frames would keep what smaller steps need
    fitting = _fitting(run, limits)
    raise ConfigError(
        f"scheduler.max_num_batched_tokens: a step of {limits.max_num_tokens} tokens does not fit into the memory "
        f"that the weights leave; {f'{fitting} tokens do' if fitting else 'nor does any smaller one'}."
    ) from cause


def _fitting(run: Callable[[StepLimits], int], limits: StepLimits) -> int | None:
    """The largest half, quarter, .. of a step that fits."""
    tokens = limits.max_num_tokens // 2
    while tokens >= _FEWEST_TOKENS:
        try:
            run(replace(limits, max_num_tokens=tokens, max_num_seqs=min(limits.max_num_seqs, tokens)))
        except torch.OutOfMemoryError:
            tokens //= 2
        else:
            return tokens
    return None


def _free(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
