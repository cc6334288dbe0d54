"""Makes LoRA adapters with peft, and generates reference tokens with transformers and peft."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(checkpoint: Path, path: Path, *, seed: int = 0, scale: float = 0.3, **config: Any) -> Path:
    """Save an adapter for ``checkpoint`` whose products are random and large enough to change tokens."""
    model = _base(checkpoint)
    options = {"r": 8, "lora_alpha": 16, "target_modules": list(ALL), "task_type": "CAUSAL_LM", **config}
    with quiet():
        adapted = get_peft_model(model, LoraConfig(**options))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    with quiet():
        adapted.save_pretrained(path)
    return path


def peft_tokens(checkpoint: Path, adapter: Path | None, prompts: Sequence[list[int]], count: int) -> list[list[int]]:
    """The greedy continuation of each prompt, computed alone in float32."""
    model: Any = _base(checkpoint)
    if adapter is not None:
        with quiet():
            model = PeftModel.from_pretrained(model, str(adapter)).eval()
    found = []
    for prompt in prompts:
        tokens = list(prompt)
        with torch.inference_mode():
            for _ in range(count):
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        found.append(tokens[len(prompt) :])
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """Silence peft's warnings about transformers: names that will change, and a base model that is on no hub."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _base(checkpoint: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
