"""The sizes that batches are padded to, so that few kernels are compiled and few graphs captured."""

from __future__ import annotations

from raylm.worker.attention import StepLimits

_FINE = 64  # up to here the sizes double, from here on they grow by as much
_NARROWEST = 1024  # tokens that the narrowest block tables span
_WIDER = 4
_MOST_TOKENS = 2048  # of a step with prompts that is padded; larger ones take longer than launching their kernels does


def bucket(count: int) -> int:
    """The smallest size from ``count`` (at least 1) on: 1, 2, 4, .. 64, 128, 192, ..

    A decoding step reads the same weights for 33 sequences and for 64, so coarse steps cost little; and 64 more than
    needed are at most half as many again from 128 on.
    """
    if count > _FINE:
        return -(-count // _FINE) * _FINE
    return 1 << (count - 1).bit_length()


def buckets(most: int) -> list[int]:
    """All sizes up to the one for ``most``, rising."""
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(bucket(sizes[-1] + 1))
    return sizes


def token_bucket(tokens: int) -> int:
    """The smallest size from ``tokens`` on: 64, 128, .. 512, 640, .. 1024, 1280, .. 2048."""
    step = max(_FINE, (1 << (tokens - 1).bit_length()) >> 3)
    return -(-tokens // step) * step


def token_buckets(limits: StepLimits) -> list[int]:
    """All sizes of steps with prompts that are padded, rising."""
    most = min(limits.max_num_tokens, _MOST_TOKENS)
    return sorted({token_bucket(tokens) for tokens in range(1, most + 1)})


def table_widths(limits: StepLimits) -> list[int]:
    """All widths of tables that there are, rising."""
    widths: list[int] = []
    spanned = _NARROWEST
    while not widths or widths[-1] < limits.max_blocks:
        widths.append(table_width(spanned, limits))
        spanned *= _WIDER
    return widths


def table_width(tokens: int, limits: StepLimits) -> int:
    """How many blocks wide tables for sequences of up to ``tokens`` are: for 1024 tokens, 4096, .. or all there are."""
    spanned = _NARROWEST
    while spanned < tokens:
        spanned *= _WIDER
    return min(-(-spanned // limits.block_size), limits.max_blocks)
