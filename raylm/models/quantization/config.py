"""Reads the quantization_config of config.json. Rejects by name what no kernel computes exactly."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from raylm.checkpoint import Checkpoint
from raylm.errors import ConfigError
from raylm.models.linear import HEAD, WeightFormat
from raylm.models.quantization.formats import Awq, Gptq, Int8Channels, PackQuantized
from raylm.models.quantization.fp8 import Fp8Rows, Fp8Tensors
from raylm.models.quantization.fp8_blocks import BLOCK, Fp8Blocks

# (description of the weights, their format, whether a module stays in floats)
Found = tuple[str, WeightFormat, Callable[[str], bool]]

_MADE_BY = frozenset({"quantization_status", "global_compression_ratio", "version", "provider", "quant_method"})
_OBSERVED = frozenset({"observer", "observer_kwargs", "scale_dtype", "zp_dtype"})
_INPUTS = frozenset({"num_bits", "type", "symmetric", "strategy", "dynamic"})
_WEIGHTS = _INPUTS | {"group_size", "actorder"}
_INT8 = {"num_bits": (8,), "type": ("int",), "symmetric": (True,)}
_FP8 = {"num_bits": (8,), "type": ("float",), "symmetric": (True,)}


class Section:
    """One JSON object in quantization_config. ``where`` is its dotted name."""

    def __init__(self, checkpoint: Checkpoint, where: str, values: object) -> None:
        self.checkpoint, self.where = checkpoint, where
        if not isinstance(values, dict):
            raise ConfigError(f"config.json of {checkpoint}: {where} is {values!r}; it must be an object.")
        self.values: dict[str, Any] = values

    def get(self, name: str, default: Any = None) -> Any:
        value = self.values.get(name)
        return default if value is None else value

    def section(self, name: str) -> Section:
        return Section(self.checkpoint, f"{self.where}.{name}", self.values.get(name))

    def choice(self, name: str, served: Collection[Any], default: Any = None) -> Any:
        value = self.get(name, default)
        if not any(value == one and type(value) is type(one) for one in served):
            raise self.error(name, value, f"supported: {', '.join(map(repr, served))}")
        return value

    def group(self, *names: str) -> int | None:
        """The number of inputs that share a scale: the first of ``names`` that is set, else 128. None is all (-1)."""
        name = next((name for name in names if self.get(name) is not None), names[0])
        size = self.get(name, 128)
        if size == -1:
            return None
        if not isinstance(size, int) or isinstance(size, bool) or size < 8 or size % 8:
            raise self.error(name, size, "supported: -1 and multiples of 8")
        return size

    def only(self, known: Collection[str]) -> None:
        """Raise ConfigError for unknown entries that are not empty."""
        for name in self.values.keys() - set(known):
            if self.values[name]:
                raise self.error(name, self.values[name], "it is not supported")

    def error(self, name: str, value: object, supported: str) -> ConfigError:
        where = f"config.json of {self.checkpoint}: {self.where}.{name}"
        return ConfigError(f"{where} is {value!r}; {supported}.")


def read_quantization_config(checkpoint: Checkpoint) -> Found:
    """Read quantization_config. Raises ConfigError that names an unsupported entry."""
    section = Section(checkpoint, "quantization_config", checkpoint.config["quantization_config"])
    return _METHODS[section.choice("quant_method", _METHODS)](section)


def _compressed_tensors(section: Section) -> Found:
    section.only({*_MADE_BY, "config_groups", "format", "ignore", "kv_cache_scheme"})
    if section.get("kv_cache_scheme"):
        _check_kv_cache(section.section("kv_cache_scheme"))
    layout = section.choice("format", ("int-quantized", "pack-quantized", "float-quantized"))
    groups = section.section("config_groups")
    if len(groups.values) != 1:
        raise section.error("config_groups", sorted(groups.values), "supported: one group")
    scheme = groups.section(next(iter(groups.values)))
    scheme.only({"targets", "weights", "input_activations", "format"})
    scheme.choice("targets", (["Linear"],))
    scheme.choice("format", (layout,), default=layout)
    weights = scheme.section("weights")
    weights.only(_OBSERVED | _WEIGHTS)
    weights.choice("dynamic", (False,), default=False)
    ignored = _ignored(section)
    if layout == "pack-quantized":
        return "compressed-tensors W4A16", _pack_quantized(scheme, weights), ignored
    inputs = scheme.section("input_activations")
    inputs.only(_OBSERVED | _INPUTS)
    if layout == "float-quantized":
        return "compressed-tensors W8A8, fp8", _fp8(weights, inputs), ignored
    _check(weights, _INT8 | {"strategy": ("channel",)})
    _check(inputs, _INT8 | {"strategy": ("token",), "dynamic": (True,)})
    return "compressed-tensors W8A8", Int8Channels(), ignored


def _check(section: Section, served: Mapping[str, Collection[Any]], dynamic: bool | None = None) -> None:
    """``dynamic`` is the default of that entry."""
    for name, values in served.items():
        section.choice(name, values, {"symmetric": True, "dynamic": dynamic}.get(name))


def _check_kv_cache(scheme: Section) -> None:
    """Check that it is fp8 with one scale for a layer's keys and one for its values. Used if cache.dtype is fp8."""
    scheme.only(_OBSERVED | _WEIGHTS)
    _check(scheme, _FP8 | {"strategy": ("tensor",), "dynamic": (False,)}, dynamic=False)


def _fp8(weights: Section, inputs: Section) -> WeightFormat:
    """Supports one calibrated scale for a tensor, or inputs rounded by token. Other schemes couple rows of a batch."""
    if not inputs.choice("dynamic", (True, False), default=False):
        _check(weights, _FP8 | {"strategy": ("tensor",)})
        _check(inputs, _FP8 | {"strategy": ("tensor",)})
        return Fp8Tensors()
    by_channel = weights.choice("strategy", ("tensor", "channel")) == "channel"
    _check(weights, _FP8)
    _check(inputs, _FP8 | {"strategy": ("token",)})
    return Fp8Rows(by_channel)


def _pack_quantized(scheme: Section, weights: Section) -> WeightFormat:
    scheme.choice("input_activations", (None,))
    weights.choice("num_bits", (4,))
    weights.choice("type", ("int",))
    weights.choice("actorder", (None, "weight", "static"))  # with "group" and true, groups are not neighbours
    symmetric = weights.choice("symmetric", (True, False), default=True)
    by_group = weights.choice("strategy", ("group", "channel")) == "group"
    return PackQuantized(weights.group("group_size") if by_group else None, symmetric=symmetric)


def _ignored(section: Section) -> Callable[[str], bool]:
    """Entries of ``ignore`` are names of modules, or regular expressions after "re:"."""
    entries = section.get("ignore", [])

    def ignored(module: str) -> bool:
        return any(re.match(e[3:], module) is not None if e.startswith("re:") else e == module for e in entries)

    return ignored


def _gptq(section: Section) -> Found:
    section.choice("bits", (4,))
    layouts = {section.choice(name, ("gptq", "gptq_v2"), default="gptq") for name in ("checkpoint_format", "format")}
    section.choice("pack_dtype", ("int32",), default="int32")
    for name in ("lm_head", "is_marlin_format"):
        section.choice(name, (False,), default=False)
    for name in ("dynamic", "modules_in_block_to_quantize", "rotation"):
        section.choice(name, (None, {}, [], ""))
    group = section.group("group_size")
    return "GPTQ, 4 bits", Gptq(group, zero_shift=0 if "gptq_v2" in layouts else 1), lambda name: name == HEAD


def _awq(section: Section) -> Found:
    section.choice("w_bit" if "w_bit" in section.values else "bits", (4,))
    section.choice("zero_point", (True,), default=True)
    for name in ("version", "format"):
        if str(section.get(name, "gemm")).lower() != "gemm":
            raise section.error(name, section.get(name), "supported: 'gemm'")
    section.choice("backend", ("autoawq", "auto"), default="autoawq")
    skipped = section.get("modules_to_not_convert", [])
    group = section.group("group_size", "q_group_size")
    return "AWQ, 4 bits", Awq(group), lambda name: name == HEAD or any(part in name for part in skipped)


def _fp8_blocks(section: Section) -> Found:
    """The format of DeepSeek-V3 and of Qwen3's FP8 checkpoints."""
    section.only({*_MADE_BY, "activation_scheme", "fmt", "weight_block_size", "modules_to_not_convert"})
    section.choice("weight_block_size", ([BLOCK, BLOCK],))
    section.choice("activation_scheme", ("dynamic",))
    section.choice("fmt", ("e4m3",), default="e4m3")
    kept = section.get("modules_to_not_convert", [])

    def ignored(module: str) -> bool:
        """Entries are names of modules, which include their submodules."""
        return module == HEAD or any(module == name or module.startswith(f"{name}.") for name in kept)

    return f"fp8, blocks of {BLOCK} x {BLOCK}", Fp8Blocks(), ignored


_METHODS: dict[str, Callable[[Section], Found]] = {
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8_blocks,
    "gptq": _gptq,
}
