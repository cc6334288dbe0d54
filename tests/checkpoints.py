"""Makes small random checkpoints of the supported families, with a tokenizer, as transformers saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

FAMILIES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
}
EOS, BOS = 1, 0
SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_TEXT = [
    "A request is what a caller asked; a sequence is what is scheduled.",
    "The scheduler batches sequences; the block pool lends blocks of keys and values.",
    "Prefill computes the prompt, decode computes one token at a time.",
]


def make_checkpoint(
    path: Path,
    family: str = "llama",
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    max_shard_size: str = "5GB",
    tokenizer: bool = True,
    **overrides: Any,
) -> Path:
    """Write a checkpoint of ``family`` to ``path`` and return it. ``overrides`` change its configuration.

    All weights, biases and norms are random, so that none of them is a neutral 0 or 1.
    """
    config_name, model_name = FAMILIES[family]
    sizes: dict[str, Any] = {**SIZES, "bos_token_id": BOS, "eos_token_id": EOS, "tie_word_embeddings": False}
    if family == "qwen2":
        del sizes["head_dim"]
    if family == "mistral":
        sizes["sliding_window"] = None
    config = getattr(transformers, config_name)(**{**sizes, **overrides})
    model = getattr(transformers, model_name)(config)
    _randomize(model, seed)
    model.to(dtype).save_pretrained(path, max_shard_size=max_shard_size)
    if tokenizer:
        make_tokenizer(int(config.vocab_size)).save_pretrained(path)
    return path


def _randomize(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if name.endswith("norm.weight") else 0.15 * noise)


def make_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most ``vocab_size`` tokens, with a chat template. Id 0 begins a text, id 1 ends it."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(_TEXT, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", chat_template=_TEMPLATE, model_max_length=1 << 20
    )
