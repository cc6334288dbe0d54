"""Ranks of one model in threads draw the same tokens as one worker, once. A rank reports the loss of another one."""

from __future__ import annotations

import stat
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from raylm.config import Config
from raylm.errors import PeerLostError
from raylm.messages import Logprobs
from raylm.models import Ranks
from raylm.params import SamplingParams
from raylm.worker import startup
from raylm.worker.distributed import process_group
from raylm.worker.distributed.process_group import join_ranks
from raylm.worker.distributed.rendezvous import Rendezvous, open_rendezvous
from raylm.worker.forward import ModuleForward
from raylm.worker.startup import start_runner
from tests.checkpoints import make_checkpoint
from tests.ranks import on_all_ranks, one_at_a_time
from tests.worker.driver import Driver, Reference, random_prompt

T = TypeVar("T")
ALL_KINDS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.8, top_k=20, repetition_penalty=1.2, logprobs=3),
    SamplingParams(temperature=1.3, top_p=0.9, prompt_logprobs=2),
]


@pytest.fixture(autouse=True)
def _load_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "load_model", one_at_a_time(startup.load_model))


def meet(size: int, work: Callable[[Rendezvous], T]) -> list[T]:
    """The result of ``work`` on each rank. The ranks share a rendezvous."""
    first = open_rendezvous()
    meetings = [first, *(Rendezvous(rank, first.path) for rank in range(1, size))]
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(work, meetings))


def drive(path: Path, rendezvous: Rendezvous | None = None, size: int = 1) -> tuple[Driver, list[Logprobs]]:
    """Run chunked prompts and decoding sequences, with all kinds of sampling."""
    driver = Driver(path, rendezvous=rendezvous, dtype="float32", engine={"tensor_parallel_size": size})
    for seq_id, params in enumerate(ALL_KINDS):
        driver.add(seq_id, random_prompt(9 + 7 * seq_id, seq_id), params)
    told = [driver.step({0: 4}), driver.step({0: 5, 1: 16, 2: 11}), driver.step({0: 1, 1: 1, 2: 12, 3: 30})]
    driver.finish(0)
    told += [driver.step(dict.fromkeys((1, 2, 3), 1)) for _ in range(12)]
    return driver, [logprobs for output in told for _, logprobs in output.prompt_logprobs]


@pytest.mark.parametrize(("family", "size"), [("qwen3", 2), ("llama", 4)])
def test_ranks_draw_what_one_draws_alone(tmp_path: Path, family: str, size: int) -> None:
    make_checkpoint(tmp_path, family, tokenizer=False)
    alone, prompt_logprobs = drive(tmp_path)
    (first, told), *others = meet(size, lambda rendezvous: drive(tmp_path, rendezvous, size))
    for driver, _ in [(first, told), *others]:
        assert isinstance(driver.runner.forward, ModuleForward)
        assert driver.info.tensor_parallel_size == size
        for seq_id, seq in alone.sequences.items():
            assert driver.sequences[seq_id].tokens == seq.tokens
    assert [logprobs.token_ids for logprobs in told] == [logprobs.token_ids for logprobs in prompt_logprobs]
    assert torch.allclose(torch.tensor(told[0].logprobs), torch.tensor(prompt_logprobs[0].logprobs), atol=1e-4)
    assert Reference(tmp_path).error(first.sequences[3]) < 1e-4


def test_bfloat16_goes_through_the_native_kernels_of_each_rank(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3", dtype=torch.bfloat16, tokenizer=False, tie_word_embeddings=True)

    def run(rendezvous: Rendezvous) -> Driver:
        driver = Driver(path, rendezvous=rendezvous, engine={"tensor_parallel_size": 2})
        driver.add(0, random_prompt(40, 0))
        driver.run(0, until=44)
        return driver

    first, second = meet(2, run)
    assert first.info.attention_backend == "cpu"
    assert first.sequences[0].tokens == second.sequences[0].tokens
    assert Reference(path).error(first.sequences[0]) < 3e-2


def test_ranks_have_the_same_blocks_and_share_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, "qwen3", tokenizer=False)
    found = iter([64 << 20, 48 << 20])  # the free memory that each rank measures
    monkeypatch.setattr("raylm.worker.kv_cache.available_memory", lambda: next(found))
    config = Config.model_validate(
        {
            "model": str(tmp_path),
            "scheduler": {"max_num_seqs": 200},
            "engine": {"tensor_parallel_size": 2, "threads": 1},
        }
    )
    infos = [info for _, info in meet(2, lambda rendezvous: start_runner(config, rendezvous))]
    a_block = 16 * 2 * 2 * 1 * 16 * 4  # tokens, layers, k and v, heads of a rank, head_dim, bytes
    assert [info.num_blocks for info in infos] == [int((48 << 20) // 2 * 0.4) // a_block] * 2


def test_operations_between_ranks() -> None:
    def run(ranks: Ranks) -> tuple[list[float], list[list[float]], list[int], list[int]]:
        own = torch.full((2, 2 - ranks.rank // 2), float(ranks.rank))
        return (
            ranks.all_reduce(torch.full((4, 6), 1.0 + ranks.rank)[:, ::2]).flatten().unique().tolist(),
            ranks.gather(own, [2, 2, 1]).tolist(),
            ranks.broadcast(torch.tensor([7 - ranks.rank])).tolist(),
            ranks.all_reduce_min([5 - ranks.rank, ranks.rank]),
        )

    first, second, third = on_all_ranks(3, run)
    assert first == ([6.0], [[0, 0, 1, 1, 2]] * 2, [7], [3, 0])
    assert second == ([6.0], [[1, 1]] * 2, [7], [3, 0])
    assert third[2:] == first[2:]


_GOES = """
import sys, os, torch
from raylm.worker.distributed.rendezvous import Rendezvous
from raylm.worker.distributed import process_group
from raylm.worker.distributed.process_group import join_ranks
ranks = join_ranks(Rendezvous(1, sys.argv[1]), 2, torch.device("cpu"))
ranks.all_reduce(torch.ones(3))
os._exit(9)
"""


def test_a_rank_does_not_wait_for_one_that_is_gone() -> None:
    rendezvous = open_rendezvous()
    with subprocess.Popen([sys.executable, "-c", _GOES, rendezvous.path]) as other:
        ranks = join_ranks(rendezvous, 2, torch.device("cpu"))
        assert ranks.all_reduce(torch.ones(3)).tolist() == [2, 2, 2]
        assert other.wait() == 9
        with pytest.raises(PeerLostError, match="Rank 0 of 2"):
            ranks.all_reduce(torch.ones(3))


def test_a_meeting_is_open_to_its_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a port on loopback, any user of the machine could join the ranks and change their sums."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    rendezvous = open_rendezvous()
    (directory,) = tmp_path.iterdir()
    assert rendezvous.path.startswith(f"{directory}/")
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    with subprocess.Popen([sys.executable, "-c", _GOES, rendezvous.path]) as other:
        join_ranks(rendezvous, 2, torch.device("cpu")).all_reduce(torch.ones(3))
        assert other.wait() == 9
    assert not directory.exists()


def test_ranks_of_which_one_does_not_come_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "TIMEOUT", timedelta(seconds=0.5))
    with pytest.raises(PeerLostError, match="Rank 0 of 2"):
        join_ranks(open_rendezvous(), 2, torch.device("cpu"))
