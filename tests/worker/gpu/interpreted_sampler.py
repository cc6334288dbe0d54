"""The sampler's kernels in Triton's interpreter. test_device_sampler.py runs this in a separate process."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from raylm.params import SamplingParams
from raylm.worker.gpu.device_sampler import DeviceSampler, SamplingColumns, TritonSampler
from tests.worker.gpu.test_device_sampler import WISHES, both


@pytest.mark.parametrize(
    ("vocab_size", "spread"),
    [
        (7, 3.0),
        *(pytest.param(*sizes, marks=pytest.mark.long) for sizes in product((7, 512, 4096, 9000), (0.1, 3.0))),
    ],
)
def test_every_parameter_draws_the_hosts_tokens(
    vocab_size: int, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One batch has all parameters, and more rows than the sampler truncates at once."""
    monkeypatch.setattr(TritonSampler, "rows_at_once", 8)
    generator = torch.Generator().manual_seed(vocab_size)
    params = [SamplingParams(**wish) for wish in WISHES]
    wanted, got = both(spread * torch.randn(len(params), vocab_size, generator=generator), params, TritonSampler())
    assert got == wanted


@pytest.mark.parametrize("wish", [{"top_k": 3}, {"top_p": 0.7}, {"top_p": 0.26, "top_k": 6}, {}], ids=str)
def test_equal_logits_are_cut_where_the_host_cuts_them(wish: dict[str, Any]) -> None:
    """Rows have five distinct logits, among them both zeros and a token of weight 0. Equal logits lie in two chunks."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.tensor([-1.0, -0.0, 0.0, 1.0, -torch.inf])[torch.randint(5, (2, 40), generator=generator)]
    logits = torch.cat([logits, torch.full((2, 2048), -torch.inf), logits], dim=1)
    wanted, got = both(logits, [SamplingParams(temperature=1.0, **wish)] * len(logits), TritonSampler())
    assert got == wanted


def test_the_kept_weights_are_those_of_torchs_operations() -> None:
    """Each row has other limits: min_p, top_k and top_p."""
    generator = torch.Generator().manual_seed(2)
    rows = [(0.0, 40, 0.9), (0.2, 2100, 0.5), (0.0, 2100, 0.001), (0.01, 3, 0.7), (0.0, 2100, 1.0), (0.0, 2100, 0.99)]
    logits = torch.randn(len(rows), 2100, generator=generator).mul_(2.0).round_(decimals=1)
    min_p, top_k, top_p = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    heat, states = torch.tensor([1.0, 0.5, 3.0, 0.0, 1.0, 2.0]).double(), torch.arange(len(rows))
    columns = SamplingColumns(heat, top_p, min_p, top_k.long(), states, True, True, True)
    kept = [
        sampler.kept_weights(logits, sampler.peaks(logits), columns) for sampler in (DeviceSampler(), TritonSampler())
    ]
    assert kept[0] is not None
    assert kept[1] is not None
    assert torch.equal(kept[0] > 0, kept[1] > 0)
    assert torch.allclose(*kept, rtol=1e-6)


def test_nothing_is_cut_of_a_row_without_numbers() -> None:
    logits = torch.full((2, 40), torch.nan)
    logits[1, 3:] = torch.arange(37.0)
    _, got = both(logits, [SamplingParams(top_p=0.5, top_k=3)] * 2, TritonSampler())
    assert all(0 <= token < 40 for token in got)


@pytest.mark.parametrize("vocab_size", [3, 4096, 4097, 20000])
def test_peaks_are_torchs(vocab_size: int) -> None:
    """The first of equal logits, rows with NaN and infinities, and rows that are parts of wider ones."""
    generator = torch.Generator().manual_seed(vocab_size)
    wide = torch.randint(-4, 4, (9, vocab_size + 5), generator=generator).float()
    logits = wide[:, :vocab_size]
    logits[1] = -torch.inf
    logits[2, -1] = torch.inf
    logits[3, vocab_size // 2] = torch.nan
    peaks = TritonSampler().peaks(logits)
    assert torch.equal(peaks.values.nan_to_num(99.0), logits.amax(dim=1).nan_to_num(99.0))
    assert peaks.tokens.tolist() == [int(row.argmax()) if at != 3 else 0 for at, row in enumerate(logits)]
