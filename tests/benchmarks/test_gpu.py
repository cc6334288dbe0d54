"""The GPU benchmark runs from end to end on a CPU, without ray, and its calculated figures are right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.device import covered
from benchmarks.gpu.greedy import compare
from raylm.frontend import TokenLogprob
from raylm.llm_engine import Completion

ROOT = Path(__file__).parents[2]
BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ray":
            raise ModuleNotFoundError("No module named 'ray'", name=name)

sys.meta_path.insert(0, Blocked())
"""


def test_it_runs_on_a_cpu_and_without_ray(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCKED)
    out = tmp_path / "results"
    command = (
        "--device cpu --shape tiny --batch 1 3 --context 40 --prefill 64 --num-stages 3 --requests 5 --engines raylm"
    )
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *command.split(), "--steps", "3", "--out", str(out)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    rows = [json.loads(line) for line in (out / "gpu.jsonl").read_text().splitlines()]
    machine, questions, beginnings, device, about, one, three, prompt, *rest = rows
    assert machine["device"]
    for greedy in (questions, beginnings):
        assert greedy["equal"] == greedy["prompts"] == 20
        assert greedy["margins"] == []
    assert device["GB_s"] > 0
    assert (about["shape"], about["num_stages"]) == ("tiny", 3)
    assert [row["batch"] for row in (one, three)] == [1, 3]
    # The embedding is not read. The keys and values of 40 tokens are 10,240 bytes.
    assert one["floor_ms"] * device["GB_s"] * 1e6 == pytest.approx(2 * (one_weights() - 512 * 64) + 10_240, rel=1e-6)
    assert three["floor_ms"] - one["floor_ms"] == pytest.approx(2 * 10_240 / device["GB_s"] / 1e6, rel=1e-6)
    assert one["share"] == pytest.approx(one["floor_ms"] / one["eager_ms"])
    assert prompt["tok_s"] == pytest.approx(64e3 / prompt["ms"])
    mixed, offline, theirs, (vllm,) = rest[:2], rest[2], rest[3:5], rest[5:]
    assert [(row["mixed"], row["batch"]) for row in mixed] == [(64, 1), (64, 3)]
    assert (offline["requests"], offline["engine"], offline["wrong"]) == (5, "raylm", 0)
    assert [row["batch"] for row in theirs] == [1, 3]
    assert all("transformers_ms" in row for row in theirs)
    assert vllm["left_out"] == "vllm is not installed"  # `make test` does not install it either
    assert all(row[f"{name}_ms"] > 0 for row in (one, three) for name in ("sampled", "top_p", "penalties", "logprobs"))


def one_weights() -> int:
    """The number of weights of the tiny shape: embedding and head, two layers with norms, and the last norm."""
    layer = 64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 128 + 2 * 64
    return 2 * 512 * 64 + 2 * layer + 64


def test_covered_time_counts_what_overlaps_once() -> None:
    assert covered([]) == 0
    assert covered([(0, 2), (5, 6), (1, 3), (5, 5.5)]) == 4


def test_answers_that_part_are_told_with_their_margins() -> None:
    def completion(tokens: list[int]) -> Completion:
        tops = [[(token, -0.1), (999, -0.1 - 0.5**place)] for place, token in enumerate(tokens)]
        logprobs = [TokenLogprob(token, -0.1, 1, top) for token, top in zip(tokens, tops, strict=True)]
        return Completion(0, "", tokens, "length", logprobs=logprobs)

    row = compare([completion([1, 2, 3]), completion([4, 5, 6])], [completion([1, 2, 3]), completion([4, 5, 7])])
    assert row == {"prompts": 2, "tokens": 6, "equal": 1, "margins": [pytest.approx(0.25)]}
