"""A compact Llama for training on CPU threads, and its export to the format of transformers' LlamaForCausalLM."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

DIM, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN = 256, 5, 4, 2, 64, 768
EPS, THETA, POSITIONS = 1e-5, 100_000.0, 8192


class Block(nn.Module):
    """One decoder layer: grouped-query attention with rotary positions, then a gated feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.Parameter(torch.ones(DIM))
        self.post_attention_layernorm = nn.Parameter(torch.ones(DIM))
        self.q_proj = weight(HEADS * HEAD_DIM, DIM)
        self.k_proj = weight(KV_HEADS * HEAD_DIM, DIM)
        self.v_proj = weight(KV_HEADS * HEAD_DIM, DIM)
        self.o_proj = weight(DIM, HEADS * HEAD_DIM, 0.3)
        self.gate_proj = weight(FFN, DIM)
        self.up_proj = weight(FFN, DIM)
        self.down_proj = weight(DIM, FFN, 0.3)

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """Causal attention over (rows, length, DIM); written out, since the fused kernel is slower at these lengths."""
        rows, length, _ = x.shape
        qkv = F.linear(x, torch.cat((self.q_proj, self.k_proj, self.v_proj)))
        heads = qkv.view(rows, length, HEADS + 2 * KV_HEADS, HEAD_DIM).transpose(1, 2)
        q, k, v = torch.split(heads, [HEADS, KV_HEADS, KV_HEADS], 1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin).repeat_interleave(HEADS // KV_HEADS, 1)
        scores = q @ k.transpose(-1, -2) * HEAD_DIM**-0.5 + mask
        mixed = torch.softmax(scores, -1) @ v.repeat_interleave(HEADS // KV_HEADS, 1)
        return F.linear(mixed.transpose(1, 2).reshape(rows, length, HEADS * HEAD_DIM), self.o_proj)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """x: (rows, length, DIM) -> the same shape."""
        x = x + self.attend(F.rms_norm(x, (DIM,), self.input_layernorm, EPS), cos, sin, mask)
        normed = F.rms_norm(x, (DIM,), self.post_attention_layernorm, EPS)
        gate, up = F.linear(normed, torch.cat((self.gate_proj, self.up_proj))).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.down_proj)


class Llama(nn.Module):
    """The decoder.

    A space-led token's embedding is that of its twin plus one vector shared by all of them, so that a word copied from
    behind a space to behind a quote needs no knowledge of the word.
    """

    twin: Tensor
    led: Tensor

    def __init__(self, twins: list[int]) -> None:
        super().__init__()
        twin = torch.tensor(twins)
        self.register_buffer("twin", twin, persistent=False)
        self.register_buffer("led", (twin != torch.arange(len(twins))).float()[:, None], persistent=False)
        self.tokens = weight(len(twins), DIM)
        self.space = nn.Parameter(torch.randn(DIM) * 0.02)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.Parameter(torch.ones(DIM))

    def embeddings(self) -> Tensor:
        """The (vocabulary, DIM) matrix that serves the input and, tied, the output."""
        return F.embedding(self.twin, self.tokens) + self.led * self.space

    def forward(self, ids: Tensor, chosen: Tensor) -> Tensor:
        """ids: (rows, length) int64; chosen: flat positions whose logits are wanted -> (chosen, vocabulary)."""
        table = self.embeddings()
        cos, sin, mask = positions(ids.shape[1])
        x = F.embedding(ids, table)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        return F.linear(F.rms_norm(x, (DIM,), self.norm, EPS).view(-1, DIM)[chosen], table)

    def hidden_matrices(self) -> list[nn.Parameter]:
        """The matrices of the layers, which Muon updates."""
        return [parameter for parameter in self.layers.parameters() if parameter.ndim == 2]

    def other_parameters(self) -> list[nn.Parameter]:
        """Embeddings and norms, which AdamW updates."""
        return [self.tokens, self.space, self.norm, *(p for p in self.layers.parameters() if p.ndim == 1)]


def weight(rows: int, columns: int, scale: float = 1.0) -> nn.Parameter:
    """A matrix of small normal numbers."""
    return nn.Parameter(torch.randn(rows, columns) * 0.02 * scale)


def positions(length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rotary cosines and sines, each (length, HEAD_DIM), and the causal mask (length, length), all bfloat16."""
    angles = torch.outer(torch.arange(length).float(), THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))
    both = torch.cat((angles, angles), -1)
    mask = torch.full((length, length), float("-inf")).triu(1)
    return both.cos().bfloat16(), both.sin().bfloat16(), mask.bfloat16()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions in the half-split layout of transformers."""
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


def hf_config(vocab_size: int) -> dict[str, Any]:
    """config.json of the checkpoint."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": DIM,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "dtype": "bfloat16",
    }


def hf_weights(model: Llama) -> dict[str, Tensor]:
    """The weights in bfloat16 under the names of transformers."""
    out = {"model.embed_tokens.weight": model.embeddings(), "model.norm.weight": model.norm}
    for i, layer in enumerate(model.layers):
        for name, parameter in layer.named_parameters():
            part = (
                "self_attn."
                if name in ("q_proj", "k_proj", "v_proj", "o_proj")
                else "mlp."
                if name.endswith("_proj")
                else ""
            )
            out[f"model.layers.{i}.{part}{name}.weight"] = parameter
    return {name: tensor.detach().bfloat16().contiguous() for name, tensor in out.items()}


def export(model: Llama, directory: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors for transformers."""
    directory.mkdir(parents=True, exist_ok=True)
    generation = {"do_sample": True, "temperature": 0.3, "top_p": 0.95, "eos_token_id": [2, 0], "pad_token_id": 0}
    (directory / "config.json").write_text(json.dumps(hf_config(len(model.twin)), indent=2) + "\n")
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    save_file(hf_weights(model), directory / "model.safetensors", metadata={"format": "pt"})
