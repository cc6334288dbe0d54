"""Tokenizer, compared with transformers, on the event loop and in threads."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from raylm.errors import InvalidRequestError
from raylm.frontend.text import tokenizer as module
from raylm.frontend.text.tokenizer import INLINE_CHARS, LARGE_CHARS, Tokenizer

TEXTS = ["hello world", "", "wörld €\n", "<|im_start|>user\nhi<|im_end|>", "x" * 20_000]


@pytest.mark.parametrize("text", TEXTS)
async def test_ids_equal_transformers(checkpoint: Path, tokenizer: Tokenizer, text: str) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(checkpoint)
    for special in (True, False):
        found = await tokenizer.encode(text, add_special_tokens=special)
        assert found == reference.encode(text, add_special_tokens=special)
        assert await tokenizer.decode(found) == reference.decode(found)


async def test_long_texts_leave_the_event_loop(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    inner = tokenizer.encode_now
    monkeypatch.setattr(
        tokenizer, "encode_now", lambda text, **more: seen.append(threading.get_ident()) or inner(text, **more)
    )
    await tokenizer.encode("short", add_special_tokens=True)
    await tokenizer.encode("x" * (module.INLINE_CHARS + 1), add_special_tokens=True)
    assert seen[0] == threading.get_ident()
    assert seen[1] != threading.get_ident()


async def test_refuses(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequestError, match="surrogate"):
        await tokenizer.encode("a\ud800", add_special_tokens=True)
    for wrong in ([-1], [tokenizer.vocab_size], [2**80]):
        with pytest.raises(InvalidRequestError, match="ids from 0"):
            await tokenizer.decode(wrong)
    monkeypatch.setattr(module, "MAX_CHARS", 10)
    with pytest.raises(InvalidRequestError, match="more than 10 characters"):
        await tokenizer.encode("x" * 11, add_special_tokens=True)


def test_the_front_end_needs_no_torch(checkpoint: Path) -> None:
    code = (
        "import sys; from raylm.config import Config; from raylm.frontend import AsyncLLM;"
        f"AsyncLLM(Config(model={str(checkpoint)!r})); assert 'torch' not in sys.modules and 'ray' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


async def test_many_short_texts_at_once_go_to_threads(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    on_loop = 0
    loop_thread = threading.get_ident()
    real = tokenizer.encode_now

    def counted(text: str, **fields: Any) -> list[int]:
        nonlocal on_loop
        on_loop += len(text) * (threading.get_ident() == loop_thread)
        return real(text, **fields)

    monkeypatch.setattr(tokenizer, "encode_now", counted)
    texts = [f"{i} " + "hello world " * 300 for i in range(40)]
    found = await asyncio.gather(*(tokenizer.encode(text, add_special_tokens=False) for text in texts))
    assert found == [real(text, add_special_tokens=False) for text in texts]
    assert on_loop <= 3 * INLINE_CHARS, "one turn of the loop, and a few turns in which threads ended"
    await asyncio.sleep(0)
    before = on_loop
    await tokenizer.encode("hello", add_special_tokens=False)
    assert on_loop == before + 5, "the next turn starts a new count"


async def test_short_texts_do_not_wait_for_long_ones(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    real, begun, ended = tokenizer.encode_now, [0], threading.Event()

    def held(text: str, **fields: Any) -> list[int]:
        if len(text) > LARGE_CHARS:
            begun[0] += 1
            ended.wait(300)
        return real(text, **fields)

    monkeypatch.setattr(tokenizer, "encode_now", held)
    long = [asyncio.create_task(tokenizer.encode("9" * (LARGE_CHARS + 1), add_special_tokens=False)) for _ in range(4)]
    try:
        async with asyncio.timeout(300):
            while not begun[0]:  # noqa: ASYNC110 - a thread has no event of this loop
                await asyncio.sleep(0.005)
            short = "hello " * 2_000
            assert await tokenizer.encode(short, add_special_tokens=False) == real(short, add_special_tokens=False)
        assert not any(task.done() for task in long)
        long[3].cancel()
    finally:
        ended.set()
    ids = [await task for task in long[:3]]
    assert ids == [real("9" * (LARGE_CHARS + 1), add_special_tokens=False)] * 3
    assert begun == [3], "a cancelled text was still tokenized"


async def test_a_regex_that_panics_ends_at_the_text(checkpoint: Path, tmp_path: Path) -> None:
    """A checkpoint's regex may backtrack forever. The library ends it with a panic."""
    path = Path(shutil.copytree(checkpoint, tmp_path / "checkpoint"))
    described = json.loads((path / "tokenizer.json").read_text())
    described["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"Regex": "(x+x+)+y"},
        "behavior": "Isolated",
        "invert": False,
    }
    (path / "tokenizer.json").write_text(json.dumps(described))
    tokenizer = Tokenizer(path)
    with pytest.raises(InvalidRequestError, match=r"tokenizer cannot tokenize prompt: .*retry-limit") as refused:
        await tokenizer.encode("x" * 200, add_special_tokens=False)
    assert refused.value.param == "prompt"
    assert await tokenizer.encode("a", add_special_tokens=False)
    tokenizer.close()
