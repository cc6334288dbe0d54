"""Our paged attention in Triton's interpreter equals a float64 reference.

test_triton_attention.py runs this in a separate process, because the interpreter is chosen when triton is imported. It
uses float16, because the interpreter computes bfloat16 wrongly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raylm.models import AttentionSpec, KVPlaces
from raylm.worker.attention import AttentionMetadata
from raylm.worker.gpu import tiled
from raylm.worker.gpu.probe import probe
from raylm.worker.gpu.split_k import Pages
from raylm.worker.gpu.triton_attention import Fp8TritonBackend, PagedAttention, TritonBackend
from tests.worker.gpu.interpreted_xformers import WrittenPool
from tests.worker.test_attention import CPU, Case, Pool, worst_error

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|divide by zero|overflow) encountered:RuntimeWarning")

TOLERANCE = 4e-3


@pytest.fixture(autouse=True, params=[pytest.param((8, 0), marks=pytest.mark.long), (9, 0)], ids=["ampere", "hopper"])
def gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """The tiles depend on the kind of GPU."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: request.param)
        yield
    torch.set_num_threads(threads)


def case(lengths: list[tuple[int, int]], **changes: object) -> Case:
    shape: dict[str, object] = {"kv_heads": 2, "group": 4, "head_dim": 64, "block_size": 64, "window": None}
    return Case(lengths, **shape | {"dtype": torch.float16, "seed": len(lengths)} | changes)  # type: ignore[arg-type]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    pasts = st.one_of(st.integers(0, 70), st.integers(0, 300))
    lengths = draw(st.lists(st.tuples(pasts, st.one_of(st.just(1), st.integers(2, 50))), min_size=1, max_size=5))
    return Case(
        lengths=sorted(lengths, key=lambda pair: pair[1] > 1),
        kv_heads=draw(st.sampled_from([1, 2])),
        group=draw(st.sampled_from([1, 3, 4, 7, 8])),
        head_dim=draw(st.sampled_from([16, 64, 80, 96])),
        block_size=draw(st.sampled_from([16, 32, 64])),
        window=draw(st.one_of(st.none(), st.integers(1, 90))),
        dtype=torch.float16,
        seed=draw(st.integers(0, 2**16)),
        softcap=draw(st.sampled_from([None, 2.0])),
    )


@pytest.mark.long
@given(mix=cases())
@settings(max_examples=20, deadline=None)
def test_any_mix_of_sequences(mix: Case) -> None:
    assert worst_error(WrittenPool(mix, "triton")) < TOLERANCE


MIXED = [(400, 1), (0, 1), (63, 1), (64, 1), (0, 40), (65, 18)]


@pytest.mark.parametrize("backend", ["triton", "triton-fp8"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"window": 40},
        {"softcap": 2.0},
        {"window": 100, "softcap": 2.0, "head_dim": 256, "group": 2, "kv_heads": 1},
        {"window": 17, "head_dim": 80, "block_size": 16},
        {"head_dim": 96, "group": 1},
    ],
    ids=str,
)
def test_decodes_and_prefills_in_one_step(changes: dict[str, object], backend: str) -> None:
    """With a few long sequences the keys are split between programs. In fp8, the pool has the reference's values."""
    scales = (0.25, 2.0) if backend == "triton-fp8" else (1.0, 1.0)
    assert worst_error(WrittenPool(case(MIXED, scales=scales, **changes), backend)) < TOLERANCE * scales[1]


@pytest.mark.parametrize("wrong", [{"key_scale": 1.0}, {"value_scale": 1.0}], ids=str)
def test_a_scale_that_is_left_out_is_seen(wrong: dict[str, float]) -> None:
    pool = WrittenPool(case(MIXED, scales=(0.25, 2.0)), "triton-fp8")
    attend = pool.backend._attend  # type: ignore[attr-defined]
    pool.backend._attend = lambda *args: attend(*args[:-1], replace(args[-1], **wrong))  # type: ignore[attr-defined]
    assert worst_error(pool) > 10 * TOLERANCE


def test_the_longest_is_split() -> None:
    spec = AttentionSpec(0, 8, 2, 64, 0.1)
    assert PagedAttention(64).choice(4, 11, 1, spec, CPU)[0] > 1
    assert PagedAttention(64).choice(4, 11, 1, AttentionSpec(0, 8, 2, 64, 0.1, sliding_window=40), CPU)[0] == 1


class OneTooFar(PagedAttention):
    """A planted fault: windows have one token too many."""

    def __call__(self, *args: object) -> torch.Tensor:
        *others, spec = args
        wider = AttentionSpec(0, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.scale, spec.sliding_window + 1)  # type: ignore[attr-defined]
        return super().__call__(*others, wider)  # type: ignore[arg-type]


def test_planted_faults_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonBackend, "attention", OneTooFar)
    assert worst_error(WrittenPool(case([(90, 1), (20, 30)], window=9), "triton")) > 10 * TOLERANCE
    monkeypatch.undo()
    pool = WrittenPool(case([(150, 1), (150, 20)], window=70), "triton")
    pool.write_past()
    pool.tables[0, [0, 1]] = pool.tables[0, [1, 0]]
    pool.write_past = lambda: None  # type: ignore[method-assign]
    assert worst_error(pool) > 10 * TOLERANCE


def test_a_plan_that_stays_in_place_attends_as_one_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is refilled twice, the second time with fewer rows. Padding is written only to the scratch slot."""
    found: list[torch.Tensor] = []
    pool = WrittenPool(case([(30, 1), (5, 1), (40, 33), (0, 7)], window=20), "triton")
    backend = pool.backend
    assert isinstance(backend, TritonBackend)
    plan = backend.plan_in_place(64, 2, [pool.spec], 5, CPU)
    pool.write_past()

    def hold(metadata: AttentionMetadata) -> tiled.TiledPlan:
        assert backend.refill(plan, metadata, 5)
        found.append(plan.metadata.slot_mapping.clone())
        return plan

    spans = [
        [(30, 31), (5, 6), (40, 73), (0, 7)],
        [(0, 0), (0, 0), (73, 73), (0, 7)],
        [(30, 31), (0, 0), (40, 73), (0, 0)],
    ]
    for step in spans:
        count = sum(end - start for start, end in step)
        q = pool.random(count, pool.spec.num_heads)
        wanted = pool.run(step, q)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backend, "prepare", hold)
            patch.setattr(KVPlaces, "write", lambda *args: None)
            got = pool.run(step, torch.cat([q, q.new_zeros(64 - count, *q.shape[1:])]))
        assert (got[:count] - wanted).abs().max() < TOLERANCE
        assert (found[-1][count:] == 5).all()


def test_more_prompts_than_a_plan_has_tiles_for_are_not_taken() -> None:
    lengths = [(0, 2)] * 40
    pool = Pool(case(lengths), "triton")
    backend = pool.backend
    assert isinstance(backend, TritonBackend)
    plan = backend.plan_in_place(128, 2, [pool.spec], 0, CPU)
    refused: list[bool] = []

    def hold(metadata: AttentionMetadata) -> tiled.TiledPlan:
        refused.append(not backend.refill(plan, metadata, 0))
        return TritonBackend.prepare(backend, metadata)

    backend.prepare = hold  # type: ignore[method-assign]
    pool.run([(0, 2)] * 40, pool.random(80, 8))
    assert refused == [True]


def test_the_probe_finds_nothing_wrong() -> None:
    """The probe's reference has windows and soft capping too."""
    for changes in ({}, {"sliding_window": 50}, {"sliding_window": 50, "softcap": 3.0}):
        for backend in (TritonBackend, Fp8TritonBackend):
            assert probe(backend, AttentionSpec(0, 4, 2, 64, 0.125, **changes), torch.float16, CPU, 16) is None


def test_sequences_without_tokens_get_zeros() -> None:
    q = torch.randn(3, 8, 64).half()
    pages = Pages(torch.full((2, 4), 1 << 28, dtype=torch.int32), torch.zeros(3, dtype=torch.int32), 1)
    pool = torch.full((64, 2, 64), float("nan")).half()
    assert not PagedAttention(16)(q, pool, pool, pages, AttentionSpec(0, 8, 2, 64, 1.0)).any()
