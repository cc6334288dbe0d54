"""Loads a checkpoint's weights into a model, one tensor at a time: safetensors without copies, or GGUF files."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from tqdm import tqdm

from raylm.checkpoint import Checkpoint, shown
from raylm.errors import ConfigError
from raylm.models.causal_lm import CausalLM, Shard
from raylm.models.checkpoint_check import DECODER, check_weights, refuse_names, shapes_of, weight_files, wrong_shape
from raylm.models.linear import HEAD, PLAIN, Linear, Quantization, linear_layers, select_kernels
from raylm.models.ranks import SINGLE_RANK, Ranks
from raylm.models.registry import QUANTIZATION, model_class

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str | None = None,
    ranks: Ranks = SINGLE_RANK,
) -> tuple[CausalLM, int]:
    """Load the model of ``checkpoint``. Returns it and the bytes of its weights.

    ``quantization`` ('int8' or 'int4') rounds plain weights. With several ``ranks``, loads the part of one. At most one
    tensor is in memory in addition to the weights.

    Raises:
        ConfigError: config.json is not supported, or weights are missing, unexpected or of another shape.
    """
    model, chosen = _outline(checkpoint, quantization, device, ranks)
    check_weights(checkpoint)  # before memory is allocated by the sizes in config.json
    with device:
        chosen.apply(model, tied=f"{HEAD}.weight" in model.redundant)
    model.materialize(dtype, device)
    _load(checkpoint, model)
    total = sum(target.nbytes for target in model.targets().values())
    loaded = {layer: _loaded(model, prefix, layer) for prefix, layer in linear_layers(model)}
    try:
        model.freeze(select_kernels(device, dtype))
    except ValueError as error:  # of the native kernels
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(f"model: {checkpoint} cannot be served in {name}: {error}; set dtype: float32.") from error
    changes = sum(layer.nbytes - size for layer, size in loaded.items() if layer.format is not PLAIN)
    return model, total + changes


def outline(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, quantization: str | None) -> CausalLM:
    """The model that ``load_model`` would load, on the meta device, without weights.

    Raises:
        ConfigError: as ``load_model``, except for the contents of weight files.
    """
    model, chosen = _outline(checkpoint, quantization, device, SINGLE_RANK)
    meta = torch.device("meta")
    with meta:
        chosen.apply(model, tied=f"{HEAD}.weight" in model.redundant)
    model.materialize(dtype, meta)
    return model


def _outline(
    checkpoint: Checkpoint, quantization: str | None, device: torch.device, ranks: Ranks
) -> tuple[CausalLM, Quantization]:
    cls = model_class(checkpoint)
    chosen = _select_quantization(checkpoint, quantization, device, ranks)
    try:
        with torch.device("meta"):
            model = cls.from_checkpoint(checkpoint, ranks)
    except (MemoryError, OverflowError, RuntimeError) as error:
        sizes = f"the sizes in config.json of {checkpoint} are too large together"
        raise ConfigError(f"model: {sizes}: {str(error).splitlines()[0]}") from error
    model.quantization = chosen.description
    return model, chosen


def _select_quantization(checkpoint: Checkpoint, asked: str | None, device: torch.device, ranks: Ranks) -> Quantization:
    stored = checkpoint.config.get("quantization_config")
    if stored is None and (asked == "none" or (asked is None and checkpoint.gguf is None)):
        return Quantization()
    if not QUANTIZATION:
        if asked is None and stored is None:
            return Quantization()
        what = f"quantization: {asked} is" if asked else f"model: the quantized weights of {checkpoint} are"
        raise ConfigError(f"{what} not supported: raylm.models.quantization is not installed.")
    return QUANTIZATION["select"](checkpoint, asked, device, ranks)


def _loaded(model: CausalLM, prefix: str, layer: Linear) -> int:
    """Bytes of the loaded weights of ``layer``; 0 if they are a copy of other weights."""
    if {f"{prefix}{part}.weight" for part in layer.parts} <= model.redundant:
        return 0
    if layer.weight is None:
        return sum(tensor.nbytes for stored in layer.stored.values() for tensor in stored.values())
    return layer.weight.nbytes


def resolve_dtype(checkpoint: Checkpoint, asked: str, device: torch.device) -> torch.dtype:
    """The dtype of weights and KV cache: ``asked``, or the checkpoint's for 'auto'. Raises ConfigError.

    CPUs multiply float16 slowly or not at all. So 'auto' serves it in float32 there, which represents it exactly.
    """
    declared = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype") or "float32"
    name = shown(declared if asked == "auto" else asked).strip("'").removeprefix("torch.")
    if name not in _DTYPES:
        raise ConfigError(f"model: the dtype {name!r} of {checkpoint} is not supported; set dtype.")
    if name == "float16" and device.type == "cpu":
        if asked != "auto":
            raise ConfigError("dtype: float16 is not served on a CPU; use bfloat16, float32 or auto.")
        return torch.float32
    return _DTYPES[name]


def _load(checkpoint: Checkpoint, model: CausalLM) -> None:
    found = frozenset(shapes_of(checkpoint))
    places = model.places(found)
    unexpected = {name for name in found - places.keys() if not model.ignores(name)}
    refuse_names(checkpoint, places.keys() - found, unexpected)
    places |= _blocks_of_head(model)
    wanted = found & places.keys()
    with tqdm(total=len(wanted), desc="Loading weights", unit="tensor", delay=1.0, file=sys.stderr) as bar:
        tensors = _tensors if checkpoint.gguf is None else _gguf_tensors
        for name, tensor in tensors(checkpoint, {name: places[name] for name in wanted}, model.shards):
            _copy(name, tensor, places[name])
            bar.update()
    if checkpoint.gguf is None:
        _check_tied_head(checkpoint, model, places)


def _check_tied_head(checkpoint: Checkpoint, model: CausalLM, places: Mapping[str, Tensor]) -> None:
    """Raise ConfigError if config.json ties the head to the embedding, and the files have another head."""
    head, embedding = f"{HEAD}.weight", model.embedding
    if head not in model.redundant or embedding is None:
        return
    name = next((name for name, place in places.items() if place.data_ptr() == embedding.data_ptr()), "")
    shards = {head: model.shards[name]} if name in model.shards else {}
    for _, tensor in _tensors(checkpoint, {head: embedding}, shards):
        if not torch.equal(tensor.to(embedding.device, embedding.dtype), embedding):
            raise ConfigError(
                f"model: {head} of {checkpoint} differs from the embedding, to which config.json ties it. If the head "
                "was trained apart, set tie_word_embeddings to false."
            )


def _blocks_of_head(model: CausalLM) -> dict[str, Tensor]:
    """Memory for the head's quantized weights, if its floats would be those of the embedding."""
    heads = (layer for _, layer in linear_layers(model) if HEAD in layer.parts)
    stored = next((layer.stored.get(HEAD, {}) for layer in heads), {})
    return {f"{HEAD}.{name}": tensor for name, tensor in stored.items() if f"{HEAD}.{name}" in model.redundant}


def _copy(name: str, tensor: Tensor, target: Tensor) -> None:
    what = f"model: the weight {name}"
    if tensor.shape != target.shape:
        raise wrong_shape(name, tensor.shape, target.shape)
    if not target.is_floating_point() and torch.promote_types(tensor.dtype, target.dtype) != target.dtype:
        raise ConfigError(f"{what} has the dtype {tensor.dtype}; config.json requires {target.dtype}.")
    if target.is_floating_point() and not tensor.is_floating_point():
        raise ConfigError(f"{what} holds integers ({tensor.dtype}); floats are expected.")
    target.copy_(tensor)


def _tensors(
    checkpoint: Checkpoint, places: Mapping[str, Tensor], shards: Mapping[str, Shard]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors for ``places`` one by one, in the order of the files. Of tensors in ``shards`` only their part."""
    for file in weight_files(checkpoint.path):
        with safe_open(file, framework="pt") as weights:
            for stored in weights.keys():  # noqa: SIM118 (a safetensors handle is no mapping)
                name = stored if stored in places else f"{DECODER}{stored}"
                if name in places:
                    shard = shards.get(name)
                    yield name, weights.get_tensor(stored) if shard is None else _read_shard(weights, stored, shard)


def _gguf_tensors(
    checkpoint: Checkpoint, places: Mapping[str, Tensor], shards: Mapping[str, Shard]
) -> Iterator[tuple[str, Tensor]]:
    """As ``_tensors``, from GGUF files."""
    from raylm.models.gguf_weights import GgufWeights

    weights = GgufWeights(checkpoint)
    for name in weights.tensors:
        if name in places:
            if places[name].dtype == torch.uint8:
                yield name, weights.blocks(name)
                continue
            shard, tensor = shards.get(name), weights.read(name, places[name].dtype)
            yield name, tensor if shard is None else _part(tensor, name, shard)


def _part(tensor: Tensor, name: str, shard: Shard) -> Tensor:
    _check_shard(tuple(tensor.shape), name, shard)
    return tensor.narrow(shard.dim, shard.part.start, len(shard.part))


def _read_shard(weights: Any, name: str, shard: Shard) -> Tensor:
    """Read one rank's part of a tensor from an open safetensors file, and nothing else."""
    stored, entries = weights.get_slice(name), slice(shard.part.start, shard.part.stop)
    _check_shard(tuple(stored.get_shape()), name, shard)
    found: Tensor = stored[entries] if shard.dim == 0 else stored[:, entries]
    return found


def _check_shard(shape: tuple[int, ...], name: str, shard: Shard) -> None:
    if len(shape) <= shard.dim or shape[shard.dim] != shard.count:
        wanted = f"{shard.count} along the {('first', 'second')[shard.dim]} dimension"
        raise ConfigError(f"model: the weight {name} has the shape {shape}, config.json requires {wanted}.")
