"""LoRA adapters: reads PEFT's files, multiplies by torch, or packs adapters for the native decoder."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from raylm.errors import InvalidRequestError
from raylm.lazy import Family
from raylm.models.causal_lm import CausalLM
from raylm.models.linear import HEAD, Linear, LinearKernel, linear_layers
from raylm.native import AdapterRun, PackedAdapter

logger = logging.getLogger(__name__)

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MAX_CONFIG_BYTES = 1 << 20
_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
# Entries that do not affect how a saved adapter is applied.
_INERT = {
    "auto_mapping", "base_model_name_or_path", "eva_config", "exclude_modules", "inference_mode", "layers_pattern",
    "layers_to_transform", "lora_dropout", "megatron_core", "peft_version", "qalora_group_size", "rank_pattern",
    "revision", "runtime_config", "target_modules",
}  # fmt: skip
_READ = {"peft_type", "task_type", "r", "lora_alpha", "use_rslora", "bias", "init_lora_weights"}
_LARGEST_ALPHA = 1e6  # with usual weights, a much larger value gives logits that are not finite
# Initializations that change the base model's weights.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


class _UnservedError(Exception):
    """The reason why an adapter cannot be served."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """An adapter's change of a linear module: ``up @ (down @ x)``, down (rank, in), up (out, rank), with the scale."""

    down: Tensor
    up: Tensor


Weights = Mapping[str, LowRank]


def read_adapter(
    path: Path, shapes: Mapping[str, tuple[int, int]], max_rank: int, dtype: torch.dtype = torch.float32
) -> dict[str, LowRank]:
    """Read an adapter. ``shapes`` are (out, in) of the modules of the model that adapters may change.

    All numbers are finite, also in ``dtype``, the model's dtype.

    Raises:
        InvalidRequestError: it is not an adapter for this model, or uses an unsupported feature; names the reason.
    """
    with _refused(path):
        return _read_adapter(path, shapes, max_rank, dtype)


def read_adapter_with_digest(
    path: Path, shapes: Mapping[str, tuple[int, int]], max_rank: int, dtype: torch.dtype = torch.float32
) -> tuple[dict[str, LowRank], str]:
    """As ``read_adapter``, with the SHA-256 of the files. Equal digests mean equal adapters in any directory.

    The digest is computed before and after the weights are read, to detect changes in between.

    Raises:
        InvalidRequestError: as ``read_adapter``, or the files changed meanwhile.
    """
    with _refused(path):
        digest = _digest(path)
        found = _read_adapter(path, shapes, max_rank, dtype)
        if _digest(path) != digest:
            raise _UnservedError("its files changed while they were read; load it again when they are complete")
        return found, digest


@contextmanager
def _refused(path: Path) -> Iterator[None]:
    try:
        yield
    except _UnservedError as error:
        text = f"The adapter {path.name!r} cannot be served: {error}."
        raise InvalidRequestError(text, param="lora_path") from error.__cause__


def _read_adapter(
    path: Path, shapes: Mapping[str, tuple[int, int]], max_rank: int, dtype: torch.dtype
) -> dict[str, LowRank]:
    config = _read_config(path / _CONFIG)
    pairs = _read_pairs(path / _WEIGHTS, shapes)
    found = {name: _low_rank(name, pair, shapes[name], config, max_rank) for name, pair in pairs.items()}
    for name, pair in found.items():
        if not all(matrix.to(dtype).isfinite().all() for matrix in (pair.down.float(), pair.up)):
            raise _UnservedError(f"the weights of {name} are not finite in {str(dtype).removeprefix('torch.')}")
    return found


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    for name in (_CONFIG, _WEIGHTS):
        try:
            _check_is_file(path / name)
            with (path / name).open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise _UnservedError(f"its {name} cannot be read") from error
    return digest.hexdigest()


def _check_is_file(file: Path) -> None:
    """Refuse special files: opening a pipe would wait for a writer."""
    if file.exists() and not file.is_file():
        raise _UnservedError(f"its {file.name} is not a regular file")


def _read_pairs(file: Path, shapes: Mapping[str, tuple[int, int]]) -> dict[str, dict[str, Tensor]]:
    """By module {"A": lora_A, "B": lora_B}, or one of the two."""
    found: dict[str, dict[str, Tensor]] = {}
    try:
        _check_is_file(file)
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - not a mapping
                match = _NAME.fullmatch(name)
                if match is None:
                    raise _UnservedError(f"the weight {name} is not a LoRA weight")
                if match["module"] not in shapes:
                    raise _UnservedError(f"it changes {match['module']}; only q, k, v, o, gate, up and down are served")
                found.setdefault(match["module"], {})[match["side"]] = weights.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise _UnservedError(f"its {_WEIGHTS} cannot be read") from error
    if not found:
        raise _UnservedError("it holds no weights")
    return found


def _low_rank(
    module: str, pair: dict[str, Tensor], shape: tuple[int, int], config: dict[str, Any], max_rank: int
) -> LowRank:
    if pair.keys() != {"A", "B"}:
        raise _UnservedError(f"{module} has only one of lora_A and lora_B")
    down, up = pair["A"], pair["B"]
    if down.ndim != 2 or up.ndim != 2 or not down.is_floating_point() or not up.is_floating_point():
        raise _UnservedError(f"the weights of {module} are not matrices of floats")
    rank, (rows, inputs) = len(down), shape
    if down.shape != (rank, inputs) or up.shape != (rows, rank) or not rank:
        found = f"lora_A {tuple(down.shape)} and lora_B {tuple(up.shape)}"
        raise _UnservedError(f"{module} has {found}; this model's module is ({rows}, {inputs})")
    if rank > max_rank:
        raise _UnservedError(f"{module} has the rank {rank}; lora.max_rank is {max_rank}")
    # As in PEFT. The square root is rank-stabilized scaling (Kalajdzievski 2023).
    scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return LowRank(down, up.float() * scale)


def _read_config(file: Path) -> dict[str, Any]:
    try:
        _check_is_file(file)
        if file.stat().st_size > _MAX_CONFIG_BYTES:
            raise _UnservedError(f"its {_CONFIG} is longer than {_MAX_CONFIG_BYTES} bytes")
        config = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise _UnservedError(f"its {_CONFIG} cannot be read") from error
    if not isinstance(config, dict):
        raise _UnservedError(f"its {_CONFIG} is not an object")
    if config.get("peft_type") != "LORA":
        raise _UnservedError(f"its peft_type is {str(config.get('peft_type'))[:40]!r}; LORA is served")
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        raise _UnservedError(f"its task_type is {str(config['task_type'])[:40]!r}; CAUSAL_LM is served")
    if config.get("bias", "none") != "none":
        raise _UnservedError(f"bias is {str(config['bias'])[:40]!r}; adapters with biases are not served")
    alpha = config.get("lora_alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not abs(alpha) <= _LARGEST_ALPHA:
        raise _UnservedError(f"lora_alpha must be a number from -{_LARGEST_ALPHA:,.0f} to {_LARGEST_ALPHA:,.0f}")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise _UnservedError(f"init_lora_weights {start[:40]!r} changes the weights of the base model too")
    for key in sorted(config.keys() - _INERT - _READ):
        if config[key]:  # it may affect how the adapter is applied
            raise _UnservedError(f"{key[:40]} is set, which is not served")
    return config


@dataclass(frozen=True, slots=True)
class ModuleAdapter:
    """(down, up) of each linear layer, None without an adapter. The parts of a fused layer are combined."""

    pairs: list[tuple[Tensor, Tensor] | None]


def _adaptable_layers(model: CausalLM) -> list[tuple[str, Linear]]:
    """All linear layers except the head, in the model's order."""
    return [(prefix, layer) for prefix, layer in linear_layers(model) if HEAD not in layer.parts]


def adaptable_shapes(model: CausalLM) -> dict[str, tuple[int, int]]:
    """(out, in) of the modules that adapters may change, by their names in the checkpoint."""
    return {
        f"{prefix}{part}": (rows, layer.in_features)
        for prefix, layer in _adaptable_layers(model)
        for part, rows in layer.parts.items()
    }


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """The largest step, and the highest rank of an adapter."""

    max_num_tokens: int
    max_num_seqs: int
    max_rank: int


class LowRankLayers:
    """Adds low-rank products to the linear layers of a model, by torch, for one run of rows after another.

    Must be created after other code has read the layers' kernels. If it is ``capturable``, a forward pass with adapters
    runs the same operations for any adapters.
    """

    capturable: ClassVar[bool] = False

    def __init__(self, model: CausalLM, dtype: torch.dtype, device: torch.device, limits: AdapterLimits) -> None:
        self._runs: Sequence[AdapterRun] = ()
        self._layers, self._dtype, self._device = _adaptable_layers(model), dtype, device
        for at, (_, layer) in enumerate(self._layers):
            assert layer.kernel is not None, "adapters are served before the weights are loaded"
            layer.kernel = partial(self._multiply, layer.kernel, at)

    def begin(self, runs: Sequence[AdapterRun]) -> None:
        """Set the adapters of the tokens of the next forward pass."""
        self._runs = runs

    def hold(self, adapted: bool) -> None:
        """For capturing: act as in a step with or without adapters, although no row has one."""
        raise AssertionError("adapters are not captured")

    def pack(self, weights: Weights) -> object:
        """Copy an adapter to the device, in the dtype of the model and the form of the forward pass."""
        pairs = [_fused(prefix, layer, weights) for prefix, layer in self._layers]
        to = self._device, self._dtype
        return ModuleAdapter([pair and (pair[0].to(*to), pair[1].to(*to)) for pair in pairs])

    def compile_all(self) -> None:
        """Compile the kernels for steps of any size."""

    def _multiply(self, base: LinearKernel, at: int, x: Tensor) -> Tensor:
        out = base(x)
        for run in self._runs:
            assert isinstance(run.adapter, ModuleAdapter)
            pair = run.adapter.pairs[at]
            if pair is not None:
                rows = slice(run.start, run.start + run.count)
                out[rows] += F.linear(F.linear(x[rows], pair[0]), pair[1])
        return out


# By device. On other devices torch multiplies the runs.
LOW_RANK_LAYERS = Family[type[LowRankLayers]]({
    "cuda": "raylm.models.gpu.low_rank:GroupedLowRank",
})  # fmt: skip


def low_rank_layers(model: CausalLM, dtype: torch.dtype, device: torch.device, limits: AdapterLimits) -> LowRankLayers:
    """The fastest implementation for ``device``. Logs a warning if a slower one is used."""
    cls = LowRankLayers
    if device.type in LOW_RANK_LAYERS:
        try:
            cls = LOW_RANK_LAYERS[device.type]
        except ModuleNotFoundError as error:
            logger.warning("Adapters are multiplied one by one, without CUDA graphs: %s", error)
    return cls(model, dtype, device, limits)


def _fused(prefix: str, layer: Linear, weights: Weights) -> tuple[Tensor, Tensor] | None:
    """Combine the adapters of a layer's parts: ``down`` stacked, ``up`` as diagonal blocks."""
    found = {part: weights[f"{prefix}{part}"] for part in layer.parts if f"{prefix}{part}" in weights}
    if not found:
        return None
    ups = [found[part].up if part in found else torch.zeros(rows, 0) for part, rows in layer.parts.items()]
    return torch.cat([pair.down.float() for pair in found.values()]), torch.block_diag(*ups)  # type: ignore[no-untyped-call]


def pack_native(model: CausalLM, dtype: torch.dtype, weights: Weights) -> PackedAdapter:
    layers: list[list[tuple[int, Tensor, Tensor]]] = []
    for prefix, layer in _adaptable_layers(model):
        parts, column = [], 0
        for part, rows in layer.parts.items():
            pair = weights.get(f"{prefix}{part}")
            if pair is not None:
                parts.append((column, pair.down.to(dtype), pair.up.to(dtype)))
            column += rows
        layers.append(parts)
    return PackedAdapter(layers)
