"""The whole path without a model: HTTP, AsyncLLM and EngineCore with its scheduler, and a worker that is a function."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from tokenizers import Tokenizer

from raylm.checkpoint import EMBEDDED
from raylm.config import Config
from raylm.engine import EngineCore
from raylm.frontend import Admission, AsyncLLM, LocalEngineClient
from raylm.ingress import build_asgi_app
from raylm.messages import EngineInfo
from tests.fakes import FakeExecutor, FakeModel, FakeWorker
from tests.ingress.harness import client_of, events, served, until
from tests.ingress.openai.test_openai_schema import check
from tests.ingress.refused import error_of

TOKENIZER = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
MODEL = FakeModel(vocab_size=TOKENIZER.get_vocab_size(), eos_token_id=10**9, eos_period=10**12)  # no token is EOS
CONFIG = Config.model_validate({
    "model": "embedded", "cache": {"num_blocks": 64, "block_size": 16}, "max_model_len": 256,
    "scheduler": {"max_num_batched_tokens": 32, "max_num_seqs": 8},
})  # fmt: skip
PROMPT = "The scheduler decides what runs next, and the worker runs it."
# The series that vLLM's examples/observability/prometheus_grafana/grafana.json uses.
VLLMS_DASHBOARD = {
    *(
        f"vllm:{name}_{part}"
        for name in ("e2e_request_latency_seconds", "inter_token_latency_seconds", "time_to_first_token_seconds")
        for part in ("bucket", "sum", "count")
    ),
    "vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total",
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
    "vllm:request_prompt_tokens_bucket", "vllm:request_generation_tokens_bucket", "vllm:request_queue_time_seconds_sum",
    "vllm:request_prefill_time_seconds_sum", "vllm:request_decode_time_seconds_sum",
    "vllm:request_max_num_generation_tokens_sum",
}  # fmt: skip
TEXT: dict[str, Any] = {"model": "embedded", "prompt": PROMPT, "max_tokens": 24, "seed": 7}
CHAT: dict[str, Any] = {
    "model": "embedded",
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 12,
    "seed": 7,
}


class Stack:
    """The app and its components."""

    def __init__(self, admission: Admission | None = None) -> None:
        self.executor = FakeExecutor(FakeWorker(model=MODEL))
        self.core = EngineCore(CONFIG, self.executor)
        self.llm = AsyncLLM(CONFIG, admission=admission)
        self.app: Starlette = build_asgi_app(self.llm, CONFIG)

    @property
    def running(self) -> int:
        stats = self.core.scheduler.stats()
        return stats.running + stats.waiting


@asynccontextmanager
async def running_stack(admission: Admission | None = None) -> AsyncIterator[Stack]:
    stack = Stack(admission)
    info = await stack.core.start()
    loop = asyncio.create_task(stack.core.run())
    stack.llm.add_engine(LocalEngineClient(stack.core, EngineInfo("e", info.max_model_len, info)))
    yield stack
    await stack.llm.stop()
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with running_stack() as stack:
        yield stack


@pytest.fixture
async def api(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(stack.app) as client:
        yield client


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


def wanted(prompt: list[int], seed: int, count: int) -> str:
    """The reference text, computed without blocks, batches or streams. An incomplete last character is held back."""
    text: str = TOKENIZER.decode(MODEL.continuation(prompt, seed, count), skip_special_tokens=True)
    return text


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_text_is_the_models_whole_and_streamed(api: httpx.AsyncClient) -> None:
    reference = wanted(ids_of(PROMPT), 7, 24)
    answer = await post(api, "/v1/completions", TEXT)
    check(answer, "CreateCompletionResponse")
    assert answer["choices"][0]["text"] == reference
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == len(ids_of(PROMPT))
    assert answer["usage"]["completion_tokens"] == 24
    *chunks, done = events((await api.post("/v1/completions", json=TEXT | {"stream": True})).text)
    assert done == "[DONE]"
    for chunk in chunks:
        check(chunk, "CreateCompletionResponse")
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == reference


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", TEXT | {"prompt": [PROMPT, "Hi"], "logprobs": 1, "echo": True}),
        ("/v1/completions", TEXT | {"stream": True}),
        ("/v1/chat/completions", CHAT | {"n": 2}),
    ],
)
async def test_an_answered_request_leaves_nothing_to_the_garbage_collector(
    api: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    """Thousands of prompts of a large request would otherwise stay until Python's next full collection."""
    await api.post(path, json=body)
    gc.collect()
    gc.disable()
    try:
        assert (await api.post(path, json=body)).status_code == 200
        await asyncio.sleep(0.01)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = {type(one).__name__ for one in gc.garbage if type(one).__module__.startswith("raylm.")}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert left == set()


async def test_a_second_time_the_prefix_is_cached(api: httpx.AsyncClient) -> None:
    body = TEXT | {"prompt": ids_of(PROMPT * 4)}
    first, second = [await post(api, "/v1/completions", body) for _ in range(2)]
    assert first["choices"] == second["choices"]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16
    salted = await post(api, "/v1/completions", body | {"cache_salt": "mine"})
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a_batch_of_prompts_with_n(api: httpx.AsyncClient) -> None:
    prompts = [ids_of(PROMPT)[:3], ids_of(PROMPT)[2:9], ids_of(PROMPT * 2)]
    answer = await post(api, "/v1/completions", TEXT | {"prompt": prompts, "n": 2})
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts[::2] == [wanted(prompt, 7, 24) for prompt in prompts]
    assert texts[1] != texts[0]


async def test_stop_strings_end_the_text_before_them(api: httpx.AsyncClient, stack: Stack) -> None:
    whole = wanted(ids_of(PROMPT), 7, 24)
    stop = whole[30:36]
    answer = await post(api, "/v1/completions", TEXT | {"stop": stop})
    (choice,) = answer["choices"]
    assert choice["text"] == whole[: whole.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    streamed = events((await api.post("/v1/completions", json=TEXT | {"stop": [stop], "stream": True})).text)
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed[:-1]) == choice["text"]
    await until(lambda: stack.running == 0)


async def test_a_stop_string_frees_the_engine_of_its_sequence_alone(api: httpx.AsyncClient, stack: Stack) -> None:
    stack.executor._delay_s = 0.002
    body = TEXT | {"n": 2, "max_tokens": 200}
    both = [choice["text"] for choice in (await post(api, "/v1/completions", body))["choices"]]
    stop = next(both[0][i : i + 6] for i in range(20, 100) if both[0][i : i + 6] not in both[1])
    answer = asyncio.create_task(post(api, "/v1/completions", body | {"stop": stop}))
    await until(lambda: stack.running == 2)
    await until(lambda: stack.running == 1)
    assert not answer.done()
    first, second = (await answer)["choices"]
    assert (first["text"], first["stop_reason"]) == (both[0][: both[0].index(stop)], stop)
    assert (second["text"], second["finish_reason"]) == (both[1], "length")


async def test_echoed_logprobs(api: httpx.AsyncClient) -> None:
    prompt = ids_of(PROMPT)
    body = {"model": "embedded", "prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 0}
    answer = await post(api, "/v1/completions", body)
    check(answer, "CreateCompletionResponse")
    (choice,) = answer["choices"]
    assert choice["text"] == TOKENIZER.decode(prompt, skip_special_tokens=False)
    assert choice["logprobs"]["token_logprobs"] == [None, *(-float(token) for token in prompt[1:])]
    offsets = [*choice["logprobs"]["text_offset"], len(choice["text"])]
    pieces = [choice["text"][a:b] for a, b in pairwise(offsets)]
    assert pieces == choice["logprobs"]["tokens"]


async def test_chat_logprobs_and_ids(api: httpx.AsyncClient) -> None:
    answer = await post(api, "/v1/chat/completions", CHAT | {"logprobs": True, "return_token_ids": True})
    check(answer, "CreateChatCompletionResponse")
    (choice,) = answer["choices"]
    drawn = MODEL.continuation(answer["prompt_token_ids"], 7, 12)
    assert choice["token_ids"] == drawn
    assert choice["message"]["content"] == TOKENIZER.decode(drawn)
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [max(-float(t), -9999.0) for t in drawn]
    raw = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
    assert raw.decode(errors="replace") == choice["message"]["content"]
    body = {"model": "embedded", "messages": CHAT["messages"]}
    assert (await post(api, "/tokenize", body))["tokens"] == answer["prompt_token_ids"]


async def test_limits_of_context_and_vocabulary(api: httpx.AsyncClient) -> None:
    refusals = [
        (TEXT | {"max_tokens": 250}, "prompt", "context_length_exceeded"),
        (TEXT | {"prompt": [1] * 256}, "prompt", "context_length_exceeded"),
        (TEXT | {"prompt": "word " * 3000}, "prompt", "context_length_exceeded"),
        (TEXT | {"prompt": [10**6]}, "prompt", None),
        (TEXT | {"prompt": [10**6], "echo": True}, "prompt", None),
        (TEXT | {"prompt": ""}, "prompt", None),
        (TEXT | {"logit_bias": {"1000000": 1}}, "logit_bias", None),
        (TEXT | {"allowed_token_ids": [10**6]}, "allowed_token_ids", None),
        (TEXT | {"stop_token_ids": [10**6]}, "stop_token_ids", None),
    ]
    for body, param, code in refusals:
        for stream in (False, True):
            error = error_of(await api.post("/v1/completions", json=body | {"stream": stream}))
            assert (error["param"], error["code"]) == (param, code)
    long = CHAT | {"messages": [{"role": "user", "content": "word " * 300}]}
    error = error_of(await api.post("/v1/chat/completions", json=long))
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
    assert error["message"].startswith("This model's maximum context length is 256 tokens")
    reserved = CHAT | {"chat_template_kwargs": {"tokenize": True}}
    assert error_of(await api.post("/v1/chat/completions", json=reserved))["param"] == "chat_template_kwargs"
    assert error_of(await api.post("/detokenize", json={"tokens": [10**6]}))["param"] == "tokens"


async def test_dropped_streams_leave_nothing_behind_and_honest_ones_alone(stack: Stack) -> None:
    honest = TEXT | {"max_tokens": 60, "stream": True}
    reference = wanted(ids_of(PROMPT), 7, 60)

    async def drop(client: httpx.AsyncClient, after: int) -> None:
        body = TEXT | {"max_tokens": 150, "stream": True, "seed": after}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            for _ in range(after):
                await anext(lines)

    async def keep(client: httpx.AsyncClient) -> str:
        *chunks, done = events((await client.post("/v1/completions", json=honest)).text)
        assert done == "[DONE]"
        return "".join(chunk["choices"][0]["text"] for chunk in chunks)

    async with served(stack.app) as url, httpx.AsyncClient(base_url=url, timeout=300) as client:
        kept, _ = await asyncio.gather(
            asyncio.gather(*(keep(client) for _ in range(4))),
            asyncio.gather(*(drop(client, 2 * i + 1) for i in range(16))),
        )
        await until(lambda: stack.running == 0)
    assert kept == [reference] * 4
    assert stack.core.scheduler.stats().kv_usage == 0


async def test_a_lost_engine_is_told_and_then_away(stack: Stack) -> None:
    stack.executor._delay_s = 0.01
    async with served(stack.app) as url, httpx.AsyncClient(base_url=url, timeout=300) as client:
        assert (await client.get("/health")).status_code == 200
        body = TEXT | {"max_tokens": 200}
        heard: list[str] = []

        async def read() -> None:
            async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
                async for part in answer.aiter_text():
                    heard.append(part)  # noqa: PERF401 - others look at it meanwhile

        stream = asyncio.create_task(read())
        whole = asyncio.create_task(client.post("/v1/completions", json=body))
        await until(lambda: stack.running == 2 and bool(heard))
        stack.executor.die()
        await stream
        *chunks, last = events("".join(heard))
        assert chunks
        assert set(last) == {"error"}
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
        assert (await whole).status_code == 503
        for body in (TEXT, TEXT | {"stream": True}):
            refused = await client.post("/v1/completions", json=body)
            assert error_of(refused, 503)["code"] == "engine_unavailable"
            assert refused.headers["retry-after"]
        for path in ("/health", "/v1/models"):
            error_of(await client.get(path), 503)
        assert b"vllm:" in (await client.get("/metrics")).content


async def test_vllms_dashboard_finds_its_series(api: httpx.AsyncClient) -> None:
    assert (await api.post("/v1/completions", json=TEXT)).status_code == 200
    assert (await api.post("/v1/completions", json=TEXT | {"stream": True})).status_code == 200
    families = list(text_string_to_metric_families((await api.get("/metrics")).text))
    told: dict[str, dict[str, float]] = {}
    for family in families:
        for sample in family.samples:
            assert sample.name not in VLLMS_DASHBOARD or sample.labels["model_name"] == "embedded"
            told.setdefault(sample.name, {})[sample.labels.get("le", "")] = sample.value
    assert told.keys() >= VLLMS_DASHBOARD
    assert told["vllm:request_generation_tokens_bucket"]["+Inf"] == 2
    assert told["vllm:request_max_num_generation_tokens_sum"][""] == 2 * TEXT["max_tokens"]
    (cache,) = [sample for family in families for sample in family.samples if "cache_config_info" in sample.name]
    assert cache.value == 1
    assert cache.labels == {
        "model_name": "embedded", "engine": "e", "block_size": "16", "num_gpu_blocks": "64", "cache_dtype": "auto",
        "enable_prefix_caching": "True",
    }  # fmt: skip
