"""The profiled step is as large as the limits allow, and valid for the runner."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raylm.checkpoint import Checkpoint
from raylm.models import load_model
from raylm.worker.attention import BACKENDS, StepLimits
from raylm.worker.memory import _lengths, profile_run
from tests.checkpoints import make_checkpoint


@given(tokens=st.integers(1, 5000), seqs=st.integers(1, 300), longest=st.integers(1, 3000))
def test_lengths_are_as_many_and_as_long_as_allowed(tokens: int, seqs: int, longest: int) -> None:
    lengths = _lengths(tokens, seqs, longest)
    assert len(lengths) == min(seqs, tokens)
    assert lengths == sorted(lengths)
    assert lengths[0] >= 1
    assert lengths[-1] <= longest
    assert sum(lengths) == min(tokens, len(lengths) * longest)


@pytest.mark.parametrize(("tokens", "seqs"), [(16, 1), (40, 64), (512, 3)])
def test_runs_within_any_limits(tmp_path: Path, tokens: int, seqs: int) -> None:
    make_checkpoint(tmp_path, "qwen3", tokenizer=False)
    model, _ = load_model(Checkpoint(tmp_path), torch.float32, torch.device("cpu"))
    limits = StepLimits(tokens, seqs, 16, 16)
    assert profile_run(model, BACKENDS["sdpa"], limits, 256, torch.float32, torch.device("cpu")) == 0
