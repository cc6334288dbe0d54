"""GGUF files are loaded as the same models as the checkpoints from which they are written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file

from raylm.checkpoint import resolve
from raylm.errors import ConfigError
from raylm.gguf import directory
from raylm.models import load_model
from raylm.models.checkpoint_check import check_checkpoint
from raylm.models.gguf_weights import KINDS, GgufWeights
from raylm.models.linear import Linear
from raylm.models.llama import LlamaForCausalLM
from raylm.models.quantization.gguf_blocks import _READERS, GgufBlocks
from raylm.native import Int4Weight, Int8Weight
from tests.checkpoints import make_checkpoint
from tests.gguf_files import make_gguf
from tests.models.test_decoder import attend
from tests.ranks import Apart
from tests.worker.driver import Driver

CPU = torch.device("cpu")
WRITTEN = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")  # types that the package can write
BIASES = {
    "qwen2": {},
    "qwen3": {"attention_bias": True},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {},
}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "_cache", lambda: tmp_path / "cache")


def loaded(path: Path, **knobs: Any) -> torch.nn.Module:
    return load_model(resolve(str(path)), torch.float32, CPU, **knobs)[0]


@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
@pytest.mark.parametrize("family", list(BIASES))
def test_each_family_has_the_weights_of_its_checkpoint(tmp_path: Path, family: str, tied: bool) -> None:
    source = make_checkpoint(tmp_path / "source", family, tie_word_embeddings=tied, **BIASES[family])
    checkpoint = resolve(str(make_gguf(source, tmp_path / "model.gguf")))
    check_checkpoint(checkpoint)
    weights, wanted = GgufWeights(checkpoint), load_file(source / "model.safetensors")
    assert weights.tensors.keys() == wanted.keys() | {"lm_head.weight"}
    for name, values in wanted.items():
        assert torch.equal(weights.read(name, torch.float32), values), name
    config = json.loads((source / "config.json").read_text())
    kept = {"vocab_size", "hidden_size", "num_hidden_layers", "rms_norm_eps", "tie_word_embeddings", "eos_token_id"}
    assert {name: checkpoint.config[name] for name in kept} == {name: config[name] for name in kept}
    load_model(checkpoint, torch.float32, CPU)


def gemma3(folder: Path) -> tuple[Path, Any]:
    """A checkpoint of Gemma 3, and its configuration."""
    sizes = {
        "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 7, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8,
        "max_position_embeddings": 256,
    }  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**sizes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.copy_(torch.randint(-50, 50, parameter.shape) / 128)  # adding one is exact
    source = folder / "source"
    model.save_pretrained(source)
    make_checkpoint(folder / "other")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (source / file).write_text((folder / "other" / file).read_text())
    return source, model.config


def test_gemma3_has_the_weights_of_its_checkpoint(tmp_path: Path) -> None:
    source, config = gemma3(tmp_path)
    checkpoint = resolve(str(make_gguf(source, tmp_path / "model.gguf")))
    weights, wanted = GgufWeights(checkpoint), load_file(source / "model.safetensors")
    for name, values in wanted.items():
        assert torch.equal(weights.read(name, torch.float32), values), name
    again = transformers.AutoConfig.from_pretrained(checkpoint.path)
    for name in ("layer_types", "rope_parameters", "sliding_window", "query_pre_attn_scalar", "hidden_activation"):
        assert getattr(again, name) == getattr(config, name), name
    load_model(checkpoint, torch.float32, CPU)


def blocks(kind: str, rows: int, inputs: int) -> np.ndarray[Any, Any]:
    """Random blocks of a type that the package cannot write: random bytes, with valid scales."""
    size, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    found = np.random.default_rng(0).integers(0, 256, (rows * inputs // size, nbytes), np.uint8)
    scales = {"Q2_K": (-4, -2), "Q3_K": (-2,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (-2,)}[kind]
    for start in scales:
        found[:, [start, start + 1]] = np.array([0.01], np.float16).view(np.uint8)
    return found.reshape(rows, -1)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_each_kind_is_dequantized_as_by_the_package(tmp_path: Path, kind: str) -> None:
    source = make_checkpoint(tmp_path / "source", "qwen3", hidden_size=256, intermediate_size=512)
    rows, inputs = 256, 512
    if kind in WRITTEN:
        stored = quantize(
            np.random.default_rng(1).normal(size=(rows, inputs)).astype(np.float32), GGMLQuantizationType[kind]
        )
    else:
        stored = blocks(kind, rows, inputs)
    wanted = dequantize(stored, GGMLQuantizationType[kind])
    assert np.isfinite(wanted).all()

    file = make_gguf(source, tmp_path / "model.gguf", replaced={"blk.0.ffn_down.weight": (stored, kind)})
    weights = GgufWeights(resolve(str(file)))
    name = "model.layers.0.mlp.down_proj.weight"
    assert weights.tensors[name].kind == kind
    assert torch.equal(weights.read(name, torch.float32), torch.from_numpy(wanted))
    assert torch.equal(weights.read(name, torch.bfloat16), torch.from_numpy(wanted).bfloat16())


@pytest.mark.parametrize("kind", sorted(_READERS))
def test_what_stays_quantized_has_the_values_of_its_blocks(kind: str) -> None:
    rows, inputs = 48, 512
    if kind in WRITTEN:
        values = np.random.default_rng(1).normal(size=(rows, inputs)).astype(np.float32)
        stored = quantize(values, GGMLQuantizationType[kind])
    else:
        stored = blocks(kind, rows, inputs)
    layer = Linear(inputs, {"part": rows}, bias=False)
    layer.store(GgufBlocks({"part": kind}), {"part": {"weight": torch.from_numpy(stored)}})
    weight = layer.format.weight(layer)
    assert isinstance(weight, (Int4Weight, Int8Weight))
    assert torch.equal(plain(weight), torch.from_numpy(dequantize(stored, GGMLQuantizationType[kind])))


def plain(weight: Int4Weight | Int8Weight) -> torch.Tensor:
    """The dequantized weights in float32."""
    size = weight.values.shape[1] // weight.scales.shape[1]
    scales = weight.scales.repeat_interleave(size, 1)
    if weight.offsets is not None:
        return weight.values * scales + weight.offsets.repeat_interleave(size, 1)
    return (weight.values.float() - (8 if isinstance(weight, Int4Weight) else 0)) * scales


@pytest.mark.parametrize(
    "kinds",
    [
        {"q_proj": "Q4_0", "k_proj": "Q4_1", "v_proj": "Q4_0"},
        {"q_proj": "Q4_0", "k_proj": "Q5_0", "v_proj": "Q8_0"},
        {"q_proj": "Q4_K", "k_proj": "Q4_K", "v_proj": "Q6_K"},
        {"q_proj": "Q5_K", "k_proj": "Q5_1", "v_proj": "Q4_1"},
    ],
    ids=lambda kinds: "-".join(kinds.values()),
)
def test_parts_of_several_types_form_one_layer(kinds: dict[str, str]) -> None:
    stored, wanted = {}, []
    for part, kind in kinds.items():
        values = np.random.default_rng(len(stored)).normal(size=(16, 256)).astype(np.float32)
        rows = quantize(values, GGMLQuantizationType[kind]) if kind in WRITTEN else blocks(kind, 16, 256)
        stored[part] = {"weight": torch.from_numpy(rows)}
        wanted.append(torch.from_numpy(dequantize(rows, GGMLQuantizationType[kind])))
    layer = Linear(256, dict.fromkeys(kinds, 16), bias=False)
    layer.store(GgufBlocks(kinds), stored)
    torch.testing.assert_close(plain(layer.format.weight(layer)), torch.cat(wanted), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_a_model_in_blocks_gives_about_the_logits_of_its_floats(
    tmp_path: Path, kind: str, family: str, tied: bool
) -> None:
    """Only the inputs of its layers are rounded to 8 bits. Rounding the weights again would give larger errors."""
    source = make_checkpoint(tmp_path / "source", family, tie_word_embeddings=tied)
    file = make_gguf(source, tmp_path / "model.gguf", kind)
    kept, floats = loaded(file), loaded(file, quantization="none")
    assert (kept.quantization, floats.quantization) == (f"GGUF, {kind}", None)
    assert (kept.lm_head.kernel.dtype, floats.lm_head.kernel.dtype) == (None, torch.float32)
    tokens, positions = torch.arange(2, 34), torch.arange(32)
    with torch.inference_mode():
        got, wanted = (model.logits(model(tokens, positions, attend)) for model in (kept, floats))
    assert float((got - wanted).norm() / wanted.norm()) < 0.05


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_1", "Q8_0"])
def test_a_step_in_one_native_call_computes_what_the_layers_compute(tmp_path: Path, kind: str) -> None:
    file = make_gguf(make_checkpoint(tmp_path / "source"), tmp_path / "model.gguf", kind)
    driver = Driver(file, num_blocks=64, dtype="float32", engine={"threads": 1})
    tokens, model = torch.arange(2, 34), loaded(file)
    driver.add(0, tokens.tolist())
    driver.step({0: len(tokens)})
    found = driver.finish(0).logits
    with torch.inference_mode():
        wanted = model.logits(model(tokens, torch.arange(32), attend))
    got = torch.stack([found[place] for place in sorted(found)])
    assert float((got - wanted[sorted(found)]).norm() / wanted.norm()) < 0.01


def test_a_model_of_transformers_keeps_its_blocks(tmp_path: Path) -> None:
    source = gemma3(tmp_path)[0]
    file = make_gguf(source, tmp_path / "model.gguf", "Q8_0")
    kept, floats = loaded(file), loaded(file, quantization="none")
    assert (kept.quantization, floats.quantization) == ("GGUF, Q8_0", None)
    tokens, positions = torch.arange(2, 34), torch.arange(32)
    with torch.inference_mode():
        got, wanted = (model.logits(model(tokens, positions, attend)) for model in (kept, floats))
    assert float((got - wanted).norm() / wanted.norm()) < 0.05


def test_a_matrix_of_another_width_is_refused(tmp_path: Path) -> None:
    source, _ = gemma3(tmp_path)
    stored = quantize(np.zeros((96, 96), np.float32), GGMLQuantizationType.Q8_0)
    replaced = {"blk.0.ffn_up.weight": (stored, "Q8_0")}
    file = make_gguf(source, tmp_path / "model.gguf", "Q8_0", replaced=replaced)
    with pytest.raises(ConfigError, match=r"up_proj.weight has the shape \(96, 96\), config.json requires \(96, 64\)"):
        loaded(file)


def test_llama_3s_frequencies_come_from_their_tensor(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    source = make_checkpoint(tmp_path / "source", rope_parameters=scaling)
    wanted = load_model(resolve(str(source)), torch.float32, CPU)[0].config.rope
    plain = make_checkpoint(tmp_path / "plain")
    plainly = load_model(resolve(str(plain)), torch.float32, CPU)[0].config.rope
    factors = (plainly.inv_freq / wanted.inv_freq).numpy()

    def change(writer: GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", factors)

    rope = loaded(make_gguf(source, tmp_path / "model.gguf", change=change)).config.rope
    torch.testing.assert_close(rope.inv_freq, wanted.inv_freq, rtol=1e-6, atol=0)
    assert not torch.equal(rope.inv_freq, plainly.inv_freq)


def test_a_model_in_parts_is_one_model(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source")
    first = make_gguf(source, tmp_path / "model.gguf", parts=3)
    parts = sorted(tmp_path.glob("model-*.gguf"))
    assert [part.name for part in parts] == [f"model-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    wanted = load_file(source / "model.safetensors")
    for part in (first, parts[2]):
        checkpoint = resolve(str(part))
        assert checkpoint.weight_bytes == sum(file.stat().st_size for file in parts)
        weights = GgufWeights(checkpoint)
        assert all(torch.equal(weights.read(name, torch.float32), values) for name, values in wanted.items())
    parts[1].unlink()
    with pytest.raises(ConfigError, match=r"has no model-00002-of-00003\.gguf, a part of the model"):
        resolve(str(first))


def test_a_rank_reads_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaForCausalLM, "freeze", lambda *_: None)  # freeze packs the weights
    source = make_checkpoint(tmp_path / "source")
    file = make_gguf(source, tmp_path / "model.gguf")
    of_file, of_checkpoint = (
        load_model(resolve(str(path)), torch.float32, CPU, ranks=Apart(1, 2))[0].targets() for path in (file, source)
    )
    assert of_file.keys() == of_checkpoint.keys()
    assert all(torch.equal(of_file[name], values) for name, values in of_checkpoint.items())


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_1"])
def test_logits_are_those_of_transformers_on_the_same_file(tmp_path: Path, kind: str) -> None:
    """transformers reads the file with its own code."""
    source = make_checkpoint(tmp_path / "source", tie_word_embeddings=True)
    file = make_gguf(source, tmp_path / "model.gguf", kind)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    theirs = theirs.eval()
    model = loaded(file, quantization="none")
    tokens = torch.arange(2, 34)
    with torch.inference_mode():
        wanted = theirs(tokens[None]).logits[0]
        got = model.logits(model(tokens, torch.arange(len(tokens)), attend))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)
