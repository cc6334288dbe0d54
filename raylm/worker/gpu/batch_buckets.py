"""The sizes that batches are padded to, to limit the number of compiled kernels and captured graphs."""

from __future__ import annotations

from raylm.worker.attention import StepLimits

_FINE = 64  # sizes double up to this size, and then increase by it
_NARROWEST = 1024  # tokens of the narrowest block tables
_WIDER = 4
_MOST_TOKENS = 2048  # of a padded step with prompts; in a larger step, computing takes longer than launching kernels


def bucket(count: int) -> int:
    """The smallest size that is at least ``count`` (at least 1): 1, 2, 4, .. 64, 128, 192, ..

    A decoding step reads the same weights for 33 and for 64 sequences, so large increments cost little. Above 128, at
    most half of the padded size is padding.
    """
    if count > _FINE:
        return -(-count // _FINE) * _FINE
    return 1 << (count - 1).bit_length()


def buckets(most: int) -> list[int]:
    """All sizes up to the size for ``most``, ascending."""
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(bucket(sizes[-1] + 1))
    return sizes


def token_bucket(tokens: int) -> int:
    """The smallest size that is at least ``tokens``: 64, 128, .. 512, 640, .. 1024, 1280, .. 2048."""
    step = max(_FINE, (1 << (tokens - 1).bit_length()) >> 3)
    return -(-tokens // step) * step


def token_buckets(limits: StepLimits) -> list[int]:
    """All sizes of padded steps with prompts, ascending."""
    most = min(limits.max_num_tokens, _MOST_TOKENS)
    return sorted({token_bucket(tokens) for tokens in range(1, most + 1)})


def table_widths(limits: StepLimits) -> list[int]:
    """All widths of block tables, ascending."""
    widths: list[int] = []
    spanned = _NARROWEST
    while not widths or widths[-1] < limits.max_blocks:
        widths.append(table_width(spanned, limits))
        spanned *= _WIDER
    return widths


def table_width(tokens: int, limits: StepLimits) -> int:
    """The width in blocks of tables for sequences of up to ``tokens``: for 1024 tokens, 4096, .. or the maximum."""
    spanned = _NARROWEST
    while spanned < tokens:
        spanned *= _WIDER
    return min(-(-spanned // limits.block_size), limits.max_blocks)
