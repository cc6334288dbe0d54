"""LoRA adapters with `raylm serve` and several ingress replicas: all agree, and a new engine gets the adapters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from raylm.checkpoint import EMBEDDED
from tests.adapters import peft_tokens
from tests.serving import ARGS, ROOT, Server, free_port, serve_file

pytestmark = pytest.mark.ray

ADAPTER = ROOT / "examples" / "lora_adapter" / "json-answers"
PROMPT = [300, 301, 302]
TIMES = 12  # requests; the proxy chooses a replica for each


def ask(server: Server, model: str) -> httpx.Response:
    fields = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return httpx.post(f"{server.url}/v1/completions", json=fields | {"model": model}, timeout=300)


def tokens(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def served_everywhere(server: Server, wanted: list[int]) -> Callable[[], bool]:
    """Whether ``TIMES`` requests in a row, each on a new connection, get the adapter's tokens."""

    def check() -> bool:
        answers = [ask(server, "json") for _ in range(TIMES)]
        return all(answer.status_code == 200 and tokens(answer) == wanted for answer in answers)

    return check


@pytest.mark.long
def test_all_replicas_serve_what_one_loaded_and_a_new_engine_gets_it_again(tmp_path: Path) -> None:
    wanted = peft_tokens(EMBEDDED, ADAPTER, [PROMPT], 8)[0]
    base = peft_tokens(EMBEDDED, None, [PROMPT], 8)[0]
    port = free_port()
    args = ARGS | {"lora": {"root": str(ADAPTER.parent)}, "ingress": {"replicas": 2}}
    with Server(serve_file(tmp_path / "serve.yaml", port, args), port) as server:
        refused = httpx.post(f"{server.url}/v1/load_lora_adapter", json={"lora_name": "json", "lora_path": "../.."})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_path")
        body = {"lora_name": "json", "lora_path": ADAPTER.name}
        assert httpx.post(f"{server.url}/v1/load_lora_adapter", json=body, timeout=300).status_code == 200
        server.wait_until(served_everywhere(server, wanted), "does not serve the adapter from every replica")
        assert tokens(ask(server, "embedded")) == base
        server.kill_actor("WorkerActor")
        server.wait_until(served_everywhere(server, wanted), "has not given the adapter to the new engine")
        assert tokens(ask(server, "embedded")) == base
        gone = httpx.post(f"{server.url}/v1/unload_lora_adapter", json={"lora_name": "json"}, timeout=300)
        assert gone.status_code == 200
        server.wait_until(lambda: {ask(server, "json").status_code for _ in range(TIMES)} == {404}, "still serves it")
