"""`tokens_per_minute` over HTTP: all prompts of a request count, and a resumed stream does not count again."""

from __future__ import annotations

import base64
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from raylm.config import Config
from raylm.frontend import AsyncLLM
from raylm.ingress import build_asgi_app
from raylm.ingress.http.stream_ids import RESUMABLE
from tests.ingress.harness import client_of, events
from tests.ingress.refused import error_of
from tests.ingress.writing_engine import WritingEngine

ALICE = {"x-api-key": "sk-alice"}


@asynccontextmanager
async def limited(folder: Path, limit: int, parks: bool = False) -> AsyncIterator[httpx.AsyncClient]:
    (folder / "keys").write_text(f"alice: sk-alice tokens_per_minute={limit}\nroot: sk-root admin\n")
    keys = {"api_keys_file": str(folder / "keys"), "store": ":memory:"}
    config = Config.model_validate({"model": "embedded", "ingress": keys})
    llm = AsyncLLM(config)
    engine = WritingEngine("e", Random(0))
    engine.parks, engine.never_lost = parks, parks
    llm.add_engine(engine)
    async with client_of(build_asgi_app(llm, config)) as client:
        yield client
    await llm.stop()


async def left(client: httpx.AsyncClient) -> int:
    """The remaining tokens of the minute, without the 2 tokens of this request itself."""
    body = {"model": "embedded", "prompt": [5], "max_tokens": 1}
    answer = await client.post("/v1/completions", json=body, headers=ALICE)
    assert answer.status_code == 200, answer.text
    return int(answer.headers["x-ratelimit-remaining-tokens"])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_batch_that_never_fits_is_refused_as_a_whole_and_takes_nothing(tmp_path: Path, stream: bool) -> None:
    async with limited(tmp_path, 100) as client:
        body = {"model": "embedded", "prompt": [[5, 6]] * 4, "max_tokens": 40, "stream": stream}
        error = error_of(await client.post("/v1/completions", json=body, headers=ALICE))
        assert error["param"] == "max_tokens"
        assert "at most 23 for each of these prompts" in error["message"]
        assert await left(client) == 98
        fits = body | {"max_tokens": 23, "stream": False}
        assert error_of(await client.post("/v1/completions", json=fits, headers=ALICE), 429)["code"] == (
            "rate_limit_exceeded"
        )
        assert await left(client) == 96, "a refused request takes no tokens"


async def test_vectors_that_never_fit_take_nothing(tmp_path: Path) -> None:
    async with limited(tmp_path, 100) as client:
        body = {"model": "embedded", "input": [[5] * 30] * 4}
        assert error_of(await client.post("/v1/embeddings", json=body, headers=ALICE))["param"] == "input"
        assert await left(client) == 98


async def test_a_stream_that_goes_on_counts_for_the_rest_alone(tmp_path: Path) -> None:
    async with limited(tmp_path, 2000) as client:
        body: dict[str, Any] = {"model": "embedded", "prompt": [5] * 100, "max_tokens": 60, "stream": True, "seed": 2}
        whole = await client.post("/v1/completions", json=body, headers=ALICE | {RESUMABLE: "true"})
        ids = re.findall(r"^id: (.*)$", whole.text, re.MULTILINE)
        before = await left(client)
        assert 2000 - 162 <= before < 2000 - 102
        for event_id in (ids[-1], ids[-1], ids[len(ids) // 2]):
            again = await client.post("/v1/completions", json=body, headers=ALICE | {"last-event-id": event_id})
            assert again.status_code == 200, again.text
        rest = await left(client)
        assert before - 2 - 60 < rest < before - 2, "only half of the answer, without its prompt"
        for place in (-1, -2, -3, -4):  # forged counts of sent tokens
            forged = bytearray(base64.b64decode(ids[0]))
            forged[place] ^= 1
            headers = ALICE | {"last-event-id": base64.b64encode(forged).decode()}
            again = await client.post("/v1/completions", json=body, headers=headers)
            assert error_of(again, 400)["param"] == "Last-Event-ID"
        assert await left(client) >= rest - 2


@pytest.mark.parametrize("logprobs", [None, 1])
async def test_what_is_drawn_again_for_a_stream_counts_from_the_second_time_on(
    tmp_path: Path, logprobs: int | None
) -> None:
    """The id of an event stays valid. Each further use would otherwise compute all tokens before it for free."""
    async with limited(tmp_path, 2000) as client:
        body = {"model": "embedded", "prompt": [5] * 100, "max_tokens": 60, "stream": True, "seed": 2}
        body |= {"logprobs": logprobs, "stream_options": {"include_usage": True}}
        whole = await client.post("/v1/completions", json=body, headers=ALICE | {RESUMABLE: "true"})
        late = ALICE | {"last-event-id": re.findall(r"^id: (.*)$", whole.text, re.MULTILINE)[-5]}
        tokens = events(whole.text)[-2]["usage"]["total_tokens"]
        before = await left(client)
        said = (await client.post("/v1/completions", json=body, headers=late)).text
        remaining = await left(client)
        assert before - 60 < remaining, "the first time only the rest counts"
        for _ in range(3):
            assert (await client.post("/v1/completions", json=body, headers=late)).text.count("data: ") > 1
            assert await left(client) == remaining - tokens - 2
            remaining -= tokens + 2
        while remaining >= 162:
            assert (await client.post("/v1/completions", json=body, headers=late)).status_code == 200
            remaining = await left(client)
        refused = await client.post("/v1/completions", json=body, headers=late)
        assert error_of(refused, 429)["code"] == "rate_limit_exceeded"
        assert await left(client) == remaining - 2, "a refused request takes no tokens"
    assert "[DONE]" in said


async def test_what_engines_still_have_of_a_stream_never_counts_again(tmp_path: Path) -> None:
    async with limited(tmp_path, 2000, parks=True) as client:
        body = {"model": "embedded", "prompt": [5] * 100, "max_tokens": 60, "stream": True, "seed": 2}
        whole = await client.post("/v1/completions", json=body, headers=ALICE | {RESUMABLE: "true"})
        late = ALICE | {"last-event-id": re.findall(r"^id: (.*)$", whole.text, re.MULTILINE)[-4]}
        remaining = await left(client)
        for _ in range(20):
            assert (await client.post("/v1/completions", json=body, headers=late)).status_code == 200
        assert await left(client) > remaining - 20 * 60, "only the rest counts, without the prompt of 100 tokens"
