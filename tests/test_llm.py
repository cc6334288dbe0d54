"""LLM: the whole engine in this process, with a small random checkpoint and with the embedded model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raylm import LLM, CacheConfig, EngineConfig, SamplingParams
from raylm.errors import ConfigError, ContextLengthError, InvalidRequestError, RayLMError
from raylm.llm import GenerationResult
from raylm.params import PoolingParams
from tests.checkpoints import make_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
SMALL = {"engine": {"threads": 1}, "cache": {"num_blocks": 64}}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(str(path), **SMALL) as llm:
        yield llm


def reference(path: Path, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens from transformers, without a cache."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path)
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_greedy_tokens_equal_transformers(llm: LLM, path: Path) -> None:
    prompts = [[5, 6, 7], [40, 9, 9, 30], list(range(2, 60))]
    found = llm.generate([prompts[0], "The scheduler", *prompts[1:]], GREEDY, progress=False)
    assert [result.token_ids for result in found[:1] + found[2:]] == [reference(path, p, 8) for p in prompts]
    assert found[1].prompt_token_ids == llm.tokenize("The scheduler")
    assert found[1].token_ids == reference(path, found[1].prompt_token_ids, 8)
    assert {result.finish_reason for result in found} == {"length"}


def test_one_prompt_is_not_many(llm: LLM) -> None:
    (by_text,) = llm.generate("The scheduler", GREEDY, progress=False)
    (by_ids,) = llm.generate(llm.tokenize("The scheduler"), GREEDY, progress=False)
    assert by_text.completions == by_ids.completions
    assert llm.generate([], GREEDY, progress=False) == []


def test_params_for_each_prompt_and_n(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=3, n=3, seed=1, logprobs=2, ignore_eos=True), GREEDY]
    first, second = llm.generate(["one", "two"], params, progress=False)
    assert [c.index for c in first.completions] == [0, 1, 2]
    assert [len(c.token_ids) for c in first.completions] == [3, 3, 3]
    assert len({tuple(c.token_ids) for c in first.completions}) > 1, "all three sequences are equal"
    for completion in first.completions:
        assert [entry.token_id for entry in completion.logprobs or []] == completion.token_ids
    assert len(second.token_ids) == 8
    with pytest.raises(InvalidRequestError, match="2 entries for 1 prompts"):
        llm.generate(["one"], params, progress=False)


@pytest.mark.parametrize("prompts", [5, None, {"a": 1}, [b"x"], [None], [[1.5]], [["a"]], [[True]], ["a", 5], [1, "a"]])
def test_what_is_no_prompt_is_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(InvalidRequestError, match="prompts"):
        llm.generate(prompts, progress=False)


@pytest.mark.parametrize("params", [{"max_tokens": 1}, [{"max_tokens": 1}], 5])
def test_what_are_no_params_is_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(InvalidRequestError, match="params must be SamplingParams"):
        llm.generate("a", params, progress=False)


def test_parameters_by_keyword_are_those_of_params(llm: LLM, path: Path) -> None:
    by_params = llm.generate(["one", "two"], GREEDY, progress=False)
    by_keyword = llm.generate(["one", "two"], temperature=0, max_tokens=8, ignore_eos=True, progress=False)
    assert [r.completions for r in by_keyword] == [r.completions for r in by_params]
    assert llm.generate([5, 6, 7], temperature=0, max_tokens=3, ignore_eos=True)[0].token_ids == reference(
        path, [5, 6, 7], 3
    )


def test_keywords_leave_the_rest_to_the_checkpoint(tmp_path: Path) -> None:
    """Its generation_config.json sets top_k 1. So any temperature draws the most likely token."""
    make_checkpoint(tmp_path)
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text() if file.exists() else "{}"), "top_k": 1}))
    with LLM(tmp_path, **SMALL) as llm:
        (result,) = llm.generate([5, 6, 7], temperature=2.0, max_tokens=8, ignore_eos=True)
    assert result.token_ids == reference(tmp_path, [5, 6, 7], 8)


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"max_token": 5}, "unknown parameter 'max_token'; did you mean max_tokens?"),
        ({"sampling_params": GREEDY}, "unknown parameter 'sampling_params'; did you mean params?"),
        ({"use_tqdm": False}, "unknown parameter 'use_tqdm'; did you mean progress?"),
        ({"params": GREEDY, "use_tqdm": False}, "unknown parameter 'use_tqdm'; did you mean progress?"),
        ({"guided_regex": "a"}, "did you mean structured_outputs={'regex': ...}?"),
        ({"zzzz": 1}, "unknown parameter 'zzzz'; SamplingParams has n, temperature, "),
        ({"temperature": 9}, "temperature must lie between 0 and 2."),
        ({"max_tokens": "5"}, "max_tokens must be an int or None."),
        ({"params": GREEDY, "seed": 5}, "params and seed cannot be combined"),
        ({"adapters": 5}, "adapters must be a name, or a list of names and None."),
        ({"adapters": [5]}, "adapters must be a name, or a list of names and None."),
    ],
)
def test_wrong_keywords_are_refused_by_name(llm: LLM, keywords: dict[str, Any], said: str) -> None:
    for ask in (llm.generate, llm.chat):
        with pytest.raises(InvalidRequestError) as refused:
            ask("a", **keywords)
        assert said in str(refused.value)
        assert refused.value.param in keywords


def test_the_form_of_an_answer_may_be_a_dict(llm: LLM) -> None:
    forms = [{"choice": ["yes", "no"]}, {"json": {"enum": ["yes", "no"]}}]
    found = [llm.generate("one", max_tokens=20, structured_outputs=form)[0].text for form in forms]
    assert found[0] in ("yes", "no")
    assert json.loads(found[1]) in ("yes", "no")


def test_chat_takes_a_text_a_conversation_or_many(llm: LLM) -> None:
    hello, bye = [{"role": "user", "content": "Hello"}], [{"role": "user", "content": "Bye"}]
    (one,) = llm.chat(hello, GREEDY, progress=False)
    two = llm.chat([bye, hello], GREEDY, progress=False)
    assert two[1].completions == one.completions
    assert one.prompt_token_ids == llm.tokenize("<|user|>Hello</s><|assistant|>", add_special_tokens=False)
    (text,) = llm.chat("Hello", temperature=0, max_tokens=8, ignore_eos=True)
    assert text == replace(one, num_cached_tokens=text.num_cached_tokens)
    mixed = llm.chat(["Bye", hello], GREEDY, progress=False)
    assert [r.completions for r in mixed] == [r.completions for r in two]
    assert llm.chat([], GREEDY) == []


@pytest.mark.parametrize("messages", [5, None, {"role": "user", "content": "a"}, [5], [[5]], ["a", None], [{}, "a"]])
def test_what_is_no_conversation_is_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(InvalidRequestError, match="messages") as refused:
        llm.chat(messages, progress=False)
    assert refused.value.param == "messages"


def test_vectors_are_arrays_of_ones_own(llm: LLM) -> None:
    first, second = llm.embed(["one", [5, 6, 7]], progress=False)
    assert (first.dtype, first.shape) == (np.float32, (64,))
    first += second  # the array is writable
    (short,) = llm.embed([5, 6, 7], dimensions=8, normalize=False)
    (whole,) = llm.embed([5, 6, 7], PoolingParams(normalize=False))
    np.testing.assert_array_equal(short, whole[:8])


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"dimension": 5}, "unknown parameter 'dimension'; did you mean dimensions?"),
        ({"temperature": 0}, "'temperature'; PoolingParams has pooling, normalize, dimensions, pair_at."),
        ({"params": GREEDY}, "params must be PoolingParams."),
        ({"params": PoolingParams(), "normalize": False}, "params and normalize cannot be combined"),
    ],
)
def test_wrong_ways_to_pool_are_refused_by_name(llm: LLM, keywords: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        llm.embed("a", **keywords)
    assert said in str(refused.value)


@pytest.mark.parametrize("fields", [{"tools": "a"}, {"tools": [5]}, {"tools": {}}, {"template_kwargs": 5}])
def test_what_no_template_takes_is_refused_by_name(llm: LLM, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        llm.chat("a", **fields)
    assert refused.value.param in fields


def test_an_error_tells_which_prompt_is_wrong(llm: LLM) -> None:
    turns = [{"role": "user", "content": "a " * 300}]
    calls: list[tuple[Callable[..., Any], Any, str]] = [
        (llm.generate, "", "prompt"),
        (llm.generate, ["a", "", "a"], "prompts[1]"),
        (llm.embed, ["a", [5] * 300], "prompts[1]"),
        (llm.chat, turns, "messages"),
        (llm.chat, ["a", "b", turns], "messages[2]"),
    ]
    for ask, given, name in calls:
        with pytest.raises(InvalidRequestError) as refused:
            ask(given, progress=False)
        assert refused.value.param == name


def test_the_first_error_surfaces_and_the_engine_lives_on(llm: LLM) -> None:
    with pytest.raises(ContextLengthError, match=r"258 tokens \(250 in the prompts\[1\], 8 in the completion\)"):
        llm.generate(["fine", [5] * 250, "fine"], GREEDY, progress=False)
    assert len(llm.generate("fine", GREEDY, progress=False)) == 1


def test_progress_of_several_prompts_is_shown(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["one", "two"], GREEDY, progress=False)
    llm.generate("one", GREEDY)
    llm.chat("one", GREEDY)
    llm.embed("one")
    llm.generate([], GREEDY)
    assert capsys.readouterr().err == ""
    llm.generate(["one", "two"], GREEDY)
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "tokens/s" in shown
    assert shown.endswith("\n")


def test_an_error_comes_behind_the_bars_line(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ContextLengthError):
        llm.generate(["fine", [5] * 300, "fine"], GREEDY)
    shown = capsys.readouterr().err
    assert "/3" in shown
    assert shown.endswith("\n")


async def test_works_where_a_loop_already_runs(llm: LLM) -> None:
    assert asyncio.get_running_loop().is_running()
    assert len(llm.generate("one", GREEDY, progress=False)[0].token_ids) == 8


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Make SIGINT raise KeyboardInterrupt. If the tests run as a background job, SIGINT is ignored otherwise."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_aborts_and_leaves_the_engine_fit(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    long = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True, n=32)

    def interrupt() -> None:
        while not llm._engine._core.scheduler.open_requests():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    interrupting = threading.Thread(target=interrupt, daemon=True)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["one two three"] * 200, long)
    shown = capsys.readouterr().err
    assert "/200" in shown
    assert shown.endswith("\n"), "the progress bar's line must end before the interrupt is raised"
    assert not llm._engine.async_llm._router.num_prompts
    interrupting.join()
    (result,) = llm.generate("one", GREEDY, progress=False)
    assert len(result.token_ids) == 8
    assert not llm._engine._core.scheduler.open_requests()


def test_closing(path: Path) -> None:
    llm = LLM(str(path), **SMALL)
    before = threading.active_count()
    llm.close()
    llm.close()
    assert threading.active_count() < before
    with pytest.raises(RayLMError, match="closed"):
        llm.generate("one", GREEDY)


def test_what_cannot_start_leaves_nothing_behind(path: Path, tmp_path: Path) -> None:
    before = set(threading.enumerate())  # some of these may be ending
    with pytest.raises(ConfigError):
        LLM(str(tmp_path), **SMALL)
    with pytest.raises(ConfigError, match="only 'local' is possible"):
        LLM(str(path), engine={"executor": "ray"})
    with pytest.raises(ConfigError, match=r"engine\.tensor_parallel_size: LLM runs in one process"):
        LLM(str(path), engine={"tensor_parallel_size": 2})
    assert set(threading.enumerate()) <= before


def test_knobs_have_short_names_and_vllms(path: Path) -> None:
    given = {"num_gpu_blocks_override": 40, "enable_prefix_caching": False, "max_num_seqs": 4, "max_model_len": 99}
    with LLM(path, **given, threads=1, scheduler={"policy": "priority"}, dtype="float32", quantization=None) as llm:
        assert (llm.info.num_blocks, llm.info.max_model_len, llm.info.threads) == (40, 99, 1)
        cache, scheduler = llm.config.cache, llm.config.scheduler
    assert (cache.prefix_caching, scheduler.max_num_seqs, scheduler.policy) == (False, 4, "priority")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_num_seq": 4}, "unknown key 'max_num_seq'; did you mean 'max_num_seqs'?"),
        ({"seed": 1}, "unknown key 'seed'; each request has its own, in its sampling parameters."),
        ({"gpu_memory_utilization": 0.9}, "the KV pool's size is cache.memory_gib, in GiB."),
        ({"max_num_seqs": 0}, "scheduler.max_num_seqs: Input should be greater than or equal to 1"),
        ({"cache": {"num_block": 4}}, "cache: unknown key 'num_block'; did you mean 'num_blocks'?"),
        ({"cache": 5}, "cache: Input should be a valid dictionary or instance of CacheConfig"),
        ({"cache": 5, "num_blocks": 4}, "cache: Input should be a valid dictionary or instance of CacheConfig"),
        ({"model": 5}, "model: Input should be a valid string"),
        ({"num_blocks": 4, "cache": {"num_blocks": 5}}, "cache.num_blocks: set twice, also as 'num_blocks'."),
        ({"tensor_parallel_size": 2}, "engine.tensor_parallel_size: LLM runs in one process, and each rank needs its"),
        ({"pipeline_parallel_size": 2}, "engine.pipeline_parallel_size: LLM runs in one process, and each stage needs"),
        ({"executor": "ray"}, "engine.executor: LLM runs in one process; only 'local' is possible here."),
        ({"max_queued_requests": 4}, "ingress.max_queued_requests: this knob is for servers and has no effect in LLM."),
        ({"engine": {"replicas": 2}}, "engine.replicas: this knob is for servers and has no effect in LLM."),
        ({"tool_parser": "hermes"}, "tool_parser: this knob is for servers and has no effect in LLM."),
        ({"log_format": "json"}, "log_format: this knob is for servers and has no effect in LLM."),
    ],
)
def test_wrong_knobs_are_refused_in_one_line(given: dict[str, Any], said: str) -> None:
    before = set(threading.enumerate())
    with pytest.raises(ConfigError) as refused:
        LLM(**given)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__ or refused.value.__context__ is None
    assert set(threading.enumerate()) <= before


def test_sections_may_be_objects(path: Path) -> None:
    with LLM(path, engine=EngineConfig(threads=1), cache=CacheConfig(num_blocks=20), block_size=32) as llm:
        assert (llm.info.threads, llm.info.num_blocks, llm.info.block_size) == (1, 20, 32)


def test_a_script_that_forgets_to_close_ends(path: Path) -> None:
    code = (
        "from raylm import LLM, SamplingParams\n"
        f"llm = LLM({str(path)!r}, **{SMALL!r})\n"
        "print(llm.generate('one', SamplingParams(max_tokens=2, ignore_eos=True), progress=False)[0].token_ids)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("[")


def test_the_embedded_model_answers() -> None:
    with LLM(**SMALL) as llm:
        (result,) = llm.chat([{"role": "user", "content": "What is 2 + 3?"}], progress=False)
    assert isinstance(result, GenerationResult)
    assert result.finish_reason == "stop"
    assert result.text.strip()


def test_the_embedded_models_pool_fits_it() -> None:
    with LLM(threads=1) as llm:
        assert llm.info.max_model_len == 8192
        assert llm.info.num_blocks <= (64 + 16) * 8192 // 16 + 64
        assert llm.info.kv_cache_bytes < 1.6 * 2**30
