"""LLM: the whole engine in this process, on a small random checkpoint and on the embedded model."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from raylm import LLM, SamplingParams
from raylm.errors import ConfigError, ContextLengthError, InvalidRequestError, RayLMError
from raylm.llm import GenerationResult
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
    """Greedy tokens by transformers, without a cache."""
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
    assert len({tuple(c.token_ids) for c in first.completions}) > 1, "three sequences drew the same"
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


def test_chat_takes_one_conversation_or_many(llm: LLM) -> None:
    hello, bye = [{"role": "user", "content": "Hello"}], [{"role": "user", "content": "Bye"}]
    (one,) = llm.chat(hello, GREEDY, progress=False)
    two = llm.chat([bye, hello], GREEDY, progress=False)
    assert two[1].completions == one.completions
    assert one.prompt_token_ids == llm.tokenize("<|user|>Hello</s><|assistant|>", add_special_tokens=False)


def test_the_first_error_surfaces_and_the_engine_lives_on(llm: LLM) -> None:
    with pytest.raises(ContextLengthError):
        llm.generate(["fine", [5] * 300, "fine"], GREEDY, progress=False)
    assert len(llm.generate("fine", GREEDY, progress=False)) == 1


def test_progress_can_be_switched_off(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate("one", GREEDY, progress=False)
    assert capsys.readouterr().err == ""
    llm.generate(["one", "two"], GREEDY)
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "tokens/s" in shown


async def test_works_where_a_loop_already_runs(llm: LLM) -> None:
    assert asyncio.get_running_loop().is_running()
    assert len(llm.generate("one", GREEDY, progress=False)[0].token_ids) == 8


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C raises here, also where the tests run as a background job, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_aborts_and_leaves_the_engine_fit(llm: LLM) -> None:
    long = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True, n=32)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["one two three"] * 200, long, progress=False)
    timer.join()
    (result,) = llm.generate("one", GREEDY, progress=False)
    assert len(result.token_ids) == 8
    assert not llm._engine.async_llm._outputs._open
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
    before = set(threading.enumerate())  # of which some may be ending
    with pytest.raises(ConfigError):
        LLM(str(tmp_path), **SMALL)
    with pytest.raises(ConfigError, match="only 'local' is possible"):
        LLM(str(path), engine={"executor": "ray"})
    with pytest.raises(ConfigError, match=r"engine\.tensor_parallel_size: LLM runs in one process"):
        LLM(str(path), engine={"tensor_parallel_size": 2})
    assert set(threading.enumerate()) <= before


def test_a_script_that_forgets_to_close_ends(path: Path) -> None:
    code = (
        "from raylm import LLM, SamplingParams\n"
        f"llm = LLM({str(path)!r}, **{SMALL!r})\n"
        "print(llm.generate('one', SamplingParams(max_tokens=2, ignore_eos=True), progress=False)[0].token_ids)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("[")


def test_the_embedded_model_answers() -> None:
    with LLM(**SMALL) as llm:
        (result,) = llm.chat([{"role": "user", "content": "What is 2 + 3?"}], progress=False)
    assert isinstance(result, GenerationResult)
    assert result.finish_reason == "stop"
    assert result.text.strip()
