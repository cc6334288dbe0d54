"""LoRA adapters end to end: the tokens of transformers and peft, mixed adapters in a batch, and refused adapters."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raylm import LLM, Config, SamplingParams
from raylm.checkpoint import EMBEDDED
from raylm.engine.block_hashes import ChainedHasher
from raylm.errors import ConfigError, InvalidRequestError, ModelNotFoundError
from raylm.models import lora
from raylm.models.llama import LlamaForCausalLM
from tests.adapters import make_adapter, peft_tokens
from tests.checkpoints import make_checkpoint

EXAMPLE = Path(__file__).parent.parent / "examples" / "lora_adapter" / "json-answers"
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


def test_what_one_step_mixes_changes_nothing(llm: LLM, expected: list[list[int]]) -> None:
    alone = [
        llm.generate([prompt], GREEDY, adapters=name, progress=False)[0].token_ids
        for name, prompt in zip(ADAPTERS, PROMPTS, strict=True)
    ]
    assert alone == expected


@pytest.mark.parametrize(
    "options",
    [
        {"scheduler": {"max_num_batched_tokens": 64, "max_num_seqs": 4}},  # prompts in chunks, a queue
        pytest.param({"scheduler": {"speculative_tokens": 4}}),
        pytest.param({"quantization": "int8"}),
    ],
    ids=["chunked", "speculating", "int8"],
)
def test_however_steps_are_made_up(checkpoint: Path, root: Path, options: dict[str, Any]) -> None:
    prompts = [[7, 9, 7 + place] * (3 + 20 * (place % 3)) for place in range(6)]
    names = ["all", None, "mlp", "attention", "all", "mlp"]
    with LLM(str(checkpoint), dtype="float32", lora={"root": str(root)}, cache={"num_blocks": 128}, **options) as llm:
        for name in ("all", "attention", "mlp"):
            llm.load_adapter(name, str(root / name))
        results = llm.generate(prompts, GREEDY, adapters=names, progress=False)
        alone = [llm.generate([p], GREEDY, adapters=n, progress=False)[0] for p, n in zip(prompts, names, strict=True)]
    assert [result.token_ids for result in results] == [result.token_ids for result in alone]
    if "quantization" not in options:
        wanted = [
            peft_tokens(checkpoint, None if name is None else root / name, [prompt], COUNT)[0]
            for name, prompt in zip(names, prompts, strict=True)
        ]
        assert [result.token_ids for result in results] == wanted


def test_layer_by_layer_gives_the_same_tokens(
    checkpoint: Path, root: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaForCausalLM, "native_decoder", lambda *_: None)
    with LLM(str(checkpoint), dtype="float32", lora={"root": str(root)}, cache={"num_blocks": 128}) as llm:
        for name in ("all", "attention", "mlp"):
            llm.load_adapter(name, name)
        results = llm.generate(PROMPTS, GREEDY, adapters=ADAPTERS, progress=False)
    assert [result.token_ids for result in results] == expected


LONG = list(range(20, 84))  # four blocks


def shared_prompt(llm: LLM) -> list[tuple[str | None, list[int], int]]:
    """Send the same prompt with each adapter, twice.

    Returns (adapter, tokens, cached prompt tokens) of each request.
    """
    found = []
    for name in [None, "all", "mlp"] * 2:
        (result,) = llm.generate([LONG], GREEDY, adapters=name, progress=False)
        found.append((name, result.token_ids, result.num_cached_tokens))
    return found


@pytest.fixture
def cold(checkpoint: Path, root: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint), dtype="float32", lora={"root": str(root)}, cache={"num_blocks": 128}) as llm:
        for name in ("all", "mlp"):
            llm.load_adapter(name, name)
        yield llm


def test_the_prefix_cache_keeps_adapters_apart(cold: LLM, checkpoint: Path, root: Path) -> None:
    wanted = {
        name: peft_tokens(checkpoint, None if name is None else root / name, [LONG], COUNT)[0]
        for name in (None, "all", "mlp")
    }
    found = shared_prompt(cold)
    assert [tokens for _, tokens, _ in found] == [wanted[name] for name, _, _ in found]
    assert [cached for *_, cached in found] == [0, 0, 0, 48, 48, 48]


def test_a_hash_that_forgets_the_adapter_is_seen(cold: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    right = shared_prompt(cold)
    monkeypatch.setattr(ChainedHasher, "root", lambda self, adapter, salt: b"the same for all")
    assert [tokens for _, tokens, _ in shared_prompt(cold)] != [tokens for _, tokens, _ in right]


def test_an_adapter_loaded_under_a_name_that_was_free_again_shares_nothing(cold: LLM, root: Path) -> None:
    before = cold.generate([LONG], GREEDY, adapters="all", progress=False)[0]
    cold.unload_adapter("all")
    with pytest.raises(ModelNotFoundError, match="'all' is not loaded"):
        cold.generate([LONG], GREEDY, adapters="all", progress=False)
    cold.load_adapter("all", "attention")
    after = cold.generate([LONG], GREEDY, adapters="all", progress=False)[0]
    assert after.num_cached_tokens == 0
    assert after.token_ids != before.token_ids


def rewrite(path: Path, **changes: Any) -> Path:
    """Change values in an adapter's adapter_config.json."""
    file = path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return path


def as_pipe(file: Path) -> None:
    """Replace a file by a pipe, so that opening it would block forever."""
    file.unlink()
    os.mkfifo(file)


REFUSALS: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "dora": (lambda base, path: make_adapter(base, path, use_dora=True), "lora_magnitude_vector|use_dora"),
    "bias": (lambda base, path: make_adapter(base, path, bias="lora_only"), "bias is 'lora_only'"),
    "saved": (lambda base, path: make_adapter(base, path, modules_to_save=["lm_head"]), "modules_to_save"),
    "head": (lambda base, path: make_adapter(base, path, target_modules=["lm_head"]), "the weight .*lm_head"),
    "rank": (lambda base, path: make_adapter(base, path, r=65), "rank 65; lora.max_rank is 64"),
    "pissa": (lambda base, path: rewrite(make_adapter(base, path), init_lora_weights="pissa"), "pissa"),
    "alpha": (lambda base, path: rewrite(make_adapter(base, path), alpha_pattern={"q_proj": 1}), "alpha_pattern"),
    "kind": (lambda base, path: rewrite(make_adapter(base, path), peft_type="IA3"), "peft_type is 'IA3'"),
    "unknown": (lambda base, path: rewrite(make_adapter(base, path), use_magic=True), "use_magic is set"),
    "empty": (lambda base, path: path.mkdir(), "adapter_config.json cannot be read"),
    "broken": (
        lambda base, path: (make_adapter(base, path) / "adapter_model.safetensors").write_bytes(b"\0" * 64),
        "adapter_model.safetensors cannot be read",
    ),
    "digits": (lambda base, path: rewrite(make_adapter(base, path), lora_alpha=10**400), "must be a number"),
    "alpha's size": (lambda base, path: rewrite(make_adapter(base, path), lora_alpha=1e30), "must be a number"),
    "infinite": (
        lambda base, path: rewrite(make_adapter(base, path, scale=1e36), lora_alpha=1e6), "not finite in float32"),
    "config is a pipe": (
        lambda base, path: as_pipe(make_adapter(base, path) / "adapter_config.json"), "is not a regular file"),
    "weights are a pipe": (
        lambda base, path: as_pipe(make_adapter(base, path) / "adapter_model.safetensors"), "is not a regular file"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_not_served_is_refused_by_name(llm: LLM, checkpoint: Path, root: Path, name: str) -> None:
    make, said = REFUSALS[name]
    make(checkpoint, root / f"bad-{name}")
    with pytest.raises(InvalidRequestError, match=said) as refused:
        llm.load_adapter(f"bad-{name}", f"bad-{name}")
    assert refused.value.param == "lora_path"
    assert llm.generate([PROMPTS[0]], GREEDY, progress=False)[0].token_ids


def test_files_that_are_replaced_while_they_are_read_are_refused(
    llm: LLM, checkpoint: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training run saves its next checkpoint. Otherwise the old weights would get the digest of the new ones."""
    moving, newer = (make_adapter(checkpoint, root / name, seed=seed) for name, seed in (("moving", 5), ("newer", 6)))

    def read_pairs(file: Path, shapes: Any) -> Any:
        pairs = read(file, shapes)
        (newer / file.name).replace(file)
        return pairs

    read = lora._read_pairs
    with monkeypatch.context() as patch:
        patch.setattr(lora, "_read_pairs", read_pairs)
        with pytest.raises(InvalidRequestError, match="changed while they were read") as refused:
            llm.load_adapter("moving", "moving")
    assert refused.value.param == "lora_path"
    with pytest.raises(ModelNotFoundError):
        llm.generate([PROMPTS[0]], GREEDY, adapters="moving", progress=False)
    llm.load_adapter("moving", "moving")
    found = llm.generate([PROMPTS[0]], GREEDY, adapters="moving", progress=False)
    assert found[0].token_ids == peft_tokens(checkpoint, moving, [PROMPTS[0]], COUNT)[0]
    llm.unload_adapter("moving")


def test_an_adapter_of_another_model_is_refused_with_both_shapes(llm: LLM, root: Path, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", "qwen3", hidden_size=96)
    make_adapter(other, root / "other")
    with pytest.raises(InvalidRequestError, match=r"has lora_A .*96.*; this model's module is .*64"):
        llm.load_adapter("other", "other")


@pytest.mark.parametrize("path", ["..", ".", "nowhere", "../adapters", "/etc", "link", "a\0b", "x" * 5000, "loop"])
def test_paths_outside_the_root_are_refused(llm: LLM, root: Path, tmp_path: Path, path: str) -> None:
    if path == "link":
        (root / "link").symlink_to(tmp_path)
    if path == "loop":
        (root / "loop").symlink_to(root / "loop")
    with pytest.raises(InvalidRequestError, match="is not a directory below") as refused:
        llm.load_adapter("outside", path)
    assert refused.value.param == "lora_path"


def test_adapters_are_off_by_default(checkpoint: Path) -> None:
    with LLM(str(checkpoint), cache={"num_blocks": 16}) as llm:
        with pytest.raises(InvalidRequestError, match=r"lora.root is not set"):
            llm.load_adapter("all", "all")
        with pytest.raises(ModelNotFoundError, match="'all' is not loaded"):
            llm.generate([[5, 6]], GREEDY, adapters="all", progress=False)


def test_models_and_layouts_without_adapters_say_so(tmp_path: Path, root: Path) -> None:
    with pytest.raises(ValueError, match=r"lora.root: adapters are not served with engine.tensor_parallel_size"):
        Config(lora={"root": str(root)}, engine={"tensor_parallel_size": 2})
    with pytest.raises(ConfigError, match=r"lora.root: .* not a directory"):
        LLM("embedded", lora={"root": str(tmp_path / "nowhere")}, cache={"num_blocks": 16})


def test_the_example_answers_as_json_with_the_tokens_of_peft() -> None:
    questions = ["What is a KV cache?", "What is 12 + 30?", "Count from 3 to 9."]
    talks = [[{"role": "user", "content": question}] for question in questions]
    params = SamplingParams(temperature=0.0, max_tokens=64)
    with LLM("embedded", dtype="float32", lora={"root": str(EXAMPLE.parent)}, cache={"num_blocks": 256}) as llm:
        llm.load_adapter("json", EXAMPLE.name)
        base = llm.chat(talks, params, progress=False)
        both = llm.chat([*talks, *talks], params, adapters=["json", None] * 3, progress=False)
        adapted = llm.chat(talks, params, adapters="json", progress=False)
    assert all(
        json.loads(result.text) == {"answer": result_of.text} for result, result_of in zip(adapted, base, strict=True)
    )
    prompts = [result.prompt_token_ids for result in adapted]
    for prompt, result in zip(prompts, adapted, strict=True):
        assert peft_tokens(EMBEDDED, EXAMPLE, [prompt], len(result.token_ids))[0] == result.token_ids
    expected = [(adapted if place % 2 == 0 else base)[place % 3].token_ids for place in range(6)]
    assert [result.token_ids for result in both] == expected
