"""Key limits over HTTP: which limit was exceeded, what remains, and who may change what is served."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from raylm.config import Config, IngressConfig
from raylm.errors import ConfigError
from raylm.frontend import KeyLimits, StateClient
from raylm.frontend.state.application_state import ApplicationState
from raylm.frontend.state.client import LocalState
from raylm.ingress import Surroundings, build_asgi_app, read_keys
from raylm.ingress.http import api_keys
from raylm.ingress.http.api_keys import APIKeys
from tests.ingress.fake_llm import FakeAsyncLLM
from tests.ingress.harness import CHAT, TEXT, client_of, until
from tests.ingress.refused import error_of

ALICE, BOB = {"x-api-key": "sk-alice"}, {"x-api-key": "sk-bob"}


def limited(tmp_path: Path, options: str, llm: FakeAsyncLLM, state: StateClient | None = None) -> httpx.AsyncClient:
    path = tmp_path / "keys"
    path.write_text(f"alice: sk-alice {options}\nbob: sk-bob\n")
    config = Config.model_validate({"ingress": {"api_keys_file": str(path)}})
    return client_of(build_asgi_app(llm, config, surroundings=Surroundings(state=state)))  # type: ignore[arg-type]


async def test_requests_of_a_minute_over_two_replicas(tmp_path: Path) -> None:
    state = LocalState(ApplicationState())
    one, other = (limited(tmp_path, "requests_per_minute=10", FakeAsyncLLM(), StateClient(state)) for _ in range(2))
    async with one, other:
        calls = [(one, other)[place % 2].post("/v1/completions", json=TEXT, headers=ALICE) for place in range(100)]
        answers = await asyncio.gather(*calls)
        assert sorted(answer.status_code for answer in answers) == [200] * 10 + [429] * 90
        refused = next(answer for answer in answers if answer.status_code == 429)
        error = error_of(refused, 429)
        assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
        assert "'requests_per_minute' of 10" in error["message"]
        assert 50 < int(refused.headers["retry-after"]) <= 61, "usage is counted in whole seconds"
        assert {refused.headers[f"x-ratelimit-{what}-requests"] for what in ("limit", "remaining")} == {"10", "0"}
        assert (await one.post("/v1/completions", json=TEXT, headers=BOB)).status_code == 200


async def test_answers_of_a_limited_key_tell_where_it_stands(tmp_path: Path) -> None:
    async with limited(tmp_path, "requests_per_minute=5 tokens_per_minute=900", FakeAsyncLLM()) as client:
        first = await client.get("/v1/models", headers=ALICE)
        assert first.headers["x-ratelimit-reset-requests"] == "0ms"
        assert [first.headers[f"x-ratelimit-remaining-{kind}"] for kind in ("requests", "tokens")] == ["5", "900"]
        for path, body in (("/v1/completions", TEXT), ("/v1/completions", {}), ("/v1/chat/completions", CHAT)):
            answer = await client.post(path, json=body, headers=ALICE)
            assert answer.headers["x-ratelimit-limit-requests"] == "5"
            assert 60 <= float(answer.headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 61
        assert answer.headers["x-ratelimit-remaining-requests"] == "2", "a refused request counts too"
        stream = await client.post("/v1/completions", json=TEXT | {"stream": True}, headers=ALICE)
        assert stream.headers["x-ratelimit-remaining-requests"] == "1"
        bob = await client.post("/v1/completions", json=TEXT, headers=BOB)
        assert not [name for name in bob.headers if name.startswith("x-ratelimit")]


async def test_open_requests_of_a_key_are_bounded(tmp_path: Path) -> None:
    llm = FakeAsyncLLM(gate=asyncio.Event())
    async with limited(tmp_path, "concurrency=2", llm) as client:
        tasks = [asyncio.create_task(client.post("/v1/completions", json=TEXT, headers=ALICE)) for _ in range(5)]
        await until(lambda: len(llm.calls) == 2 and sum(task.done() for task in tasks) == 3)
        assert llm.gate is not None
        llm.gate.set()
        answers = await asyncio.gather(*tasks)
        assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429, 429]
        assert "'concurrency' of 2" in next(error_of(a, 429) for a in answers if a.status_code == 429)["message"]
        again = [await client.post("/v1/completions", json=TEXT, headers=ALICE) for _ in range(3)]
        assert [answer.status_code for answer in again] == [200] * 3


async def test_only_admins_change_adapters(tmp_path: Path) -> None:
    body = {"lora_name": "x", "lora_path": "x"}
    async with limited(tmp_path, "admin", FakeAsyncLLM()) as client:
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            assert error_of(await client.post(path, json=body, headers=BOB), 403)["code"] == "permission_denied"
            error = (await client.post(path, json=body, headers=ALICE)).json()["error"]
            assert error["code"] != "permission_denied"
    async with limited(tmp_path, "", FakeAsyncLLM()) as client:
        for headers in (ALICE, BOB):
            error = error_of(await client.post("/v1/load_lora_adapter", json=body, headers=headers), 403)
            assert "'admin'" in error["message"]


async def test_turns_are_kept_for_one_key_and_one_salt(tmp_path: Path) -> None:
    llm = FakeAsyncLLM()
    said = {"model": CHAT["model"], "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
    bodies = {
        "/v1/chat/completions": said,
        "/v1/messages": said,
        "/v1/messages/count_tokens": {name: said[name] for name in ("model", "messages")},
        "/v1/responses": {"model": CHAT["model"], "input": "hi", "truncation": "auto"},
    }
    async with limited(tmp_path, "", llm) as client:
        for headers in (ALICE, BOB):
            for path, body in bodies.items():
                assert (await client.post(path, json=body, headers=headers)).status_code == 200
        salted = said | {"cache_salt": "x"}
        assert (await client.post("/v1/chat/completions", json=salted, headers=ALICE)).status_code == 200
    calls = len(bodies) + 1  # truncating a response first counts its tokens
    assert llm.owners == ["alice\n"] * calls + ["bob\n"] * calls + ["alice\nx"]


def test_a_single_key_is_an_admin_and_shares_its_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    for text, admin, apart in (
        ("alice: sk-a\nalice: sk-b\n", True, False),
        ("alice: sk-a\nbob: sk-b\n", False, True),
        ("alice: sk-a admin\nbob: sk-b\n", True, True),
    ):
        path.write_text(text)
        keys = APIKeys(IngressConfig(api_keys_file=str(path)))
        alice = keys.find([b"sk-a"])
        assert alice is not None
        assert (alice.admin, alice.own_prefixes) == (admin, apart)
        shared = APIKeys(IngressConfig(api_keys_file=str(path)), share_prefixes=True).find([b"sk-a"])
        assert shared is not None
        assert not shared.own_prefixes


def test_what_stands_behind_a_key(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(
        "alice: sk-a weight=2.5 tokens_per_minute=900  admin\nalice: sk-b admin tokens_per_minute=900 weight=2.5\n"
        "bob:sk-c requests_per_minute=3 concurrency=4 max_output=5\n"
    )
    (alice, first), (also, second), (bob, _) = read_keys(IngressConfig(api_keys_file=str(path))) or []
    assert (first, second) == ("sk-a", "sk-b")
    assert alice == also
    assert (alice.name, alice.weight, alice.limits, alice.admin) == (
        "alice", 2.5, KeyLimits(tokens_per_minute=900), True,
    )  # fmt: skip
    assert (bob.limits, bob.max_output, bob.admin) == (KeyLimits(3, None, 4), 5, False)


@pytest.mark.parametrize(
    "line",
    ["x: secret rest", "x: secret weight=0", "x: secret weight=nan", "x: secret weight=secret", "x: secret admin=yes",
     "x: secret requests_per_minute", "x: secret tokens_per_minute=-1", "x: secret concurrency=1.5",
     "x: secret max_output=", "x: secret admin admin", "alice: secret weight=2", "x: secret =secret",
     "x: secret ttft_ms=0", "x: secret ttft_ms=soon", "x: secret itl_ms=-3", "x: secret itl_ms=inf",
     "x: secret itl_ms=nan"],
)  # fmt: skip
def test_bad_lines_are_told_by_their_number_alone(tmp_path: Path, line: str) -> None:
    path = tmp_path / "keys"
    path.write_text(f"alice: sk-alice\n\n{line}\n")
    with pytest.raises(ConfigError, match=r"api_keys_file: line 3: ") as refused:
        read_keys(IngressConfig(api_keys_file=str(path)))
    assert "secret" not in refused.value.message


async def test_the_file_is_read_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(api_keys, "CHECK_S", 0.0)
    path = tmp_path / "keys"
    async with limited(tmp_path, "", FakeAsyncLLM()) as client:

        async def statuses() -> list[int]:
            return [(await client.get("/v1/models", headers=headers)).status_code for headers in (ALICE, BOB)]

        assert await statuses() == [200, 200]
        path.write_text("alice: sk-alice\n")
        assert await statuses() == [200, 401]
        path.write_text("alice: sk-alice weight=\nbob: sk-bob\n")
        assert await statuses() == [200, 401]
        assert "line 1" in caplog.text
        assert "sk-alice" not in caplog.text
        os.unlink(path)
        assert await statuses() == [200, 401]
        path.write_text("bob: sk-bob\n")
        assert await statuses() == [401, 200]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_who_says_no_length_is_not_refused_for_it(tmp_path: Path, path: str) -> None:
    body: dict[str, Any] = CHAT if "chat" in path else TEXT
    llm = FakeAsyncLLM()
    async with limited(tmp_path, "weight=3 max_output=2", llm) as client:
        assert (await client.post(path, json=body, headers=ALICE)).status_code == 200
        assert (await client.post(path, json=body, headers={"x-api-key": "max_output=2"})).status_code == 401
    assert llm.calls[0].params.max_tokens in (None, 2)
    assert llm.calls[0].head.request is not None
    assert llm.calls[0].head.request.key is not None
    assert llm.calls[0].head.request.key.max_output == 2


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_keys_target_is_refused_where_nothing_is_scheduled_by_it(tmp_path: Path, policy: str) -> None:
    path = tmp_path / "keys"
    path.write_text("alice: sk-a\nbob: sk-b ttft_ms=300\n")
    config = IngressConfig(api_keys_file=str(path))
    assert read_keys(config) is not None
    with pytest.raises(ConfigError, match=f"ttft_ms of the key 'bob'.*{policy}"):
        read_keys(config, policy)
