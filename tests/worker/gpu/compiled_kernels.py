"""The kernels, compiled for six kinds of GPUs.

test_compiled.py runs this in a separate process, because xformers looks for triton when it is imported.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from triton.compiler.errors import CompilationError

from raylm.models import FP8, AttentionSpec
from raylm.models.elementwise import HeadWeights, KVPlaces
from raylm.models.gpu import elementwise, row_product
from raylm.models.gpu.elementwise import TritonElementwise
from raylm.models.gpu.experts import TritonExperts
from raylm.models.gpu.fp8 import Fp8BlocksLinear, round_rows
from raylm.models.gpu.int4 import Int4Linear
from raylm.models.gpu.low_rank import GroupedLowRank
from raylm.models.linear import Linear, dense
from raylm.models.lora import AdapterLimits
from raylm.native import Int4Weight
from raylm.worker.attention import AttentionMetadata, StepLimits
from raylm.worker.gpu.device_sampler import SamplingColumns, TritonSampler
from raylm.worker.gpu.split_k import Pages, SplitK, queries_per_tile
from raylm.worker.gpu.tiled import TiledBackend
from raylm.worker.gpu.triton_attention import Fp8PagedAttention, Fp8TritonBackend, PagedAttention, TritonBackend
from raylm.worker.gpu.xformers import XformersBackend
from tests.worker.gpu.ahead_of_time import SHARED, Compiled, asking, compiling

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",  # xformers' kernel is made for an older triton than torch needs
    "ignore:tl.make_block_ptr is deprecated",
)

CPU = torch.device("cpu")
SPILLED = 16  # bytes that have no effect on speed
PROMPT, DECODE = 16, 64  # tiles of a prompt, and decoding sequences


def _param(capability: tuple[int, int]) -> Any:
    marks = [] if capability == (9, 0) else [pytest.mark.long]
    return pytest.param(capability, id=f"sm_{capability[0]}{capability[1]}", marks=marks)


@pytest.fixture(params=map(_param, SHARED))
def capability(request: pytest.FixtureRequest) -> tuple[int, int]:
    return request.param  # type: ignore[no-any-return]


def attention(
    capability: tuple[int, int],
    folder: Path,
    heads: tuple[int, int],
    head_dim: int,
    queries: int,
    block_size: int,
    kernels: type[Any] = SplitK,
    held: torch.dtype = torch.bfloat16,
    **changes: float,
) -> list[Compiled]:
    """Both attention kernels, for 16 tiles of a prompt or for 64 decoding sequences, over 8,192 tokens each."""
    spec = AttentionSpec(0, *heads, head_dim, head_dim**-0.5, **changes)
    count = DECODE if queries == 1 else PROMPT
    tables = torch.zeros(count, 8192 // block_size, dtype=torch.int32)
    pages = Pages(tables, torch.zeros(count, dtype=torch.int32), queries)
    q = torch.zeros(count * queries, heads[0], head_dim, dtype=torch.bfloat16)
    keys, values = torch.zeros(2, 256 * block_size, heads[1], head_dim, dtype=held)
    with compiling(capability, folder) as found:
        kernels(block_size)(q, keys, values, pages, spec)
    for kernel in found:
        assert kernel.shared <= SHARED[capability], kernel
    return found


@pytest.mark.parametrize("head_dim", [64, 128])
def test_attention(capability: tuple[int, int], head_dim: int, tmp_path: Path) -> None:
    """Llama 3 has four query heads per key-value head. The decoding kernel loads keys ahead while it computes."""
    spec = AttentionSpec(0, 32, 8, head_dim, 1.0)
    decode, *_ = attention(capability, tmp_path, (32, 8), head_dim, 1, 64)
    prompt, *_ = attention(capability, tmp_path, (32, 8), head_dim, queries_per_tile(spec), 64)
    for kernel in (decode, prompt):
        assert kernel.name == "_fwd_kernel_splitK"
        assert kernel.spilled <= SPILLED, kernel
        assert "cp.async" in kernel.ptx
    expected = {9: "wgmma.mma_async", 10: "tcgen05.mma"}.get(capability[0], "mma.sync")
    assert expected in prompt.ptx


GEMMA_2, GEMMA_3 = {"sliding_window": 4096, "softcap": 50.0}, {"sliding_window": 512}


@pytest.mark.parametrize(("heads", "head_dim", "changes"), [((16, 8), 256, GEMMA_2)])
def test_our_attention(
    capability: tuple[int, int], heads: tuple[int, int], head_dim: int, changes: dict[str, float], tmp_path: Path
) -> None:
    """The shape is that of Gemma 2 9B, with windows and soft capping."""
    spec = AttentionSpec(0, *heads, head_dim, 1.0)
    for queries in (1, queries_per_tile(spec)):
        attend, *_ = attention(capability, tmp_path, heads, head_dim, queries, 64, PagedAttention, **changes)
        assert attend.name == "attend"
        assert attend.spilled <= SPILLED, (queries, attend.registers, attend.spilled)
        assert "cp.async" in attend.ptx


@pytest.mark.long
@pytest.mark.parametrize(
    ("heads", "head_dim", "changes"),
    [
        ((4, 1), 256, GEMMA_3),
        ((32, 8), 128, GEMMA_3),
        ((32, 32), 96, GEMMA_3),
        ((32, 8), 80, {}),
        ((32, 8), 64, GEMMA_2),
        ((28, 4), 128, {}),
    ],
)
@pytest.mark.parametrize("block_size", [16, 64])
def test_our_attention_of_other_shapes(
    capability: tuple[int, int],
    heads: tuple[int, int],
    head_dim: int,
    changes: dict[str, float],
    block_size: int,
    tmp_path: Path,
) -> None:
    spec = AttentionSpec(0, *heads, head_dim, 1.0)
    for queries in (1, queries_per_tile(spec)):
        for kernel in attention(capability, tmp_path, heads, head_dim, queries, block_size, PagedAttention, **changes):
            assert kernel.spilled <= SPILLED, (queries, kernel.name, kernel.registers, kernel.spilled)


@pytest.mark.long
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(
    ("heads", "head_dim", "changes"),
    [
        ((32, 8), 128, {}),
        ((32, 8), 64, {}),
        ((16, 8), 256, GEMMA_2),
        ((4, 1), 256, GEMMA_3),
        ((32, 32), 96, GEMMA_3),
        ((32, 8), 80, {}),
        ((28, 4), 128, {}),
    ],
)
def test_our_attention_over_fp8(
    capability: tuple[int, int],
    heads: tuple[int, int],
    head_dim: int,
    changes: dict[str, float],
    block_size: int,
    tmp_path: Path,
) -> None:
    """Keys and values are loaded ahead in fp8. Below compute capability 8.9, Triton does not have this type."""
    spec = AttentionSpec(0, *heads, head_dim, 1.0)
    for queries in (1, queries_per_tile(spec)):
        shape = capability, tmp_path, heads, head_dim, queries, block_size, Fp8PagedAttention, FP8
        if capability < Fp8TritonBackend.capability:
            with pytest.raises(CompilationError, match="fp8e4nv not supported"):
                attention(*shape, **changes)
            return
        attend, *_ = attention(*shape, **changes)
        assert attend.spilled <= SPILLED, (queries, attend.registers, attend.spilled)
        assert "cp.async" in attend.ptx
        assert "e4m3x2" in attend.ptx


def test_keys_and_values_are_rounded_to_the_nearest_fp8(capability: tuple[int, int], tmp_path: Path) -> None:
    if capability < Fp8TritonBackend.capability:
        return
    pools = torch.zeros(2, 64, 8, 128, dtype=FP8)
    angles = torch.zeros(2, 2, 1, 64, dtype=torch.bfloat16)
    qkv = torch.zeros(2, 48, 128, dtype=torch.bfloat16)
    with compiling(capability, tmp_path) as found:
        places = KVPlaces(*pools, torch.zeros(2, dtype=torch.int64), 0.5, 0.25)
        TritonElementwise().rotate_and_write(qkv, tuple(angles), None, places)  # type: ignore[arg-type]
    (kernel,) = found
    assert kernel.spilled == 0, kernel
    # On 8.9 the conversion goes through float16, which has no effect if the scale is a power of two.
    assert f"cvt.rn.satfinite.e4m3x2.{'f16x2' if capability == (8, 9) else 'f32'}" in kernel.ptx
    assert "ld.global.v" in kernel.ptx


def test_elementwise_kernels(capability: tuple[int, int], tmp_path: Path) -> None:
    """The shapes are those of Llama-3.1-8B and Qwen3-0.6B in bfloat16."""
    kernels = TritonElementwise()

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    with compiling(capability, tmp_path) as found:
        kernels.add_rms_norm(zeros(2, 4096), zeros(2, 4096), zeros(4096), 1e-5)
        kernels.add_rms_norm(zeros(2, 8192), None, zeros(8192), 1e-5)
        kernels.silu_and_mul(zeros(2, 2 * 14336))
        for heads, kv_heads, norm in ((32, 8, None), (16, 8, HeadWeights(zeros(24, 128), 1e-6))):
            places = KVPlaces(zeros(64, kv_heads, 128), zeros(64, kv_heads, 128), torch.zeros(2, dtype=torch.int64))
            angles = zeros(2, 1, 64), zeros(2, 1, 64)
            kernels.rotate_and_write(zeros(2, heads + 2 * kv_heads, 128), angles, norm, places)
    assert len(found) == 5
    for kernel in found:
        assert kernel.spilled == 0, kernel
        assert kernel.shared <= SHARED[capability]
        assert "ld.global.v" in kernel.ptx, f"{kernel.name} loads one number at a time"


def test_kernels_for_one_row_and_for_draws(
    capability: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shapes are those of Llama-3.1-8B.

    From Hopper on, these kernels start early and wait for the previous kernel.
    """
    begins = {"EARLY": True, "launch_pdl": True} if capability >= (9, 0) else {"EARLY": False}
    monkeypatch.setattr(row_product, "early", lambda device: begins)
    monkeypatch.setattr(elementwise, "early", lambda device: begins)
    x, weight = torch.zeros(1, 4096, dtype=torch.bfloat16), torch.zeros(64, 4096, dtype=torch.bfloat16)
    with compiling(capability, tmp_path) as waiting:
        row_product.RowLinear(weight, None)(x)
        TritonElementwise().add_rms_norm(x, x, weight[0], 1e-5)
    with compiling(capability, tmp_path) as drawing:
        TritonSampler().compile_all(128256, CPU)
    assert [kernel.name for kernel in waiting] == ["multiply_row", "add_rms_norm"]
    for kernel in (*waiting, *drawing):
        assert kernel.spilled == 0, kernel
        assert "ld.global.v" in kernel.ptx or kernel.name == "merge_peaks", f"{kernel.name} loads one number at a time"
    for kernel in waiting:
        assert ("griddepcontrol.wait" in kernel.ptx) == (capability >= (9, 0))


def test_after_the_start_no_draw_compiles() -> None:
    generator, most = torch.Generator().manual_seed(0), 40
    with asking((9, 0)) as found:
        TritonSampler().compile_all(128256, CPU)
        at_start = set(found)
        found.clear()
        for count in (1, 2, 16, 33, most):
            logits = torch.randn(count, 128256, generator=generator)
            floats, integers = torch.ones(3, count, dtype=torch.float64), torch.ones(2, count, dtype=torch.int64)
            for truncated in product((False, True), repeat=3):
                columns = SamplingColumns(*floats, *integers, *truncated)
                TritonSampler().draw(logits, TritonSampler().peaks(logits), columns)
    kernels = {"find_peaks", "merge_peaks", "sum_digits", "count_equal", "keep_tokens", "race_groups", "race_tokens"}
    assert {name for name, _ in found} == kernels
    assert found <= at_start


@pytest.mark.parametrize("tokens", [8, 4096])
def test_expert_kernels(capability: tuple[int, int], tokens: int, tmp_path: Path) -> None:
    """Qwen3-30B-A3B uses eight of 128 experts for each token. The weights take no memory here."""

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros((), dtype=torch.bfloat16).expand(shape)

    experts = TritonExperts(zeros(128, 1536, 2048), zeros(128, 2048, 768), lambda gate_up: gate_up[:, :768])
    index = torch.arange(8 * tokens).view(tokens, 8) % 128
    with compiling(capability, tmp_path) as found:
        experts(zeros(tokens, 2048), index, zeros(tokens, 8))
    assert [kernel.name for kernel in found] == ["product_by_expert", "product_by_expert", "add_weighted"]
    for kernel in found:
        assert kernel.spilled == 0, kernel
        assert kernel.shared <= SHARED[capability]
    for kernel in found[:2]:
        assert "cp.async" in kernel.ptx, "weights must be loaded ahead"
        assert ".mma" in kernel.ptx or "mma.sync" in kernel.ptx


def test_low_rank_kernels(capability: tuple[int, int], tmp_path: Path) -> None:
    """The layers are q, k and v, and down, of Llama-3.1-8B. Few and many rows."""
    model: Any = torch.nn.Module()
    for name, inputs, parts in (("qkv", 4096, {"q": 4096, "k": 1024, "v": 1024}), ("down", 14336, {"down": 4096})):
        layer = Linear(16, parts, bias=False)
        layer.freeze(dense)
        layer.in_features = inputs
        model.add_module(name, layer)
    layers = GroupedLowRank(model, torch.bfloat16, torch.device("cpu"), AdapterLimits(2048, 64, 64))
    with compiling(capability, tmp_path) as found:
        layers.compile_all()
        at_start = {kernel.ptx for kernel in found}
        for tokens in (1, 7, 64, 513, 2048):
            layers._add(0, torch.zeros(tokens, 4096).bfloat16(), torch.zeros(tokens, 6144).bfloat16())
    assert {kernel.ptx for kernel in found} == at_start, "a step compiles another kernel"
    for kernel in found:
        assert kernel.spilled == 0, kernel
        assert kernel.shared <= SHARED[capability]
        assert "mma" in kernel.ptx
        assert "ld.global.v" in kernel.ptx or "cp.async" in kernel.ptx, f"{kernel.name} loads one number at a time"


@pytest.mark.parametrize("size", [4096, 14336])
def test_fp8_kernel(capability: tuple[int, int], size: int, tmp_path: Path) -> None:
    if capability < (8, 9):
        pytest.skip("there is no fp8 before 8.9")
    with compiling(capability, tmp_path) as found:
        round_rows(torch.zeros(3, size, dtype=torch.bfloat16))
    (kernel,) = found
    assert kernel.spilled == 0, kernel
    assert "cvt.rn.satfinite.e4m3x2" in kernel.ptx
    assert "ld.global.v" in kernel.ptx


def test_fp8_kernel_of_blocks(capability: tuple[int, int], tmp_path: Path) -> None:
    """Few and many rows, with weights of 4,096 inputs. Many rows are multiplied in fp8 on the tensor cores."""
    if capability < (8, 9):
        pytest.skip("there is no fp8 before 8.9")
    weight = torch.zeros(256, 4096, dtype=torch.float8_e4m3fn)
    linear = Fp8BlocksLinear(weight, torch.ones(2, 32), 128, None)
    with compiling(capability, tmp_path) as found:
        for tokens in (1, 7, 64, 65, 1000):
            linear(torch.zeros(tokens, 4096).bfloat16())
    products = [kernel for kernel in found if kernel.name == "fp8_product"]
    assert len({kernel.ptx for kernel in products}) == 2
    for kernel in products:
        assert kernel.spilled == 0, kernel
        assert kernel.shared <= SHARED[capability]
        assert "cp.async" in kernel.ptx, "weights must be loaded ahead"
    assert "e4m3.e4m3" in products[-1].ptx or "kind::f8f6f4" in products[-1].ptx, "the products must use fp8"


@pytest.mark.parametrize("group", [32, 128])
def test_int4_kernel(capability: tuple[int, int], group: int, tmp_path: Path) -> None:
    """Few and many rows, with weights of 4,096 inputs."""
    linear = Int4Linear(Int4Weight(torch.zeros(256, 4096, dtype=torch.uint8), torch.ones(256, 4096 // group)), None)
    with compiling(capability, tmp_path) as found:
        for tokens in (1, 7, 64, 65, 1000):
            linear(torch.zeros(tokens, 4096).bfloat16())
    assert len({kernel.ptx for kernel in found}) == 2
    for kernel in found:
        assert kernel.spilled == 0, kernel
        assert kernel.shared <= SHARED[capability]
        assert "mma" in kernel.ptx
        assert "cp.async" in kernel.ptx, "weights must be loaded ahead"


@pytest.mark.parametrize(
    "kind", [XformersBackend, TritonBackend, pytest.param(Fp8TritonBackend, marks=pytest.mark.long)]
)
@pytest.mark.parametrize(("heads", "blocks"), [((4, 2), 40), ((32, 8), 300), ((28, 4), 300)])
def test_after_the_start_no_step_compiles(kind: type[TiledBackend], heads: tuple[int, int], blocks: int) -> None:
    """Steps have any number of sequences of any length, with and without prompts."""
    window = 700 if kind is not XformersBackend else None
    spec, size = AttentionSpec(0, *heads, 128, 0.25, window), 64
    limits = StepLimits(2000, 40, blocks, size)
    backend = kind(limits)
    kv = torch.zeros(kind.kv_cache_shape(4, size, spec), dtype=kind.kv_dtype or torch.bfloat16)
    random = np.random.default_rng(0)
    with asking((9, 0)) as found:
        backend.compile_all([(spec, kv)], torch.bfloat16)
        at_start = set(found)
        found.clear()
        for _ in range(150):
            decodes = random.integers(0, 1 + random.choice([1, 4, limits.max_num_seqs]))
            prompts = random.integers(decodes == 0, 1 + min(3, limits.max_num_seqs - decodes))
            new = np.concatenate([np.ones(decodes, np.int64), random.integers(2, random.choice([20, 600]), prompts)])
            past = random.integers(0, random.choice([200, 3000, 18_000]), len(new))
            ends = np.minimum(new + past, limits.max_blocks * size)
            step(backend, spec, kv, limits, decodes, new.astype(np.int32), ends.astype(np.int32))
    assert len(found) > 3
    assert found <= at_start
    assert len(at_start) < 120


def step(
    backend: TiledBackend,
    spec: AttentionSpec,
    kv: torch.Tensor,
    limits: StepLimits,
    decodes: int,
    new: Any,
    ends: Any,
) -> None:
    """Attention of one step, with a pool whose content does not matter."""
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    tokens = int(starts[-1])
    tables = torch.zeros(limits.max_num_seqs, limits.max_blocks, dtype=torch.int32)[: len(new)]
    columns = torch.zeros(tokens, dtype=torch.int64), tables, torch.from_numpy(ends), torch.from_numpy(starts)
    plan = backend.prepare(AttentionMetadata(int(decodes), *columns, ends, starts))
    q = torch.zeros(tokens, spec.num_heads, spec.head_dim, dtype=torch.bfloat16)
    backend.attend(q, kv, plan, replace(spec, layer=7, key_scale=0.2, value_scale=0.3))


@pytest.mark.long
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize(
    ("heads", "head_dim"),
    [((32, 32), 128), ((28, 4), 128), ((64, 8), 128), ((32, 1), 128), ((64, 1), 64), ((16, 8), 256), ((8, 2), 512)],
)
def test_attention_of_other_shapes(
    capability: tuple[int, int], heads: tuple[int, int], head_dim: int, block_size: int, tmp_path: Path
) -> None:
    spec = AttentionSpec(0, *heads, head_dim, 1.0)
    for queries in (1, queries_per_tile(spec)):
        for kernel in attention(capability, tmp_path, heads, head_dim, queries, block_size):
            assert kernel.spilled <= SPILLED, (queries, kernel.name, kernel.registers, kernel.spilled)


def test_what_xformers_would_take_spills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: with xformers' own tile, ptxas reports spills."""
    from raylm.worker.gpu import split_k

    monkeypatch.setattr(split_k, "tile_of", lambda *shape: split_k.Tile(128, 64, 4, 1))
    kernel, *_ = attention((9, 0), tmp_path, (32, 8), 128, 32, 64)
    assert kernel.spilled > SPILLED
    assert "cp.async." not in kernel.ptx
