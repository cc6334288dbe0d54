"""The sampler's kernels in Triton's interpreter; test_device_sampler.py runs this in a process of its own."""

from __future__ import annotations

import pytest
import torch

from raylm.params import SamplingParams
from raylm.worker.gpu.device_sampler import TritonSampler
from tests.worker.gpu.test_device_sampler import WISHES, both


@pytest.mark.parametrize("vocab_size", [7, 512, 4096, 9000])
@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_every_parameter_draws_the_hosts_tokens(vocab_size: int, spread: float) -> None:
    """In one batch, of more rows than are truncated at once."""
    generator = torch.Generator().manual_seed(vocab_size)
    params = [SamplingParams(**wish) for wish in WISHES] * 3
    wanted, got = both(spread * torch.randn(len(params), vocab_size, generator=generator), params, TritonSampler())
    assert got == wanted


def test_tokens_without_a_weight_are_not_drawn() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.tensor([-1.0, -0.0, 0.0, 1.0, -torch.inf])[torch.randint(5, (64, 40), generator=generator)]
    wanted, got = both(logits, [SamplingParams(temperature=1.0)] * 64, TritonSampler())
    assert got == wanted


@pytest.mark.parametrize("vocab_size", [3, 4096, 4097, 20000])
def test_peaks_are_torchs(vocab_size: int) -> None:
    """The first of equal logits; NaN and infinities are seen; rows may be parts of wider ones."""
    generator = torch.Generator().manual_seed(vocab_size)
    wide = torch.randint(-4, 4, (9, vocab_size + 5), generator=generator).float()
    logits = wide[:, :vocab_size]
    logits[1] = -torch.inf
    logits[2, -1] = torch.inf
    logits[3, vocab_size // 2] = torch.nan
    peaks = TritonSampler().peaks(logits)
    assert torch.equal(peaks.values.nan_to_num(99.0), logits.amax(dim=1).nan_to_num(99.0))
    assert peaks.tokens.tolist() == [int(row.argmax()) if at != 3 else 0 for at, row in enumerate(logits)]
