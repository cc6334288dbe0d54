"""Everything that changes tokens changes the fingerprint. A fingerprint without a guarantee ends with ``_varies``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from raylm.config import Config
from raylm.worker.startup import start_runner
from tests.checkpoints import make_checkpoint


def fingerprint_of(path: Path, **config: Any) -> str:
    knobs = {"model": str(path), "cache": {"num_blocks": 8}, "engine": {"threads": 1}} | config
    return start_runner(Config.model_validate(knobs))[1].fingerprint


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), tokenizer=False)


def test_what_does_not_change_the_tokens_does_not_change_it(path: Path, tmp_path: Path) -> None:
    copied = make_checkpoint(tmp_path, tokenizer=False)
    found = {
        fingerprint_of(path),
        fingerprint_of(copied),
        fingerprint_of(path, engine={"threads": 3}),
        fingerprint_of(path, cache={"num_blocks": 20, "block_size": 32}),
        fingerprint_of(path, scheduler={"max_num_seqs": 2}),
    }
    assert len(found) == 1
    assert not found.pop().endswith("_varies")


def test_guesses_do_not_change_it(path: Path) -> None:
    assert fingerprint_of(path, scheduler={"speculative_tokens": 3}) == fingerprint_of(path)


def test_quantization_changes_it(path: Path) -> None:
    assert len({fingerprint_of(path), *(fingerprint_of(path, quantization=name) for name in ("int8", "int4"))}) == 3


def test_what_changes_the_tokens_changes_it(path: Path, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", tokenizer=False)
    weights = load_file(other / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight"] *= 1.001
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    scaled = make_checkpoint(tmp_path / "scaled", tokenizer=False, rms_norm_eps=1e-3)
    found = [
        fingerprint_of(path),
        fingerprint_of(path, dtype="bfloat16"),
        fingerprint_of(other),
        fingerprint_of(scaled),
    ]
    assert len(set(found)) == len(found)


def test_a_path_without_the_promise_says_so(tmp_path: Path) -> None:
    assert fingerprint_of(make_checkpoint(tmp_path, tokenizer=False, head_dim=24)).endswith("_varies")
