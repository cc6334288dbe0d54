"""LoRA adapters end to end: the tokens of transformers and peft, adapters mixed in one batch, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from raylm import LLM, SamplingParams
from tests.adapters import make_adapter, peft_tokens
from tests.checkpoints import make_checkpoint

COUNT = 12
PROMPTS = [[5 + place, 17, 40 + 3 * place, 8, 99] for place in range(8)]
ADAPTERS = [None, "all", "attention", "mlp", "all", None, "mlp", "attention"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base"), "qwen3")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    make_adapter(checkpoint, root / "all", seed=1)
    make_adapter(checkpoint, root / "attention", seed=2, r=64, target_modules=["q_proj", "v_proj"], use_rslora=True)
    make_adapter(checkpoint, root / "mlp", seed=3, r=3, target_modules=["o_proj", "gate_proj", "down_proj"])
    return root


@pytest.fixture(scope="module")
def expected(checkpoint: Path, root: Path) -> list[list[int]]:
    return [
        peft_tokens(checkpoint, None if name is None else root / name, [prompt], COUNT)[0]
        for name, prompt in zip(ADAPTERS, PROMPTS, strict=True)
    ]


@pytest.fixture(scope="module")
def llm(checkpoint: Path, root: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint), dtype="float32", lora={"root": str(root)}, cache={"num_blocks": 128}) as llm:
        for name in ("all", "attention", "mlp"):
            llm.load_adapter(name, name)
        yield llm


def test_adapters_and_the_base_in_one_batch_give_the_tokens_of_peft(llm: LLM, expected: list[list[int]]) -> None:
    results = llm.generate(PROMPTS, GREEDY, adapters=ADAPTERS, progress=False)
    assert [result.token_ids for result in results] == expected
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
