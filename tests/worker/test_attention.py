"""Every attention backend equals a brute-force float64 reference, for any mix of sequences, in a pool of NaN."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from raylm.errors import ConfigError
from raylm.models import AttentionSpec
from raylm.native import kernels
from raylm.native.build import INSTRUCTION_SETS, offered
from raylm.worker.attention import BACKENDS, FP8_BACKENDS, AttentionMetadata, StepLimits, select_backend
from raylm.worker.attention.sdpa import group_by_length

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Case:
    """``lengths`` has (past, new) tokens of each sequence."""

    lengths: list[tuple[int, int]]
    kv_heads: int
    group: int
    head_dim: int
    block_size: int
    window: int | None
    dtype: torch.dtype
    seed: int
    softcap: float | None = None
    scales: tuple[float, float] = (1.0, 1.0)


ON_CPU = ["cpu", "sdpa"]
HEAD_DIMS = {"cpu": [16, 32, 64, 80, 128], "sdpa": [8, 16, 20, 64]}
SOFTCAPS = {"cpu": [None, None, 2.0], "sdpa": [None, None, 2.0]}


def cases(backend: str) -> st.SearchStrategy[Case]:
    pasts = st.one_of(st.integers(0, 70), st.integers(0, 700))
    return st.builds(
        Case,
        lengths=st.lists(st.tuples(pasts, st.one_of(st.just(1), st.integers(2, 40))), min_size=1, max_size=7).map(
            lambda lengths: sorted(lengths, key=lambda pair: pair[1] > 1)
        ),
        kv_heads=st.sampled_from([1, 2, 3]),
        group=st.sampled_from([1, 2, 4, 7]),
        head_dim=st.sampled_from(HEAD_DIMS[backend]),
        block_size=st.sampled_from([16, 32, 64]),
        window=st.one_of(st.none(), st.integers(1, 80)),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
        seed=st.integers(0, 2**16),
        softcap=st.sampled_from(SOFTCAPS[backend]),
    )


def reference(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None = None
) -> Tensor:
    """Attention of one sequence in float64. ``q`` (new, heads, dim) belongs to the last rows of ``k`` and ``v``."""
    group, past = q.shape[1] // k.shape[1], len(k) - len(q)
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    seen = torch.zeros(len(q), len(k), dtype=torch.bool)
    for row in range(len(q)):
        low = 0 if window is None else max(0, past + row + 1 - window)
        seen[row, low : past + row + 1] = True
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), values)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread, because threads slow down such small products."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Pool:
    """A pool filled with NaN, block tables of shuffled blocks, and the true keys and values."""

    def __init__(self, case: Case, backend_name: str) -> None:
        self.case = case
        self.rng = np.random.default_rng(case.seed)
        self.generator = torch.Generator().manual_seed(case.seed)
        heads = case.kv_heads * case.group
        self.spec = AttentionSpec(
            0, heads, case.kv_heads, case.head_dim, case.head_dim**-0.5, case.window, case.softcap, *case.scales
        )
        self.totals = [past + new for past, new in case.lengths]
        self.width = -(-max(self.totals) // case.block_size)
        num_blocks = self.width * len(self.totals) + 3
        cls = (FP8_BACKENDS if backend_name in FP8_BACKENDS else BACKENDS)[backend_name]
        held = cls.kv_dtype or case.dtype
        self.kv = torch.full(cls.kv_cache_shape(num_blocks, case.block_size, self.spec), float("nan"), dtype=held)
        self.backend = cls(StepLimits(4096, len(self.totals), self.width, case.block_size))
        self.tables = self.rng.permutation(num_blocks)[: self.width * len(self.totals)].reshape(-1, self.width)
        self.k, self.v = (
            [(self.random(total, case.kv_heads) / scale).to(held).to(case.dtype) * scale for total in self.totals]
            for scale in case.scales
        )

    def random(self, tokens: int, heads: int) -> Tensor:
        return torch.randn(tokens, heads, self.case.head_dim, generator=self.generator).to(self.case.dtype)

    def run(self, spans: list[tuple[int, int]], q: Tensor) -> Tensor:
        """Run one step with tokens ``start`` .. ``end`` of each sequence. Sequences with one token must be first."""
        members = [seq for seq, (start, end) in enumerate(spans) if end > start]
        counts = [spans[seq][1] - spans[seq][0] for seq in members]
        positions = np.concatenate([np.arange(*spans[seq]) for seq in members])
        owners = np.repeat(members, counts)
        size = self.case.block_size
        slots = self.tables[owners, positions // size] * size + positions % size
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        ends = np.array([spans[seq][1] for seq in members], np.int32)
        metadata = AttentionMetadata(
            num_decodes=sum(count == 1 for count in counts),
            slot_mapping=torch.from_numpy(slots),
            block_tables=torch.from_numpy(self.tables[members].astype(np.int32)),
            seq_lens=torch.from_numpy(ends),
            query_start_loc=torch.from_numpy(starts),
            seq_lens_host=ends,
            query_start_loc_host=starts,
        )
        k = torch.cat([self.k[seq][slice(*spans[seq])] for seq in members])
        v = torch.cat([self.v[seq][slice(*spans[seq])] for seq in members])
        return self.backend.forward(q, k, v, self.kv, self.backend.prepare(metadata), self.spec)

    def write_past(self) -> None:
        """Write the past of every sequence into the pool with the backend, one sequence per step."""
        for seq, (past, _) in enumerate(self.case.lengths):
            spans = [(0, past if at == seq else 0) for at in range(len(self.totals))]
            if past:
                self.run(spans, self.random(past, self.spec.num_heads))


def worst_error(pool: Pool) -> float:
    pool.write_past()
    q = pool.random(sum(new for _, new in pool.case.lengths), pool.spec.num_heads)
    out = pool.run([(past, past + new) for past, new in pool.case.lengths], q)
    wanted, start = [], 0
    for seq, (_, new) in enumerate(pool.case.lengths):
        mine = q[start : start + new], pool.k[seq], pool.v[seq]
        wanted.append(reference(*mine, pool.spec.scale, pool.case.window, pool.case.softcap))
        start += new
    assert out.shape == q.shape
    assert out.isfinite().all(), "an unwritten slot was read"
    return float((out.double() - torch.cat(wanted)).abs().max())


@pytest.mark.parametrize("name", ON_CPU)
@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_equals_brute_force(name: str, data: st.DataObject) -> None:
    case = data.draw(cases(name))
    assert worst_error(Pool(case, name)) < TOLERANCE[case.dtype]


@pytest.mark.parametrize("instructions", [name for name in INSTRUCTION_SETS if offered(name)])
@pytest.mark.parametrize("threads", [1, pytest.param(3, marks=pytest.mark.long)])
@given(case=cases("cpu"))
@settings(max_examples=60, deadline=None)
def test_every_instruction_set_and_team_equals_brute_force(instructions: str, threads: int, case: Case) -> None:
    pool = Pool(case, "cpu")
    native = kernels(instructions)
    native.use_threads(threads)
    pool.backend._native = native
    assert worst_error(pool) < TOLERANCE[case.dtype]


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("window", [19, 20, 21])
@pytest.mark.parametrize("lengths", [[(0, 20)], [(19, 1)], [(18, 2)], [(31, 1), (0, 1), (15, 17)], [(16, 16)]])
def test_edges_of_windows_and_blocks(name: str, window: int, lengths: list[tuple[int, int]]) -> None:
    assert worst_error(Pool(Case(lengths, 2, 2, 16, 16, window, torch.float32, 5), name)) < 2e-5


@pytest.mark.parametrize("name", ON_CPU)
def test_only_the_slots_of_the_step_are_written(name: str) -> None:
    pool = Pool(Case([(5, 1), (20, 1), (0, 9), (17, 4)], 2, 2, 16, 16, None, torch.float32, 3), name)
    pool.write_past()
    before = pool.kv.clone()
    pool.run([(past, past + new) for past, new in pool.case.lengths], pool.random(15, 4))
    changed = (before != pool.kv) & ~(before.isnan() & pool.kv.isnan())
    assert int(changed.sum()) == 2 * 15 * 2 * 16


@pytest.mark.parametrize("name", ON_CPU)
def test_a_sequence_does_not_see_its_neighbours(name: str) -> None:
    """A sequence whose keys and values are NaN changes no other sequence."""
    pool = Pool(Case([(40, 1), (9, 1), (3, 5)], 1, 2, 16, 16, None, torch.float32, 0), name)
    pool.k[1].fill_(float("nan"))
    pool.v[1].fill_(float("nan"))
    pool.write_past()
    out = pool.run([(40, 41), (9, 10), (3, 8)], pool.random(7, 2))
    assert out[[0, 2, 3, 4, 5, 6]].isfinite().all()
    assert not out[1].isfinite().any()


@given(lengths=st.lists(st.integers(1, 100_000), min_size=0, max_size=64))
def test_groups_of_decodes_pad_little_and_stay_bounded(lengths: list[int]) -> None:
    array = np.array(lengths, np.int32)
    groups = group_by_length(array)
    assert sorted(int(member) for group in groups for member in group) == list(range(len(lengths)))
    for group in groups:
        longest = int(array[group].max())
        assert longest <= 2 * int(array[group].min())
        assert len(group) == 1 or longest * len(group) <= 65_536


def test_prefill_tiles_bound_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raylm.worker.attention.sdpa._TILE_SCORES", 300)
    for window in (None, 30):
        assert worst_error(Pool(Case([(50, 40), (0, 33)], 2, 2, 8, 16, window, torch.float32, 1), "sdpa")) < 2e-5


def test_a_layer_no_backend_serves_is_refused_with_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = {name: backend for name, backend in BACKENDS.items() if name != "sdpa"}
    monkeypatch.setattr("raylm.worker.attention.BACKENDS", backends)
    with pytest.raises(ConfigError, match=r"cpu: head_dim 20 is not a multiple of 16"):
        select_backend([AttentionSpec(0, 4, 2, 20, 0.25)], torch.float32, CPU, 16)
    assert select_backend([AttentionSpec(0, 4, 2, 16, 0.25)], torch.float32, CPU, 16).name in ON_CPU
