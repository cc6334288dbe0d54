"""Quantized models in a worker's steps, by the native decoder and layer by layer, equal their dequantized weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from raylm.errors import ConfigError
from raylm.worker.forward import ModuleForward, NativeForward
from tests.checkpoints import make_checkpoint
from tests.models.quantization.quantized_checkpoints import SCHEMES, Scheme, quantize_checkpoint, round_inputs
from tests.worker.driver import Driver, Reference, random_prompt

INT8, *INT4 = SCHEMES
LENGTHS = [1, 17, 40, 23]


def make(path: Path, scheme: Scheme, **overrides: Any) -> tuple[Path, Path]:
    source = make_checkpoint(path / "source", "qwen3", tokenizer=False, **overrides)
    quantize_checkpoint(source, scheme, path / "quantized", path / "meant")
    return path / "quantized", path / "meant"


def run_together(driver: Driver, steps: int) -> None:
    """Prompts of several lengths in one step, then decoding in parallel."""
    for seq_id, length in enumerate(LENGTHS):
        driver.add(seq_id, random_prompt(length, seq_id))
    driver.step(dict(enumerate(LENGTHS)))
    for _ in range(steps):
        driver.step(dict.fromkeys(range(len(LENGTHS)), 1))


def rounded_reference(meant: Path, scheme: Scheme) -> Reference:
    """The reference for the dequantized weights, with inputs rounded to 8 bits as in the kernels."""
    reference = Reference(meant)
    round_inputs(reference.model, ("lm_head", *scheme.kept), scheme.group)
    return reference


def median_error(driver: Driver, reference: Reference) -> float:
    """The median over tokens of their largest error. 8 bits round a few values differently, see tests/models."""
    found: list[Tensor] = []
    for seq in driver.sequences.values():
        with torch.inference_mode():
            wanted = torch.cat([reference.model(torch.tensor([seq.tokens[: seq.computed]])).logits[0]])
        got = torch.stack([seq.logits[position] for position in sorted(seq.logits)])
        found.append((got - wanted).abs().amax(1) / wanted.abs().max())
    return float(torch.cat(found).median())


@pytest.mark.parametrize("scheme", INT4, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("tied", [False, True])
def test_the_native_walk_equals_what_the_checkpoint_means(tmp_path: Path, scheme: Scheme, tied: bool) -> None:
    quantized, meant = make(tmp_path, scheme, tie_word_embeddings=tied)
    driver = Driver(quantized, dtype="float32")
    assert isinstance(driver.runner.forward, NativeForward)
    run_together(driver, 5)
    reference = rounded_reference(meant, scheme)
    assert median_error(driver, reference) < 1e-4
    for seq in driver.sequences.values():
        assert seq.tokens == reference.greedy(seq.tokens[: seq.num_prompt_tokens], 6)


def test_the_native_walk_rounds_rows_to_8_bits(tmp_path: Path) -> None:
    quantized, meant = make(tmp_path, INT8)
    driver = Driver(quantized, dtype="float32")
    run_together(driver, 5)
    assert median_error(driver, Reference(meant)) > 1e-3
    assert median_error(driver, rounded_reference(meant, INT8)) < 1e-5


@pytest.mark.parametrize("scheme", [INT8, INT4[0], INT4[-1]], ids=lambda scheme: scheme.name)
def test_bfloat16_activations_stay_near(tmp_path: Path, scheme: Scheme) -> None:
    quantized, meant = make(tmp_path, scheme)
    driver, reference = Driver(quantized, dtype="bfloat16"), Reference(meant)
    run_together(driver, 3)
    assert 1e-4 < median_error(driver, reference) < 5e-2


def test_layer_by_layer_is_the_same(tmp_path: Path) -> None:
    """A head_dim that the native decoder does not support."""
    quantized, meant = make(tmp_path, INT4[0], head_dim=24)
    driver = Driver(quantized, dtype="float32")
    assert isinstance(driver.runner.forward, ModuleForward)
    run_together(driver, 2)
    assert median_error(driver, rounded_reference(meant, INT4[0])) < 1e-4


@pytest.mark.parametrize(("asked", "bound"), [("int8", 0.05), ("int4", 0.4)])
@pytest.mark.parametrize("tied", [False, True])
def test_asked_for_at_start(tmp_path: Path, asked: str, bound: float, tied: bool) -> None:
    path = make_checkpoint(tmp_path, "qwen3", tokenizer=False, tie_word_embeddings=tied)
    plain = Driver(path, dtype="bfloat16")
    assert plain.info.quantization is None
    driver = Driver(path, dtype="bfloat16", quantization=asked)
    assert str(driver.info.quantization).startswith(asked)
    assert 0.2 < driver.info.weights_bytes / plain.info.weights_bytes < 1.3
    run_together(driver, 4)
    assert median_error(driver, Reference(path)) < bound


def test_a_batch_does_not_change_anothers_numbers(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3", tokenizer=False)
    for asked in ("int8", "int4"):
        together, alone = (Driver(path, dtype="float32", quantization=asked) for _ in range(2))
        run_together(together, 0)
        alone.add(2, random_prompt(LENGTHS[2], 2))
        alone.step({2: LENGTHS[2]})
        for position, logits in alone.sequences[2].logits.items():
            assert torch.allclose(logits, together.sequences[2].logits[position], atol=1e-4)


def test_refused_at_start(tmp_path: Path) -> None:
    quantized, _ = make(tmp_path, INT4[-1])
    with pytest.raises(ConfigError, match=r"quantization: .* quantized already"):
        Driver(quantized, quantization="int8")
