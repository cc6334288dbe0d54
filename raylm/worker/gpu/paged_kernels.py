"""Triton kernels for attention over pages. All tensors are contiguous except the block tables.

They use an online softmax over tiles of keys (Milakov and Gimelshein, "Online normalizer calculation for softmax",
2018). With few rows, the keys are split over programs as in FlashDecoding. Compile-time constants are in capitals.
"""
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from raylm.models import wait_for_previous

_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["table_stride", "num_rows", "window"])
def attend(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    tables: tl.tensor,
    lengths: tl.tensor,
    out: tl.tensor,
    sums: tl.tensor,
    scale: tl.tensor,
    value_scale: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    queries: tl.tensor,
    group: tl.tensor,
    num_kv_heads: tl.tensor,
    head_dim: tl.tensor,
    table_stride: tl.tensor,
    num_rows: tl.tensor,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Attention of ROWS queries of a sequence's key-value head to one of SPLITS parts of their keys.

    ``q`` is (seqs, queries, num_kv_heads, group, head_dim). ``keys`` and ``values`` are (slots, num_kv_heads,
    head_dim), of the same dtype, or fp8 divided by scales; ``scale`` includes the scale of the keys. ``tables`` (seqs,
    table_stride) has blocks of BLOCK slots, ``lengths`` is (seqs,). The queries are the last tokens of a sequence;
    queries before its first token attend to nothing. ``out`` is as ``q``. With several splits ``out`` is (SPLITS,
    num_rows, head_dim) float32, and ``sums`` (SPLITS, num_rows) are base-2 logarithms of the sums of exponentials.
    """
    seq, kv_head = tl.program_id(1) // num_kv_heads, tl.program_id(1) % num_kv_heads
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    query, column = row // group, tl.arange(0, DIM)
    is_column = column < head_dim
    place = (seq.to(tl.int64) * queries + query) * num_kv_heads * group + kv_head * group + row % group
    is_row = query < queries
    length = tl.load(lengths + seq)
    position = length - queries + query
    first = tl.program_id(0) * ROWS // group
    last = tl.minimum((tl.program_id(0) * ROWS + ROWS - 1) // group, queries - 1)
    end = tl.maximum(length - queries + last + 1, 0)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(length - queries + first - window + 1, 0) // KEYS * KEYS
    share = tl.cdiv(tl.cdiv(end - begin, KEYS), SPLITS) * KEYS
    low = begin + tl.program_id(2) * share
    wait_for_previous(EARLY)  # for the queries and the newest keys; the lengths and tables are older
    rows = tl.load(
        q + place[:, None] * head_dim + column[None, :], mask=is_row[:, None] & is_column[None, :], other=0.0
    )
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIM], tl.float32)
    for start in range(low, tl.minimum(low + share, end), KEYS):
        block = tl.load(tables + seq.to(tl.int64) * table_stride + start // BLOCK).to(tl.int64)
        at = start + tl.arange(0, KEYS)
        there = at < end
        slot = (block * BLOCK + start % BLOCK + tl.arange(0, KEYS)) * num_kv_heads + kv_head
        key = tl.load(
            keys + slot[None, :] * head_dim + column[:, None], mask=there[None, :] & is_column[:, None], other=0.0
        )
        scores = tl.dot(rows, key.to(rows.dtype), input_precision="ieee") * scale
        if HAS_SOFTCAP:
            scores = softcap - 2.0 * softcap / (tl.exp2(scores * (2.0 * _LOG2_E / softcap)) + 1.0)  # tanh
        seen = there[None, :] & (at[None, :] <= position[:, None])
        if HAS_WINDOW:
            seen = seen & (at[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores * _LOG2_E, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.sum(weights, 1)
        value = tl.load(
            values + slot[:, None] * head_dim + column[None, :], mask=there[:, None] & is_column[None, :], other=0.0
        )
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(rows.dtype), value.to(rows.dtype), input_precision="ieee")
        peak = higher
    mixed = mixed / tl.where(total > 0.0, total, 1.0)[:, None] * value_scale
    if SPLITS > 1:
        place += tl.program_id(2).to(tl.int64) * num_rows
        tl.store(sums + place, tl.where(total > 0.0, peak + tl.log2(total), float("-inf")), mask=is_row)
    target = out + place[:, None] * head_dim + column[None, :]
    tl.store(target, mixed.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def merge(
    parts: tl.tensor,
    sums: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    head_dim: tl.tensor,
    SPLITS: tl.constexpr,
    DIM: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Merge the results of the splits of ``attend`` for one row of ``out`` (num_rows, head_dim)."""
    wait_for_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    split, column = tl.arange(0, SPLITS), tl.arange(0, DIM)
    place = split.to(tl.int64) * num_rows + row
    found = tl.load(sums + place)
    peak = tl.max(found, 0)
    weights = tl.exp2(found - tl.where(peak == float("-inf"), 0.0, peak))
    is_column = column < head_dim
    values = tl.load(parts + place[:, None] * head_dim + column[None, :], mask=is_column[None, :], other=0.0)
    total = tl.sum(weights, 0)
    merged = tl.sum(values * weights[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out + row * head_dim + column, merged.to(out.dtype.element_ty), mask=is_column)
