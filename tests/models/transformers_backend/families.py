"""Small random checkpoints of every served architecture, and the difference of their logits from transformers'.

``python -m tests.models.transformers_backend.families`` measures all, and writes the table of docs/models.md.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from raylm.models.architectures import GENERATIVE
from raylm.models.transformers_backend import TRANSFORMERS_BACKEND
from tests.checkpoints import BOS, EOS, SIZES
from tests.worker.driver import Driver, Reference, Tracked, random_prompt

TABLE = Path(__file__).parents[3] / "docs" / "models.md"
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
# Each family uses the entries that its configuration has.
_SIZES: dict[str, Any] = {
    **SIZES,
    "query_pre_attn_scalar": 16,
    "sliding_window": 8,
    # OPT and GPT-2
    "ffn_dim": 96,
    "word_embed_proj_dim": 64,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "num_shared_experts": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_SPECIAL = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": None}
_ALL_EXPERTS = {"num_experts_per_tok": 4, "moe_k": 4}


def make_family(path: Path, architecture: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """Write a checkpoint of ``architecture`` and return its path. ``overrides`` change its configuration.

    Float32 weights are large, so that a wrong weight has a larger effect than rounding. In bfloat16, large weights
    would amplify rounding, and rounding could swap two experts of nearly equal rank. So there the weights are small,
    and each token uses all experts.
    """
    cls = getattr(transformers, architecture)
    default = cls.config_class()
    mild = dtype is torch.bfloat16
    known = {name: value for name, value in (_SIZES | (_ALL_EXPERTS if mild else {})).items() if hasattr(default, name)}
    if "sliding_attention" in (getattr(default, "layer_types", None) or ()):
        known["layer_types"] = ["sliding_attention", "full_attention"]
    model = cls(cls.config_class(**known | _SPECIAL | overrides))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            noise = torch.randn(tensor.shape, generator=generator)
            if "norm" in name:
                tensor.add_((0.1 if mild else 0.2) * noise)
            elif name in model.state_dict():
                tensor.copy_((0.05 if mild else 0.15) * noise)
    model.to(dtype).save_pretrained(path)
    return path


def play(path: Path, dtype: torch.dtype) -> list[Tracked]:
    """Three parallel sequences with a paged KV cache: whole and chunked prompts, then decoding together."""
    driver = Driver(path, dtype=str(dtype).removeprefix("torch."))
    for seq, length in enumerate((40, 23, 5)):
        driver.add(seq, random_prompt(length, seq))
    driver.step({0: 17, 1: 23})
    driver.step({0: 23, 1: 1, 2: 5})
    for _ in range(4):
        driver.step({0: 1, 1: 1, 2: 1})
    return list(driver.sequences.values())


def logit_error(path: Path, dtype: torch.dtype) -> float:
    """The largest difference of any logit from transformers' in the same dtype, relative to the largest logit."""
    reference = Reference(path)
    reference.model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=dtype)
    return max(reference.error(seq) for seq in play(path, dtype))


def family_error(architecture: str, dtype: torch.dtype) -> float:
    """``logit_error`` of one architecture."""
    with tempfile.TemporaryDirectory() as path:
        return logit_error(make_family(Path(path), architecture, dtype), dtype)


def path_of(architecture: str) -> str:
    """The code that serves an architecture, as in the table."""
    return "transformers" if GENERATIVE[architecture] == TRANSFORMERS_BACKEND else "native"


def read_table() -> dict[str, tuple[str, float, float]]:
    """Architecture -> (path, error in float32, error in bfloat16), read from the document."""
    rows = [line.strip("| ").split(" | ") for line in TABLE.read_text().splitlines() if line.startswith("| `")]
    return {name.strip("`"): (path, float(exact), float(rounded)) for name, path, exact, rounded in rows}


def main() -> None:
    """Measure all architectures and write the table."""
    head = TABLE.read_text().partition("| `")[0]
    lines = []
    for architecture in sorted(GENERATIVE, key=str.lower):
        exact, rounded = (family_error(architecture, dtype) for dtype in BOUNDS)
        lines.append(f"| `{architecture}` | {path_of(architecture)} | {exact:.1e} | {rounded:.1e} |\n")
        print(lines[-1], end="", file=sys.stderr)
    TABLE.write_text(head + "".join(lines))


if __name__ == "__main__":
    main()
