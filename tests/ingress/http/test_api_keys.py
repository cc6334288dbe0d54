"""API keys, origins and traces: who is admitted on which paths, and what is reported."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from raylm.config import Config, IngressConfig
from raylm.errors import ConfigError
from raylm.ingress import build_asgi_app, read_keys
from raylm.ingress.http.api_keys import APIKeys
from tests.ingress.fake_llm import FakeAsyncLLM
from tests.ingress.harness import CHAT, TEXT, client_of
from tests.ingress.refused import error_of

KEY, OTHER = "sk-first-0123", "sk-second-4567"
BEARER = {"authorization": f"Bearer {KEY}"}
ROUTES = [
    ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("POST", "/tokenize"), ("POST", "/detokenize"),
    ("GET", "/v1/models"), ("GET", "/v1/models/org/fake-model"), ("GET", "/metrics"), ("GET", "/version"), ("GET", "/"),
    ("GET", "/v1/nothing"), ("GET", "/health/"), ("GET", "//health"), ("GET", "/health/../v1/models"),
    ("GET", "/HEALTH"), ("GET", "/v1/models?x=/health"), ("OPTIONS", "/v1/models"),
]  # fmt: skip


def guarded(tmp_path: Path, **ingress: Any) -> httpx.AsyncClient:
    path = tmp_path / "keys"
    path.write_text(f"# of the tests\n\nalice: {KEY}\nbob:{OTHER}\n")
    config = Config.model_validate({"ingress": {"api_keys_file": str(path), **ingress}})
    return client_of(build_asgi_app(FakeAsyncLLM(), config))  # type: ignore[arg-type]


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": KEY},
        {"authorization": f"Basic {KEY}"},
        {"x-api-key": KEY[:-1]},
        {"x-api-key": ""},
        {"api-key": KEY},
    ],
)
async def test_nobody_passes_without_a_key(tmp_path: Path, method: str, path: str, headers: dict[str, str]) -> None:
    async with guarded(tmp_path) as client:
        answer = await client.request(method, path, headers=headers, json=CHAT)
    error = error_of(answer, 401)
    assert error["code"] == "invalid_api_key"
    assert KEY not in answer.text
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "headers",
    [BEARER, {"authorization": f"bearer  {OTHER} "}, {"x-api-key": OTHER},
     {"authorization": "Bearer wrong", "x-api-key": KEY}],
)  # fmt: skip
async def test_either_header_lets_in(tmp_path: Path, headers: dict[str, str]) -> None:
    async with guarded(tmp_path) as client:
        assert (await client.post("/v1/chat/completions", json=CHAT, headers=headers)).status_code == 200
        assert (await client.get("/v1/models", headers=headers)).status_code == 200


async def test_the_host_header_has_no_say(tmp_path: Path) -> None:
    async with guarded(tmp_path) as client:
        for host in ("x/health?", "health", "localhost/health", "a@b/health#"):
            error_of(await client.get("/v1/models", headers={"host": host}), 401)
        assert (await client.get("http://test/health", headers={"host": "x/v1/models"})).status_code == 200


async def test_open_paths_can_be_closed(tmp_path: Path) -> None:
    async with guarded(tmp_path) as client:
        answers = [await client.get(path) for path in ("/health", "/ready", "/ping", "/docs", "/metrics")]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 200, 401]
    async with guarded(tmp_path, open_paths=["/metrics"]) as client:
        assert [(await client.get(path)).status_code for path in ("/health", "/metrics")] == [401, 200]
    async with guarded(tmp_path, open_paths=[]) as client:
        assert [(await client.get(path)).status_code for path in ("/health", "/metrics")] == [401, 401]
        assert (await client.get("/health", headers=BEARER)).status_code == 200


async def test_the_path_below_a_mount_counts(tmp_path: Path) -> None:
    async with guarded(tmp_path) as client:
        app = client._transport.app  # type: ignore[attr-defined]
    transport = httpx.ASGITransport(app, root_path="/llm")
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as mounted:
        assert (await mounted.get("/llm/health")).status_code == 200
        error_of(await mounted.get("/llm/v1/models"), 401)


async def test_metrics_tell_names_and_no_keys(tmp_path: Path) -> None:
    async with guarded(tmp_path) as client:
        await client.post("/v1/completions", json=TEXT, headers=BEARER)
        await client.post("/v1/completions", json={}, headers=BEARER)
        await client.post("/v1/completions", json=TEXT, headers={"x-api-key": OTHER})
        await client.post("/v1/completions", json=TEXT)
        text = (await client.get("/metrics", headers=BEARER)).text
    counted = re.findall(
        r'^raylm:http_answers_total\{key="(.*)",model_name="org/fake-model",status="(.*)"\} 1\.0$', text, re.M
    )
    assert counted == [("alice", "200"), ("bob", "200"), ("alice", "400"), ("", "401")]
    assert KEY not in text
    assert OTHER not in text


def test_keys_come_from_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEYS", f"{KEY}, bob: {OTHER}")
    keys = APIKeys(IngressConfig(api_keys_env="MY_KEYS"))
    found = [keys.find([key.encode()]) for key in (KEY, OTHER, "x")]
    assert [key and key.name for key in found] == ["key-1", "bob", None]
    assert KEY not in repr(vars(keys))
    assert read_keys(IngressConfig()) is None


@pytest.mark.parametrize("key", ["team:secret", "a,b", "#x", "name=1"])
def test_the_variable_of_one_key_is_not_split(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("RAYLM_API_KEY", f"{key}\n")
    keys = APIKeys(IngressConfig(api_keys_env="RAYLM_API_KEY"))
    found = keys.find([key.encode()])
    assert found is not None
    assert (found.name, found.admin, len(keys)) == ("key-1", True, 1)


@pytest.mark.parametrize("key", ["", " ", "secret word", "two\nkeys", "secret\x00", "clé-secret"])
def test_the_variable_of_one_key_holds_one(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setattr("os.environ", {"RAYLM_API_KEY": key})
    with pytest.raises(ConfigError, match=r"^RAYLM_API_KEY: it must be one key") as refused:
        read_keys(IngressConfig(api_keys_env="RAYLM_API_KEY"))
    assert "secret" not in refused.value.message


def test_a_file_of_keys_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"alice: {KEY}\n", encoding="utf-8-sig")
    keys = APIKeys(IngressConfig(api_keys_file=str(tmp_path / "keys")))
    found = keys.find([KEY.encode()])
    assert found is not None
    assert found.name == "alice"


@pytest.mark.parametrize(
    "content", ["", "# nothing\n", "alice:\n", "alice: two words\n", f": {KEY}\n", f"{'x' * 65}: {KEY}", "alice: clé\n"]
)
def test_a_bad_source_is_told_at_start_without_its_content(tmp_path: Path, content: str) -> None:
    path = tmp_path / "keys"
    path.write_text(content)
    with pytest.raises(ConfigError, match="api_keys_file") as refused:
        read_keys(IngressConfig(api_keys_file=str(path)))
    assert KEY not in refused.value.message
    assert "words" not in refused.value.message


def test_a_source_that_is_not_there_is_told() -> None:
    with pytest.raises(ConfigError, match="api_keys_file"):
        read_keys(IngressConfig(api_keys_file="/no/such/keys"))
    with pytest.raises(ConfigError, match="NO_SUCH_VARIABLE"):
        read_keys(IngressConfig(api_keys_env="NO_SUCH_VARIABLE"))


ORIGIN = {"origin": "https://chat.example"}
PREFLIGHT = ORIGIN | {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}


async def test_pages_are_shut_out_unless_configured(client: httpx.AsyncClient, tmp_path: Path) -> None:
    answer = await client.get("/v1/models", headers=ORIGIN)
    assert answer.status_code == 200
    assert not [name for name in answer.headers if name.startswith("access-control")]
    error_of(await client.options("/v1/chat/completions", headers=PREFLIGHT), 405)
    async with guarded(tmp_path, cors_origins=["https://other.example"]) as other:
        refused = await other.options("/v1/chat/completions", headers=PREFLIGHT)
        assert error_of(refused, 401)
        assert "access-control-allow-origin" not in refused.headers


@pytest.mark.parametrize("origins", [["https://chat.example", "https://b.example"], ["*"]])
async def test_pages_of_configured_origins_may_call(tmp_path: Path, origins: list[str]) -> None:
    async with guarded(tmp_path, cors_origins=origins) as client:
        preflight = await client.options("/v1/chat/completions", headers=PREFLIGHT)
        assert preflight.status_code == 204
        assert preflight.headers["access-control-allow-headers"] == "authorization"
        assert "POST" in preflight.headers["access-control-allow-methods"]
        answers = [
            preflight,
            await client.post("/v1/chat/completions", json=CHAT | {"stream": True}, headers=ORIGIN | BEARER),
            await client.post("/v1/chat/completions", json=CHAT, headers=ORIGIN),
        ]
    allowed = "*" if origins == ["*"] else "https://chat.example"
    assert [answer.headers["access-control-allow-origin"] for answer in answers] == [allowed] * 3
    assert [answer.status_code for answer in answers] == [204, 200, 401]
    assert "retry-after" in answers[1].headers["access-control-expose-headers"]


TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


async def test_a_trace_names_the_request(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
    first, second = [await client.post("/v1/chat/completions", json=CHAT, headers=headers) for _ in range(2)]
    assert first.headers["x-request-id"].startswith(f"{TRACE}-{SPAN}-")
    assert first.headers["x-request-id"] != second.headers["x-request-id"]
    assert llm.calls[0].head.request_id == f"chatcmpl-{first.headers['x-request-id']}"
    both = await client.get("/v1/models", headers=headers | {"x-request-id": "mine"})
    assert both.headers["x-request-id"] == "mine"


@pytest.mark.parametrize(
    "value",
    ["", "x", f"ff-{TRACE}-{SPAN}-01", f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01",
     f"00-{TRACE.upper()}-{SPAN}-01", f"00-{TRACE}-{SPAN}", f"00-{TRACE}-{SPAN}-01x"],
)  # fmt: skip
async def test_a_bad_trace_is_none(client: httpx.AsyncClient, value: str) -> None:
    answer = await client.get("/v1/models", headers={"traceparent": value})
    assert TRACE not in answer.headers["x-request-id"]
