"""Quantized checkpoints are read as their formats define, plain ones are rounded on demand, and others are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from raylm.checkpoint import Checkpoint
from raylm.errors import ConfigError
from raylm.lazy import Family
from raylm.models import load_model
from raylm.models.quantization import select as quantization
from raylm.native import NativeError, NativeLinear
from tests.checkpoints import make_checkpoint
from tests.models.quantization.quantized_checkpoints import SCHEMES, Scheme, quantize_checkpoint, round_inputs
from tests.models.test_decoder import attend, error, reference_logits
from tests.models.test_loader import edit_config, edit_weights
from tests.ranks import Apart

CPU = torch.device("cpu")
TOKENS = torch.randint(0, 320, (60,), generator=torch.Generator().manual_seed(1))
BY_NAME = {scheme.name: scheme for scheme in SCHEMES}
each_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)


def make(path: Path, scheme: Scheme, family: str = "llama", **overrides: Any) -> tuple[Path, Path]:
    source = make_checkpoint(path / "source", family, tokenizer=False, **overrides)
    quantize_checkpoint(source, scheme, path / "quantized", path / "meant")
    return path / "quantized", path / "meant"


def logits_of(path: Path, asked: str | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    model, _ = load_model(Checkpoint(path), dtype, CPU, asked)
    with torch.inference_mode():
        return model.logits(model(TOKENS, torch.arange(len(TOKENS)), attend))


def reference(path: Path, scheme: Scheme) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    round_inputs(model, ("lm_head", *scheme.kept), scheme.group)
    with torch.inference_mode():
        return model(TOKENS[None]).logits[0]  # type: ignore[no-any-return]


def agrees(got: Tensor, wanted: Tensor) -> bool:
    """Compare medians: a few 8-bit activations are halfway between two steps and may be rounded differently."""
    wrong = (got - wanted).abs().amax(1) / wanted.abs().max()
    return float(wrong.median()) < 1e-4


@each_scheme
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_logits_are_those_of_what_the_checkpoint_means(tmp_path: Path, scheme: Scheme, family: str) -> None:
    quantized, meant = make(tmp_path, scheme, family)
    assert agrees(logits_of(quantized), reference(meant, scheme))
    # The reference must differ from the unquantized model, which a loader would load if it ignored the format.
    assert error(reference(meant, scheme), reference_logits(tmp_path / "source", TOKENS)) > 1e-2


@each_scheme
def test_a_tied_head_stays_plain(tmp_path: Path, scheme: Scheme) -> None:
    quantized, meant = make(tmp_path, scheme, "qwen3", tie_word_embeddings=True)
    assert agrees(logits_of(quantized), reference(meant, scheme))


@pytest.mark.parametrize("name", ["GPTQ", "compressed W8A8"])
def test_the_model_tells_what_it_is_and_what_a_step_reads(tmp_path: Path, name: str) -> None:
    quantized, _ = make(tmp_path, BY_NAME[name])
    model, size = load_model(Checkpoint(quantized), torch.float32, CPU)
    plain, plain_size = load_model(Checkpoint(tmp_path / "source"), torch.float32, CPU)
    assert plain.quantization is None
    assert model.quantization is not None
    assert BY_NAME[name].name.split()[-1].rstrip(",") in model.quantization
    floats = 2 * 64 * 320 + 64 * 5
    assert plain_size == 4 * sum(t.numel() for t in load_file(tmp_path / "source" / "model.safetensors").values())
    inner = plain_size // 4 - floats
    scales = (
        2 * (64 * 2 + 2 * 32 + 2 * 96 + 64) if BY_NAME[name].bits == 8 else inner // 32
    )  # a scale and a zero share a word
    assert size == 4 * floats + inner * BY_NAME[name].bits // 8 + 4 * scales


@pytest.mark.parametrize(("asked", "limits"), [("int8", (1e-3, 0.1)), ("int4", (1e-2, 0.5))])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_weights_are_rounded_on_demand(
    tmp_path: Path, asked: str, limits: tuple[float, float], tied: bool, dtype: torch.dtype
) -> None:
    make_checkpoint(tmp_path, "qwen3", tokenizer=False, tie_word_embeddings=tied)
    wrong = error(logits_of(tmp_path, asked, dtype), reference_logits(tmp_path, TOKENS))
    assert limits[0] < wrong < limits[1]


@pytest.mark.parametrize("asked", ["int8", "int4"])
def test_the_embedding_stays_plain_where_the_head_is_rounded(tmp_path: Path, asked: str) -> None:
    make_checkpoint(tmp_path, "llama", tokenizer=False, tie_word_embeddings=True)
    model, _ = load_model(Checkpoint(tmp_path), torch.float32, CPU, asked)
    saved = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    with torch.inference_mode():
        assert torch.equal(model.get_submodule("model.embed_tokens")(torch.arange(320)), saved)
    head = model.get_submodule("lm_head").kernel
    assert isinstance(head, NativeLinear)
    assert str(model.quantization).startswith(asked)


KV = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False, "group_size": None}


def set_group(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["config_groups"]["group_0"].update(changes)


def set_weights(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["config_groups"]["group_0"]["weights"].update(changes)


def set_inputs(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["config_groups"]["group_0"]["input_activations"].update(changes)


def set_top(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config.update(changes)


@pytest.mark.parametrize(
    ("scheme", "change", "named"),
    [
        ("compressed W8A8", set_top(format="naive-quantized"), r"format is 'naive-quantized'; supported: 'int-quant"),
        ("compressed W8A8", set_top(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme.type is None"),
        ("compressed W8A8", set_top(kv_cache_scheme=KV | {"num_bits": 4}), "kv_cache_scheme.num_bits is 4"),
        ("compressed W8A8", set_top(kv_cache_scheme=KV | {"dynamic": True}), "kv_cache_scheme.dynamic is True"),
        ("compressed W8A8", set_top(kv_cache_scheme=KV | {"strategy": "attn_head"}), "strategy is 'attn_head'"),
        ("compressed W8A8", set_top(sparsity_config={"format": "sparse-bitmask"}), "sparsity_config"),
        ("compressed W8A8", set_top(config_groups={}), "config_groups is .*one group"),
        ("compressed W8A8", set_group(targets=["re:.*q_proj"]), r"targets is \['re:.*q_proj'\]"),
        ("compressed W8A8", set_group(output_activations={"num_bits": 8}), "output_activations"),
        ("compressed W8A8", set_group(input_activations=None), "input_activations is None"),
        ("compressed W8A8", set_weights(strategy="tensor"), "weights.strategy is 'tensor'; supported: 'channel'"),
        ("compressed W8A8", set_weights(type="float"), "weights.type is 'float'"),
        ("compressed W8A8", set_weights(num_bits=4), "weights.num_bits is 4; supported: 8"),
        ("compressed W8A8", set_weights(block_structure="2x4"), "block_structure"),
        ("compressed W8A8", set_inputs(dynamic=False), "input_activations.dynamic is False"),
        ("compressed W8A8", set_inputs(strategy="tensor"), "input_activations.strategy is 'tensor'"),
        ("compressed W8A8", set_inputs(symmetric=False), "input_activations.symmetric is False"),
        ("compressed W4A16", set_group(input_activations={"num_bits": 8}), "input_activations"),
        ("compressed W4A16", set_weights(num_bits=8), "weights.num_bits is 8; supported: 4"),
        ("compressed W4A16", set_weights(actorder="group"), "actorder is 'group'"),
        ("compressed W4A16", set_weights(group_size=20), "group_size is 20; supported: -1 and multiples of 8"),
        ("compressed W4A16", set_weights(group_size=40), "q_proj cannot be served quantized: .*64 inputs"),
        ("compressed W4A16", set_top(ignore=[]), r"lacks weights .*lm_head\.weight_packed"),
        ("compressed W4A16", set_top(ignore=["lm_head", "re:.*k_proj"]), "only some of .*k_proj.*form one layer"),
        ("GPTQ", set_top(bits=3), "bits is 3; supported: 4"),
        ("GPTQ", set_top(lm_head=True), "lm_head is True"),
        ("GPTQ", set_top(checkpoint_format="marlin"), "checkpoint_format is 'marlin'"),
        ("GPTQ", set_top(dynamic={"-:.*": {}}), "dynamic is"),
        ("AWQ", set_top(version="gemv"), "version is 'gemv'; supported: 'gemm'"),
        ("AWQ", set_top(zero_point=False), "zero_point is False"),
        ("AWQ", set_top(bits=8), "bits is 8"),
        ("AWQ", set_top(quant_method="bitsandbytes"), "quant_method is 'bitsandbytes'; supported: 'awq', 'compressed"),
        ("AWQ", set_top(group_size=64), r"qzeros has the shape|96 inputs"),
    ],
)
def test_what_no_kernel_serves_is_refused_by_name(
    tmp_path: Path, scheme: str, change: Callable[[dict[str, Any]], None], named: str
) -> None:
    quantized, _ = make(tmp_path, BY_NAME[scheme])
    config = copy.deepcopy(BY_NAME[scheme].config)
    change(config)
    edit_config(quantized, quantization_config=config)
    with pytest.raises(ConfigError, match=named):
        load_model(Checkpoint(quantized), torch.float32, CPU)


def test_inputs_ordered_by_activation_are_refused(tmp_path: Path) -> None:
    quantized, _ = make(tmp_path, BY_NAME["GPTQ"])
    edit_weights(quantized, lambda w: w["model.layers.0.mlp.down_proj.g_idx"].copy_(torch.arange(96).flip(0) // 32))
    with pytest.raises(ConfigError, match=r"g_idx of down_proj .*desc_act"):
        load_model(Checkpoint(quantized), torch.float32, CPU)


def test_a_shape_other_than_stated_is_refused(tmp_path: Path) -> None:
    quantized, _ = make(tmp_path, BY_NAME["compressed W4A16"])
    edit_weights(quantized, lambda w: w["model.layers.0.mlp.down_proj.weight_shape"].copy_(torch.tensor([64, 95])))
    with pytest.raises(ConfigError, match=r"weight_shape of down_proj is \[64, 95\]"):
        load_model(Checkpoint(quantized), torch.float32, CPU)


@pytest.mark.parametrize(
    ("scheme", "tensor", "dtype"),
    [("compressed W8A8", "weight", torch.float32), ("GPTQ", "qzeros", torch.int64), ("GPTQ", "scales", torch.int32)],
)
def test_a_wrong_dtype_is_named(tmp_path: Path, scheme: str, tensor: str, dtype: torch.dtype) -> None:
    quantized, _ = make(tmp_path, BY_NAME[scheme])
    name = f"model.layers.0.mlp.down_proj.{tensor}"
    edit_weights(quantized, lambda w: w.update({name: w[name].to(dtype)}))
    with pytest.raises(ConfigError, match=rf"{name} h.*{dtype}"):
        load_model(Checkpoint(quantized), torch.float32, CPU)


def test_a_tied_head_that_is_not_ignored_is_refused(tmp_path: Path) -> None:
    quantized, _ = make(tmp_path, BY_NAME["compressed W4A16"], tie_word_embeddings=True)
    edit_config(quantized, quantization_config=BY_NAME["compressed W4A16"].config | {"ignore": []})
    with pytest.raises(ConfigError, match="lm_head shares the embedding's weights"):
        load_model(Checkpoint(quantized), torch.float32, CPU)


def test_a_quantized_checkpoint_is_not_rounded_again(tmp_path: Path) -> None:
    quantized, _ = make(tmp_path, BY_NAME["AWQ"])
    with pytest.raises(ConfigError, match=r"quantization: .* quantized already"):
        load_model(Checkpoint(quantized), torch.float32, CPU, "int8")


@pytest.mark.parametrize(
    ("asked", "sizes", "named"),
    [("int8", {"hidden_size": 66, "num_attention_heads": 2}, "4, not 66"), ("int4", {"hidden_size": 80}, "32, not 80")],
)
def test_inputs_that_cannot_be_rounded_are_named(tmp_path: Path, asked: str, sizes: dict[str, int], named: str) -> None:
    make_checkpoint(tmp_path, "llama", tokenizer=False, **sizes)
    with pytest.raises(ConfigError, match=rf"q_proj cannot be served quantized: .*multiple of {named}"):
        load_model(Checkpoint(tmp_path), torch.float32, CPU, asked)


def test_quantized_weights_need_a_cpu_and_its_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise NativeError("there is no C++ compiler")

    quantized, _ = make(tmp_path, BY_NAME["GPTQ"])
    plain = Checkpoint(tmp_path / "source")
    with pytest.raises(ConfigError, match="quantization: int8 is served on a CPU only; this worker's device is cuda"):
        load_model(plain, torch.float32, torch.device("cuda"), "int8")
    monkeypatch.setattr(quantization, "kernels", refuse)
    with pytest.raises(ConfigError, match=r"quantization: int4 is served by the native kernels only.*no C"):
        load_model(plain, torch.float32, CPU, "int4")
    with pytest.raises(ConfigError, match=r"model: the quantized weights of .* are served by the native kernels only"):
        load_model(Checkpoint(quantized), torch.float32, CPU)
    absent: Family[Any] = Family({"cuda": "raylm.models.gpu.absent:Int4Linear"})
    monkeypatch.setattr(quantization, "INT4_LINEARS", absent)
    with pytest.raises(
        ConfigError, match=r"\(GPTQ, 4 bits\) are served on cuda by a Triton kernel only, and there is no"
    ):
        load_model(Checkpoint(quantized), torch.float32, torch.device("cuda"))


def test_several_ranks_are_refused_by_name(tmp_path: Path) -> None:
    quantized, _ = make(tmp_path, SCHEMES[0], "qwen3")
    with pytest.raises(ConfigError, match=r"engine\.tensor_parallel_size: the quantized weights"):
        load_model(Checkpoint(quantized), torch.float32, CPU, None, Apart(0, 2))
