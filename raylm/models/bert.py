"""BERT (Devlin et al. 2019): embedding models such as MiniLM and bge, and cross-encoders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raylm.checkpoint import Checkpoint, shown
from raylm.errors import ConfigError
from raylm.models.config_fields import Fields
from raylm.models.encoder import Encoder
from raylm.models.linear import KernelFactory, Linear, Weighted, unfilled
from raylm.models.ranks import Ranks

_DEFAULTS: dict[str, Any] = {  # transformers' of missing entries
    "hidden_act": "gelu", "layer_norm_eps": 1e-12, "type_vocab_size": 2, "position_embedding_type": "absolute",
    "is_decoder": False, "add_cross_attention": False,
}  # fmt: skip
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}
# sentence-transformers' activations of a cross-encoder's score.
_SCORE_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "torch.nn.modules.activation.Sigmoid": torch.sigmoid,
    "torch.nn.modules.linear.Identity": lambda score: score,
}
_PREFIX = "bert."


@dataclass(frozen=True, slots=True)
class BertConfig:
    vocab_size: int
    positions: int
    types: int
    hidden_size: int
    heads: int
    intermediate_size: int
    layers: int
    eps: float
    activation: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> BertConfig:
        """config.json. Raises ConfigError, which names the field, if it is not supported."""
        fields = Fields(checkpoint, _DEFAULTS)
        hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
        if hidden % heads:
            raise fields.error("num_attention_heads", heads, f"a divisor of hidden_size, {hidden}")
        if not isinstance(name := fields.get("hidden_act"), str) or name not in _ACTIVATIONS:
            raise fields.error("hidden_act", name, f"one of {', '.join(_ACTIVATIONS)}")
        if (kind := fields.get("position_embedding_type")) != "absolute":
            raise fields.error("position_embedding_type", kind, "'absolute'")
        for name in ("is_decoder", "add_cross_attention"):
            if fields.flag(name):
                raise fields.error(name, True, "false")
        return cls(
            fields.size("vocab_size"), fields.size("max_position_embeddings"), fields.size("type_vocab_size"), hidden,
            heads, fields.size("intermediate_size"), fields.size("num_hidden_layers"), fields.number("layer_norm_eps"),
            _ACTIVATIONS[str(fields.get("hidden_act"))],
        )  # fmt: skip


class BertTable(Weighted):
    """(n,) -> (n, size): rows of a weight."""

    def __init__(self, rows: int, size: int) -> None:
        super().__init__()
        self.weight = unfilled(rows, size)

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class BertNorm(Weighted):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = unfilled(size), unfilled(size), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class BertEmbeddings(nn.Module):
    def __init__(self, c: BertConfig) -> None:
        super().__init__()
        self.word_embeddings = BertTable(c.vocab_size, c.hidden_size)
        self.position_embeddings = BertTable(c.positions, c.hidden_size)
        self.token_type_embeddings = BertTable(c.types, c.hidden_size)
        self.LayerNorm = BertNorm(c.hidden_size, c.eps)

    def forward(self, ids: Tensor, types: Tensor) -> Tensor:
        words, positions = self.word_embeddings(ids), torch.arange(len(ids), device=ids.device)
        total = words + self.token_type_embeddings(types) + self.position_embeddings(positions)
        return self.LayerNorm(total)  # type: ignore[no-any-return]


class BertProjections(nn.Module):
    """Query, key and value of all heads, in one multiplication."""

    def __init__(self, c: BertConfig) -> None:
        super().__init__()
        self.heads = c.heads
        self.qkv = Linear(c.hidden_size, dict.fromkeys(("query", "key", "value"), c.hidden_size), bias=True)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), 3, self.heads, -1).permute(1, 2, 0, 3)[:, None]
        return F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1)


class BertOutput(nn.Module):
    """A product, added to the input of the block, and normalized."""

    def __init__(self, inner: int, c: BertConfig) -> None:
        super().__init__()
        self.dense = Linear(inner, {"dense": c.hidden_size}, bias=True)
        self.LayerNorm = BertNorm(c.hidden_size, c.eps)

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(x) + before)  # type: ignore[no-any-return]


class BertIntermediate(nn.Module):
    def __init__(self, c: BertConfig) -> None:
        super().__init__()
        self.dense, self.activation = Linear(c.hidden_size, {"dense": c.intermediate_size}, bias=True), c.activation

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.dense(x))


class BertLayer(nn.Module):
    """Modules have the names of the checkpoint, where the projections are in one called ``self``."""

    def __init__(self, c: BertConfig) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"self": BertProjections(c), "output": BertOutput(c.hidden_size, c)})
        self.intermediate, self.output = BertIntermediate(c), BertOutput(c.intermediate_size, c)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention["output"](self.attention["self"](x), x)
        return self.output(self.intermediate(x), x)  # type: ignore[no-any-return]


class BertModel(Encoder):
    """Gives the hidden states of the last layer. Checkpoints may have a prefix and a pooler, which is not used."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config, self.vocab_size, self.attention_specs = config, config.vocab_size, []
        self.embeddings = BertEmbeddings(config)
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(BertLayer(config) for _ in range(config.layers))})

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, ranks: Ranks) -> BertModel:
        for knob, count in (
            ("engine.tensor_parallel_size", ranks.world_size),
            ("engine.pipeline_parallel_size", ranks.stage.count),
        ):
            if count > 1:
                raise ConfigError(f"{knob}: an encoder is served by one rank only.")
        return cls(BertConfig.of(checkpoint))

    def materialize(self, dtype: torch.dtype, device: torch.device) -> None:
        if self.quantization is not None:
            raise ConfigError("quantization: an encoder is served with plain weights only; omit it.")
        if device.type == "cuda":
            raise ConfigError("device: an encoder is served on a CPU only; set device: cpu.")
        super().materialize(dtype, device)

    def places(self, found: frozenset[str]) -> dict[str, Tensor]:
        prefix = _PREFIX if any(name.startswith(_PREFIX) for name in found) else ""
        return {name if self.is_outside(name) else f"{prefix}{name}": target for name, target in self.targets().items()}

    def is_outside(self, name: str) -> bool:
        """Whether a weight has no prefix in a checkpoint of a model with a head."""
        return False

    def ignores(self, name: str) -> bool:
        bare = name.removeprefix(_PREFIX)
        return super().ignores(name) or bare.startswith("pooler.") or bare == "embeddings.position_ids"

    @property
    def redundant(self) -> frozenset[str]:
        return frozenset()

    def freeze(self, kernels: KernelFactory) -> None:
        for module in self.modules():
            if isinstance(module, Weighted):
                module.freeze(kernels)

    def encode(self, ids: Tensor, types: Tensor) -> Tensor:
        x = self.embeddings(ids, types)
        for layer in self.encoder["layer"].children():
            x = layer(x)
        return x  # type: ignore[no-any-return]

    def score(self, hidden: Tensor) -> Tensor:
        raise AssertionError("it has no head for scores")


class BertForSequenceClassification(BertModel):
    """A cross-encoder: the score of a pair of texts, from the hidden state of the first token."""

    def __init__(self, config: BertConfig, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__(config)
        self.activation = activation
        self.pooler = nn.ModuleDict({"dense": Linear(config.hidden_size, {"dense": config.hidden_size}, bias=True)})
        self.classifier = Linear(config.hidden_size, {"classifier": 1}, bias=True)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, ranks: Ranks) -> BertForSequenceClassification:
        plain = BertModel.from_checkpoint(checkpoint, ranks)
        if plain.config.types < 2:
            raise Fields(checkpoint, _DEFAULTS).error("type_vocab_size", 1, "at least 2, for the two texts of a pair")
        labels = checkpoint.config.get("id2label", {"0": "LABEL_0", "1": "LABEL_1"})
        if not isinstance(labels, dict) or len(labels) != 1:
            what = f"config.json of {checkpoint}: id2label is {shown(labels)}"
            raise ConfigError(f"{what}; it must have one label, the score of a cross-encoder.")
        return cls(plain.config, _score_activation(checkpoint))

    def is_outside(self, name: str) -> bool:
        return name.startswith("classifier.")

    def ignores(self, name: str) -> bool:
        return name.removeprefix(_PREFIX) == "embeddings.position_ids"

    def score(self, hidden: Tensor) -> Tensor:
        first = torch.tanh(self.pooler["dense"](hidden[:1]))
        return self.activation(self.classifier(first)[0].float())


def _score_activation(checkpoint: Checkpoint) -> Callable[[Tensor], Tensor]:
    """What sentence-transformers applies to the score: by default the sigmoid."""
    own = checkpoint.config.get("sentence_transformers")
    name = own.get("activation_fn") if isinstance(own, dict) else None
    name = name or checkpoint.config.get("sbert_ce_default_activation_function")
    if name is None:
        return torch.sigmoid
    if not isinstance(name, str) or name not in _SCORE_ACTIVATIONS:
        what = f"config.json of {checkpoint}: activation_fn is {shown(name)}"
        raise ConfigError(f"{what}; it must be one of {', '.join(_SCORE_ACTIVATIONS)}.")
    return _SCORE_ACTIVATIONS[name]
