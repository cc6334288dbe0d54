"""Tokens drawn on the device equal the host sampler's, with the same random numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raylm.messages import NewSequence
from raylm.params import SamplingParams
from raylm.worker.gpu import device_sampler
from raylm.worker.gpu.device_sampler import DeviceSampler, SamplingUploads, TritonSampler, descend
from raylm.worker.input_batch import InputBatch
from raylm.worker.sampling import draw as host
from raylm.worker.sampling.sampler import Sampler

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
BITS = st.integers(-(2**63), 2**63 - 1)


@given(states=st.lists(BITS, min_size=1, max_size=5), index=st.lists(st.integers(0, 2**33), min_size=1, max_size=5))
def test_the_random_bits_are_the_hosts(states: list[int], index: list[int]) -> None:
    columns, places = np.array(states, np.int64), np.array(index, np.int64)
    wanted = host.nth_output(columns.view(np.uint64)[:, None], places.view(np.uint64))
    got = device_sampler.nth_output(torch.from_numpy(columns)[:, None], torch.from_numpy(places))
    assert np.array_equal(got.numpy().view(np.uint64), wanted)
    times = device_sampler.exponentials(torch.from_numpy(columns), torch.from_numpy(places)).numpy()
    assert np.allclose(times, host.exponentials(columns.view(np.uint64), places), rtol=1e-14)


def both(
    logits: torch.Tensor, params: list[SamplingParams], sampler: DeviceSampler | None = None
) -> tuple[list[int], list[int]]:
    """The tokens that the host and the device draw from rows of logits."""
    sampler, length = sampler or DeviceSampler(), 3
    batch = InputBatch(len(params), 64, 16, logits.shape[1])
    for at, wish in enumerate(params):
        batch.add(NewSequence(at, [1] * (length + at % 4), length, [0], wish, seed=1000 * at + 7))
    rows = np.arange(len(params))
    wanted = Sampler().sample(logits.clone(), rows, batch).token_ids
    columns = SamplingUploads(len(params), CPU).upload(batch.sampling[rows], batch.num_tokens[rows], logits.shape[1])
    return wanted.tolist(), sampler.draw(logits, sampler.peaks(logits), columns).tolist()


WISHES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 1e-40},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 2.0, "top_p": 0.999},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.5, "top_k": 40},
    {"temperature": 1.5, "top_k": 700},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.2, "min_p": 0.01, "top_k": 50, "top_p": 0.8},
    {"temperature": 0.0, "top_p": 0.5, "top_k": 3},
]


@pytest.mark.parametrize("vocab_size", [7, 512, 3000])
@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_every_parameter_draws_the_hosts_tokens(vocab_size: int, spread: float) -> None:
    """The batch has more rows than are drawn at once."""
    generator = torch.Generator().manual_seed(vocab_size)
    params = [SamplingParams(**wish) for wish in WISHES] * 5
    wanted, got = both(spread * torch.randn(len(params), vocab_size, generator=generator), params)
    assert got == wanted


@pytest.mark.parametrize(
    "wish", [{"top_k": 3}, {"top_p": 0.5}, {"top_p": 0.26, "top_k": 6}, {"min_p": 0.5}, {}], ids=str
)
def test_equal_logits_are_cut_where_the_host_cuts_them(wish: dict[str, Any]) -> None:
    """Few distinct logits, with both zeros, and tokens that cannot be drawn."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.tensor([-1.0, -0.0, 0.0, 1.0, -torch.inf])[torch.randint(5, (64, 40), generator=generator)]
    wanted, got = both(logits, [SamplingParams(temperature=1.0, **wish)] * 64)
    assert got == wanted


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_descend_finds_the_key_where_the_sum_is_reached(data: st.DataObject) -> None:
    keys = data.draw(st.lists(st.integers(0, 2**32 - 1) | st.sampled_from([0, 5, 2**32 - 1]), min_size=1, max_size=30))
    masses = data.draw(st.lists(st.integers(0, 2**40), min_size=len(keys), max_size=len(keys)))
    wanted = data.draw(st.integers(1, max(1, sum(masses))))
    (key,), (above,) = descend(torch.tensor([keys]), torch.tensor([masses]), torch.tensor([wanted]))
    sums = {cut: sum(mass for each, mass in zip(keys, masses, strict=True) if each >= cut) for cut in keys}
    reaching = [cut for cut, total in sums.items() if total >= wanted]
    if reaching:
        assert int(key) == max(reaching)
        assert int(above) == sum(mass for each, mass in zip(keys, masses, strict=True) if each > int(key))
    else:
        assert int(key) == 0


def test_other_random_numbers_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: one constant of the random generator is changed."""
    monkeypatch.setattr(device_sampler, "_MULTIPLIER_1", device_sampler._MULTIPLIER_1 + 2)
    wanted, got = both(torch.randn(8, 512, generator=torch.Generator().manual_seed(3)), [SamplingParams()] * 8)
    assert got != wanted


def test_the_kernels_in_tritons_interpreter() -> None:
    """In a separate process, because the interpreter is chosen for a whole process."""
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/worker/gpu/interpreted_sampler.py"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_without_triton_torch_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(device_sampler.sampler_for(torch.device("cuda"))) is TritonSampler
    assert type(device_sampler.sampler_for(CPU)) is DeviceSampler
    monkeypatch.setattr(device_sampler, "find_spec", lambda name: None)
    assert type(device_sampler.sampler_for(torch.device("cuda"))) is DeviceSampler
