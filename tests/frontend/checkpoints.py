"""Writes checkpoints without weights: two kinds of tokenizers, and a template with tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'forbidden' %}{{ raise_exception('No such role: ' + m.role) }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}"
    "<tool_call>{{ call.function.arguments.city }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if tools %}[tools: {{ tools | tojson }}]{% endif %}"
    "{% if enable_thinking %}<think>{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXT = ["the quick brown fox jumps over the lazy dog again and again", "hello world, stop here; END of the line"]


def write_checkpoint(path: Path, backend: Tokenizer, *, config: dict[str, Any] | None = None, **files: Any) -> Path:
    """Write a directory that AsyncLLM can read. ``files`` are JSON files by their stem."""
    path.mkdir(exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    contents = {
        "config": {"vocab_size": backend.get_vocab_size(), "eos_token_id": 2, "max_position_embeddings": 512},
        "tokenizer_config": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "chat_template": TEMPLATE,
        },
        **files,
    }
    for name, content in contents.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def byte_level() -> Tokenizer:
    """A tokenizer like GPT-2's: every byte has a token."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        _TEXT,
        trainers.BpeTrainer(
            vocab_size=330,
            special_tokens=["<|bos|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return backend


def byte_fallback() -> Tokenizer:
    """A tokenizer like Llama 2's: spaces are ▁, unknown characters are bytes, the first space of a text is dropped."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for char in "▁abcdefghijklmnopqrstuvwxyz,.":
        vocab[char] = len(vocab)
    merges = [("▁", "a"), ("▁", "t"), ("h", "e"), ("▁t", "he"), ("l", "l")]
    vocab |= {left + right: len(vocab) + place for place, (left, right) in enumerate(merges)}
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return backend
