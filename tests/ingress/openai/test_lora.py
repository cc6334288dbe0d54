"""LoRA adapters over HTTP: loaded, listed, selected by `model`, and unloaded, with the bodies of known clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from raylm.checkpoint import EMBEDDED
from raylm.messages import LoRAAdapter
from tests.adapters import peft_tokens
from tests.embedded_server import EmbeddedServer
from tests.ingress.fake_llm import FakeAsyncLLM
from tests.ingress.harness import CHAT, TEXT

EXAMPLES = Path(__file__).parents[3] / "examples" / "lora_adapter"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": TEXT,
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
    "/v1/responses": {"input": "Hi"},
}


@pytest.mark.parametrize("path", BODIES)
async def test_model_chooses_the_adapter(client: httpx.AsyncClient, llm: FakeAsyncLLM, path: str) -> None:
    llm.adapters.known["mine"] = LoRAAdapter("mine", "mine")
    for model, adapter in (("mine", "mine"), ("org/fake-model", None)):
        answer = await client.post(path, json=BODIES[path] | {"model": model})
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == model
        assert llm.calls[-1].head.adapter == adapter
    refused = (await client.post(path, json=BODIES[path] | {"model": "nobody"})).json()["error"]
    assert "nobody" in refused["message"]


async def test_adapters_are_listed_as_models(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    llm.adapters.known["mine"] = LoRAAdapter("mine", "below/mine")
    listed = (await client.get("/v1/models")).json()["data"]
    assert [card["id"] for card in listed] == ["org/fake-model", "mine"]
    card = (await client.get("/v1/models/mine")).json()
    assert card == listed[1]
    assert (card["parent"], card["root"]) == ("org/fake-model", "below/mine")


async def test_a_lost_adapter_says_why(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    llm.adapters.lost["mine"] = "Its files are gone."
    answer = await client.post("/v1/completions", json=TEXT | {"model": "mine"})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "The model 'mine' was lost: Its files are gone."


@pytest.mark.parametrize(
    ("name", "fields", "param"),
    [
        ("load", {"lora_name": "org/fake-model", "lora_path": "x"}, "lora_name"),
        ("load", {"lora_name": "x", "lora_path": "x", "load_inplace": True}, "load_inplace"),
        ("unload", {"lora_name": "x", "lora_int_id": 1}, "lora_int_id"),
        ("unload", {"lora_name": "x"}, "lora_name"),
    ],
)
async def test_refusals_name_the_field(
    client: httpx.AsyncClient, name: str, fields: dict[str, Any], param: str
) -> None:
    answer = await client.post(f"/v1/{name}_lora_adapter", json=fields)
    assert 400 <= answer.status_code < 500
    assert answer.json()["error"]["param"] == param


def test_the_example_from_loading_to_unloading() -> None:
    fields = {
        "prompt": [300, 301, 302],
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    with EmbeddedServer(lora={"root": str(EXAMPLES)}) as url, httpx.Client(base_url=url, timeout=300) as client:
        body = {"lora_name": "json", "lora_path": str(EXAMPLES / "json-answers")}
        assert client.post("/v1/load_lora_adapter", json=body).status_code == 200
        again = client.post("/v1/load_lora_adapter", json=body)
        assert (again.status_code, again.json()["error"]["param"]) == (400, "lora_name")
        adapted, base = (
            client.post("/v1/completions", json=fields | {"model": model}).json()["choices"][0]["token_ids"]
            for model in ("json", "embedded")
        )
        texts = {"input": "A block pool"}
        vectors = [
            client.post("/v1/embeddings", json=texts | {"model": model}).json()["data"][0]["embedding"]
            for model in ("json", "embedded")
        ]
        assert client.post("/v1/unload_lora_adapter", json={"lora_name": "json"}).status_code == 200
        gone = client.post("/v1/completions", json=fields | {"model": "json"})
    assert adapted == peft_tokens(EMBEDDED, EXAMPLES / "json-answers", [fields["prompt"]], 8)[0]  # type: ignore[list-item]
    assert base == peft_tokens(EMBEDDED, None, [fields["prompt"]], 8)[0]  # type: ignore[list-item]
    assert adapted != base
    assert vectors[0] != vectors[1]
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
