"""GET /v1/requests/{id} names the main cause of a slow request."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.ingress.console.stack import SCHEMA, SMALL, Stack, check_adds_up, life_of
from tests.ingress.harness import until
from tests.ingress.test_real_llm import PROMPT, TEXT, ids_of


async def test_a_long_queue_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = SMALL["scheduler"] | {"max_num_seqs": 1}  # type: ignore[operator]
    async with Stack(scheduler=scheduler, delay_s=0.002) as stack, stack.client() as api:
        before = [asyncio.create_task(api.post("/v1/completions", json=TEXT | {"max_tokens": 60})) for _ in range(3)]
        await until(lambda: len(stack.cores[0].scheduler.waiting) == 2)
        await api.post("/v1/completions", json=TEXT | {"max_tokens": 2}, headers={"x-request-id": "last"})
        await asyncio.gather(*before)
        life = await life_of(api, "last")
        check_adds_up(life)
        assert life["causes"][0]["cause"] == "queue"
        assert "behind 2 waiting" in life["causes"][0]["explanation"]


async def test_a_preemption_is_named_with_who_caused_it() -> None:
    async with Stack(delay_s=0.002) as stack, stack.client() as api:
        prompts = {"first": ids_of(PROMPT * 3)[:40], "second": ids_of("Blocks " * 60)[:40]}
        first, second = [
            asyncio.create_task(
                api.post(
                    "/v1/completions",
                    json=TEXT | {"prompt": prompt, "max_tokens": 110},
                    headers={"x-request-id": name},
                )
            )
            for name, prompt in prompts.items()
        ]
        assert {(await first).status_code, (await second).status_code} == {200}
        lives = [await life_of(api, name) for name in prompts]
        (victim,) = [life for life in lives if life["preemptions"]]
        check_adds_up(victim)
        part = victim["parts"][0]
        kinds = [one["event"] for one in part["events"]]
        assert kinds == ["taken_in", "scheduled", "token", "preempted", "scheduled", "token", "ended"]
        (taken,) = [one for one in part["events"] if one["event"] == "preempted"]
        (other,) = [life for life in lives if not life["preemptions"]]
        assert taken["by"] == other["parts"][0]["request_id"]
        # Computing the prompt draws the first token, and recomputing the lost blocks draws another one.
        assert [one["doing"] for one in part["steps"]] == ["prefill", "decode", "recompute", "decode"]
        assert sum(one["tokens"] for one in part["steps"] if one["doing"] == "decode") == 110 - 2
        assert "preemption" in [cause["cause"] for cause in victim["causes"][:2]]
        explanation = next(one["explanation"] for one in victim["causes"] if one["cause"] == "preemption")
        assert taken["by"] in explanation


async def test_a_cold_cache_beside_a_warm_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = {"max_num_batched_tokens": 16, "max_num_seqs": 8}
    async with Stack(2, delay_s=0.01, scheduler=chunks) as stack, stack.client() as api:
        prompt = ids_of(PROMPT * 10)[:120]
        body = TEXT | {"prompt": prompt, "max_tokens": 1}
        await api.post("/v1/completions", json=body, headers={"x-request-id": "warm"})
        warm = (await life_of(api, "warm"))["engine"]
        router = stack.llm._router
        busy = router._engines[warm]
        await until(lambda: any(engine.blocks.told for engine in router._engines.values()))
        busy.queued_tokens += 10**6  # so busy that computing the prompt on another engine is faster
        await api.post("/v1/completions", json=body, headers={"x-request-id": "cold"})
        busy.queued_tokens -= 10**6
        life = await life_of(api, "cold")
        check_adds_up(life)
        assert life["engine"] != warm
        assert life["causes"][0]["cause"] == "cold_cache"
        considered = life["parts"][0]["routes"][0]["considered"]
        assert [one["engine"] for one in considered] == [life["engine"], warm]
        assert considered[1]["tokens_to_compute"] < considered[0]["tokens_to_compute"] == 120
        assert considered[0]["predicted_s"] < considered[1]["predicted_s"]


async def test_a_slow_client_is_named(stack: Stack, api: httpx.AsyncClient) -> None:
    taken: list[dict[str, Any]] = []
    body = b'{"model":"embedded","prompt":"Hi","max_tokens":40,"stream":true}'
    sent = False

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if sent:
            await asyncio.Event().wait()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        taken.append(message)
        await asyncio.sleep(0.05)

    headers = [(b"content-type", b"application/json"), (b"x-request-id", b"slow")]
    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "root_path": "", "query_string": b"",
        "headers": headers, "client": ("127.0.0.1", 1),
    }  # fmt: skip
    await stack.app(scope, receive, send)  # type: ignore[arg-type]
    life = await life_of(api, "slow")
    check_adds_up(life)
    assert life["causes"][0]["cause"] == "slow_client"
    assert life["blocked_s"] >= 0.05 * (len(taken) - 1)


async def test_a_compilation_is_named(stack: Stack, api: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_now = stack.llm._grammars.compile

    async def compile_slowly(spec: Any) -> str:
        await asyncio.sleep(0.3)
        return await compile_now(spec)

    monkeypatch.setattr(stack.llm._grammars, "compile", compile_slowly)
    body = TEXT | {"response_format": SCHEMA, "max_tokens": 2}
    answer = await api.post("/v1/completions", json=body, headers={"x-request-id": "formed"})
    assert answer.status_code == 200, answer.text
    life = await life_of(api, "formed")
    check_adds_up(life)
    assert life["causes"][0]["cause"] == "compile"
