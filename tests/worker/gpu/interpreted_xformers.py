"""The real xformers kernel in Triton's interpreter equals a brute-force float64 reference.

test_xformers.py runs this in a separate process, because the interpreter is chosen when triton is imported. It uses
float16, because the interpreter computes bfloat16 wrongly.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raylm.models import AttentionSpec
from raylm.worker.attention.base import AttentionMetadata
from raylm.worker.attention.sdpa import SdpaBackend
from raylm.worker.gpu.probe import probe
from raylm.worker.gpu.tiled import TiledPlan
from raylm.worker.gpu.xformers import XformersBackend
from tests.worker.test_attention import CPU, Case, Pool, reference

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",  # xformers' kernel is made for an older triton than torch needs
    "ignore:tl.make_block_ptr is deprecated",
    "ignore:(invalid value|divide by zero) encountered:RuntimeWarning",
)

TOLERANCE = 3e-3


@pytest.fixture(autouse=True, params=[(8, 0), (9, 0)], ids=["ampere", "hopper"])
def gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """The kernel's tiles depend on the kind of GPU."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: request.param)
        yield
    torch.set_num_threads(threads)


class WrittenPool(Pool):
    """A pool that already contains the past. The rest of each block table is invalid."""

    def __init__(self, case: Case, backend: str = "xformers") -> None:
        super().__init__(case, backend)
        for seq, total in enumerate(self.totals):
            self.tables[seq, -(-total // case.block_size) :] = 1 << 28

    def share_prefix(self, num_blocks: int) -> None:
        """Let all sequences begin with the blocks of the first one."""
        tokens = num_blocks * self.case.block_size
        for seq in range(1, len(self.totals)):
            self.tables[seq, :num_blocks] = self.tables[0, :num_blocks]
            self.k[seq][:tokens], self.v[seq][:tokens] = self.k[0][:tokens], self.v[0][:tokens]

    def write_past(self) -> None:
        keys, values = self.kv.flatten(1, 2).unbind(0)
        size = self.case.block_size
        for seq, (past, _) in enumerate(self.case.lengths):
            positions = np.arange(past)
            slots = torch.from_numpy(self.tables[seq, positions // size] * size + positions % size)
            for rows, pool, scale in zip((self.k, self.v), (keys, values), self.case.scales, strict=True):
                pool[slots] = (rows[seq][:past] / scale).to(pool.dtype)

    def step(self) -> torch.Tensor:
        """Compute the new tokens of all sequences. Returns the largest error of each token, inf for NaN."""
        news = [new for _, new in self.case.lengths]
        q = self.random(sum(news), self.spec.num_heads)
        out = self.run([(past, past + new) for past, new in self.case.lengths], q)
        assert out.shape == q.shape
        wanted = [
            reference(mine, k, v, self.spec.scale, None)
            for mine, k, v in zip(q.split(news), self.k, self.v, strict=True)
        ]
        errors = (out.double() - torch.cat(wanted)).abs().nan_to_num(nan=float("inf")).amax(dim=(1, 2))
        return torch.stack([error.max() for error in errors.split(news)])


def pool_of(lengths: list[tuple[int, int]], kv_heads: int, group: int, head_dim: int, block_size: int) -> WrittenPool:
    pool = WrittenPool(Case(lengths, kv_heads, group, head_dim, block_size, None, torch.float16, len(lengths)))
    pool.write_past()
    return pool


@st.composite
def cases(draw: st.DrawFn) -> Case:
    pasts = st.one_of(st.integers(0, 70), st.integers(0, 200))
    lengths = draw(st.lists(st.tuples(pasts, st.one_of(st.just(1), st.integers(2, 50))), min_size=1, max_size=5))
    return Case(
        lengths=sorted(lengths, key=lambda pair: pair[1] > 1),
        kv_heads=draw(st.sampled_from([1, 2])),
        group=draw(st.sampled_from([1, 3, 4, 7, 8])),
        head_dim=draw(st.sampled_from([16, 64])),
        block_size=draw(st.sampled_from([16, 32, 64])),
        window=None,
        dtype=torch.float16,
        seed=draw(st.integers(0, 2**16)),
    )


@given(case=cases())
@settings(max_examples=12, deadline=None)
def test_any_mix_of_sequences(case: Case) -> None:
    pool = WrittenPool(case)
    pool.write_past()
    assert pool.step().max() < TOLERANCE


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_decode(block_size: int, group: int, head_dim: int) -> None:
    pool = pool_of([(400, 1), (0, 1), (63, 1), (64, 1), (129, 1)], 2, group, head_dim, block_size)
    assert pool.step().max() < TOLERANCE


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("group", [1, 4, 8])
def test_prefill_with_and_without_a_past(block_size: int, group: int) -> None:
    pool = pool_of([(0, 16), (0, 33), (50, 17), (16, 2)], 1, group, 64, block_size)
    assert pool.step().max() < TOLERANCE


def test_prefill_of_wide_heads() -> None:
    assert pool_of([(30, 40)], 1, 4, 128, 64).step().max() < TOLERANCE
    assert pool_of([(3, 20)], 1, 2, 256, 16).step().max() < TOLERANCE


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("group", [1, 4, 8])
def test_decodes_and_prefills_in_one_step(block_size: int, group: int) -> None:
    pool = pool_of([(70, 1), (5, 1), (128, 1), (0, 40), (65, 18)], 2, group, 64, block_size)
    assert pool.step().max() < TOLERANCE


@pytest.mark.parametrize("block_size", [16, 64])
def test_shared_prefixes(block_size: int) -> None:
    lengths = [(2 * block_size + 5, 1), (2 * block_size, 1), (2 * block_size, 20), (2 * block_size + 17, 3)]
    pool = WrittenPool(Case(lengths, 1, 4, 64, block_size, None, torch.float16, 9))
    pool.share_prefix(2)
    pool.write_past()
    assert pool.step().max() < TOLERANCE


@pytest.mark.parametrize("lengths", [[(150, 1), (150, 1)], [(150, 20), (150, 20)]], ids=["decode", "prefill"])
def test_a_swapped_block_is_seen(lengths: list[tuple[int, int]]) -> None:
    """A planted fault: two blocks of one sequence are swapped. Only the results of that sequence are wrong."""
    pool = pool_of(lengths, 2, 4, 64, 64)
    pool.tables[0, [0, 2]] = pool.tables[0, [2, 0]]
    errors = pool.step()
    assert errors[0] > 10 * TOLERANCE
    assert errors[1] < TOLERANCE


def test_slots_behind_a_sequence_are_not_read_but_written_ones_are() -> None:
    """NaN in a slot of a sequence makes only this sequence's result NaN."""
    pool = pool_of([(30, 1), (30, 1)], 1, 2, 64, 16)
    pool.kv[:, pool.tables[0, 0], 3] = float("nan")
    errors = pool.step()
    assert errors[0].isinf()
    assert errors[1] < TOLERANCE


SPEC = AttentionSpec(0, 4, 2, 64, 0.125)


def test_the_probe_finds_nothing_wrong() -> None:
    for block_size in (16, 64):
        assert probe(XformersBackend, SPEC, torch.float16, CPU, block_size) is None


class OneBlockShort(XformersBackend):
    """A fault: decoding ignores the last block of tokens."""

    def prepare(self, metadata: AttentionMetadata) -> TiledPlan:
        plan = super().prepare(metadata)
        if plan.decodes is not None:
            plan.decodes.lengths.sub_(self._limits.block_size)
        return plan


class Raising(SdpaBackend):
    def prepare(self, metadata: AttentionMetadata) -> object:  # type: ignore[override]
        raise OSError("no compiler")


def test_the_probe_finds_what_is_wrong() -> None:
    wrong = probe(OneBlockShort, SPEC, torch.float16, CPU, 16)
    assert wrong is not None
    assert wrong.startswith("its results are wrong by")
    assert probe(Raising, SPEC, torch.float16, CPU, 16) == "it fails on this device (OSError: no compiler)"
