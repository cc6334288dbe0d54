"""The effects of request fields, over HTTP with the embedded model. transformers provides the expected values."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from raylm.checkpoint import EMBEDDED
from tests.embedded_server import EmbeddedServer
from tests.reference import greedy, random_prompts

BLOCK = 16
PROMPT = "The scheduler decides what runs next, and the worker runs it. " * 8
WHOLE = {"return_token_ids": True, "ignore_eos": True}
TEXT: dict[str, Any] = {"model": "embedded", "prompt": PROMPT, "max_tokens": 6} | WHOLE
CHAT: dict[str, Any] = {"model": "embedded", "max_tokens": 12, "temperature": 0, "return_token_ids": True}
# Fields that change the drawing. Raw log-probabilities are those before all these changes.
MOVED: dict[str, Any] = {
    "temperature": 0.6, "top_p": 0.7, "top_k": 9, "min_p": 0.02, "presence_penalty": 0.7, "frequency_penalty": 0.4,
    "repetition_penalty": 1.3, "logit_bias": {"300": 6, "301": -20}, "seed": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def api() -> Iterator[httpx.Client]:
    with EmbeddedServer() as url, httpx.Client(base_url=url, timeout=300) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(EMBEDDED)


def post(api: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = api.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def metric(api: httpx.Client, name: str) -> float:
    lines = api.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))


def computed(api: httpx.Client) -> float:
    """The number of prompt tokens computed so far."""
    return metric(api, "vllm:prefix_cache_queries_total") - metric(api, "vllm:prefix_cache_hits_total")


def drawn(answer: dict[str, Any]) -> list[list[int]]:
    return [choice["token_ids"] for choice in answer["choices"]]


@torch.inference_mode()
def raw_logprobs(token_ids: list[int]) -> torch.Tensor:
    """[len(token_ids), vocabulary]: log-probabilities of the token after each token."""
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32).eval()
    logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits.log_softmax(-1)


def test_128_sequences_share_one_prefill_and_come_again_by_their_seed(api: httpx.Client) -> None:
    body = TEXT | {"n": 128, "temperature": 1, "seed": 11, "cache_salt": "n128"}
    before, prompts = computed(api), metric(api, "vllm:prompt_tokens_total")
    first = post(api, "/v1/completions", body)
    length = len(first["choices"][0]["prompt_token_ids"])
    tail = length - (length - 1) // BLOCK * BLOCK  # tokens after the last whole block that may come from the cache
    assert length > 6 * BLOCK
    assert computed(api) - before == length + 127 * tail
    assert metric(api, "vllm:prompt_tokens_total") - prompts == first["usage"]["prompt_tokens"] == length
    assert first["usage"]["completion_tokens"] == 128 * 6
    assert [choice["index"] for choice in first["choices"]] == [*range(128)]
    assert len({tuple(tokens) for tokens in drawn(first)}) > 10
    assert drawn(post(api, "/v1/completions", body)) == drawn(first)
    assert drawn(post(api, "/v1/completions", body | {"n": 5})) == drawn(first)[:5]
    assert drawn(post(api, "/v1/completions", body | {"seed": 12})) != drawn(first)


@pytest.mark.parametrize("moved", [{"temperature": 0}, MOVED], ids=["greedy", "moved"])
def test_logprobs_are_raw_for_echoed_prompts_and_answers_cold_and_warm(
    api: httpx.Client, tokenizer: Any, moved: dict[str, Any]
) -> None:
    (prompt,) = random_prompts(1, 3000, longest=10, shared=90, seed=len(moved))
    prompt = tokenizer.encode(tokenizer.decode(prompt), add_special_tokens=False)  # token ids as a text would give them
    body = TEXT | moved | {"prompt": prompt, "echo": True, "logprobs": 4, "prompt_logprobs": 3}
    cold = post(api, "/v1/completions", body)
    for _ in range(2):
        plain = post(api, "/v1/completions", TEXT | {"prompt": prompt})
    assert plain["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(prompt) - BLOCK
    warm = post(api, "/v1/completions", body)
    assert drawn(warm) == drawn(cold)
    token_ids = prompt + drawn(cold)[0]
    wanted = raw_logprobs(token_ids)
    own = wanted[:-1].gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]
    for answer in (cold, warm):
        (choice,) = answer["choices"]
        columns = choice["logprobs"]
        assert columns["token_logprobs"][0] is columns["top_logprobs"][0] is choice["prompt_logprobs"][0] is None
        torch.testing.assert_close(torch.tensor(columns["token_logprobs"][1:]), own, atol=2e-4, rtol=0)
        for place, top in enumerate(columns["top_logprobs"][1:]):
            assert max(top.values()) == pytest.approx(wanted[place].max().item(), abs=2e-4)
            assert top[columns["tokens"][place + 1]] == pytest.approx(own[place].item(), abs=2e-4)
        for place, entries in enumerate(choice["prompt_logprobs"][1:]):
            check_by_id(entries, wanted[place], prompt[place + 1])


def check_by_id(entries: dict[str, Any], wanted: torch.Tensor, own: int) -> None:
    assert set(map(int, entries)) == {*wanted.topk(3).indices.tolist(), own}
    for token_id, entry in entries.items():
        logprob = wanted[int(token_id)]
        assert entry["logprob"] == pytest.approx(logprob.item(), abs=2e-4)
        best, worst = (1 + (wanted > logprob + margin).sum().item() for margin in (1e-4, -1e-4))
        assert best <= entry["rank"] <= worst


@pytest.mark.parametrize("moved", [{}, MOVED], ids=["greedy", "moved"])
def test_chat_logprobs_are_raw_and_their_bytes_join_to_the_text(api: httpx.Client, moved: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "Repeat: naïve – café 漢字 🙂"}]
    bias = {"logit_bias": {str(token): 5 for token in range(8, 200)}}  # single bytes, so characters are split
    body = CHAT | {"messages": messages, "max_tokens": 24, "logprobs": True, "top_logprobs": 5} | bias | moved
    answer = post(api, "/v1/chat/completions", body)
    (choice,) = answer["choices"]
    wanted = raw_logprobs(answer["prompt_token_ids"] + choice["token_ids"])[len(answer["prompt_token_ids"]) - 1 :]
    entries = choice["logprobs"]["content"]
    shown = entries[:-1] if choice["finish_reason"] == "stop" else entries  # the end of turn has no text
    raw = b"".join(bytes(entry["bytes"]) for entry in shown)
    assert raw.decode(errors="replace") == choice["message"]["content"]
    assert len(entries) == len(choice["token_ids"]) == answer["usage"]["completion_tokens"]
    for row, token_id, entry in zip(wanted, choice["token_ids"], entries, strict=False):
        assert entry["logprob"] == pytest.approx(row[token_id].item(), abs=2e-4)
        found = torch.tensor([item["logprob"] for item in entry["top_logprobs"]])
        torch.testing.assert_close(found, row.topk(5).values, atol=2e-4, rtol=0)
        for item in [entry, *entry["top_logprobs"]]:
            assert "\\x" in item["token"] or bytes(item["bytes"]) == item["token"].encode()


@pytest.mark.parametrize("moved", [{}, MOVED], ids=["greedy", "moved"])
def test_chosen_tokens_are_described_whatever_their_rank(api: httpx.Client, moved: dict[str, Any]) -> None:
    """At the same time another request asks for the most likely tokens, in the same steps."""
    chosen = [2500, 7, 300, 2999]
    prompt = random_prompts(1, 3000, longest=30, seed=4)[0]
    asked = {"prompt": prompt, "logprobs": 1, "logprob_token_ids": chosen, "return_tokens_as_token_ids": True}
    body = TEXT | {"temperature": 0} | moved | asked
    others: list[dict[str, Any]] = []
    beside = threading.Thread(
        target=lambda: others.append(post(api, "/v1/completions", TEXT | {"logprobs": 3, "max_tokens": 40}))
    )
    beside.start()
    answer = post(api, "/v1/completions", body)
    beside.join()
    tokens = drawn(answer)[0]
    wanted = raw_logprobs(prompt + tokens)[len(prompt) - 1 :]
    for row, token_id, top in zip(wanted, tokens, answer["choices"][0]["logprobs"]["top_logprobs"], strict=False):
        assert set(top) == {f"token_id:{named}" for named in (*chosen, token_id)}
        for name, logprob in top.items():
            assert logprob == pytest.approx(row[int(name.removeprefix("token_id:"))].item(), abs=2e-4)
    assert {len(top) for top in others[0]["choices"][0]["logprobs"]["top_logprobs"]} <= {3, 4}
    chat = CHAT | moved | {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 5}
    shown = post(api, "/v1/chat/completions", chat | {"logprob_token_ids": chosen})
    wanted = raw_logprobs(shown["prompt_token_ids"] + drawn(shown)[0])[len(shown["prompt_token_ids"]) - 1 :]
    tokens = drawn(shown)[0]
    for row, token_id, entry in zip(wanted, tokens, shown["choices"][0]["logprobs"]["content"], strict=False):
        found = [item["logprob"] for item in entry["top_logprobs"]]
        named = chosen if token_id in chosen else [token_id, *chosen]
        assert found == pytest.approx(row[named].tolist(), abs=2e-4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncation_keeps_the_side_that_is_asked_for(api: httpx.Client, tokenizer: Any, side: str) -> None:
    whole = tokenizer.encode(PROMPT)
    fields = {"truncate_prompt_tokens": 21, "truncation_side": side, "temperature": 0}
    answer = post(api, "/v1/completions", TEXT | fields)
    kept = whole[-21:] if side == "left" else whole[:21]
    assert answer["choices"][0]["prompt_token_ids"] == kept
    assert drawn(answer) == greedy(EMBEDDED, [kept], 6)


def test_an_answer_may_be_any_json(api: httpx.Client) -> None:
    body = CHAT | {"messages": [{"role": "user", "content": "Say something."}], "max_tokens": 200}
    answer = post(api, "/v1/chat/completions", body | {"structured_outputs": {"json": True}})
    json.loads(answer["choices"][0]["message"]["content"])


def test_truncation_keeps_the_last_tokens(api: httpx.Client, tokenizer: Any) -> None:
    whole = tokenizer.encode(PROMPT)
    for prompt in (PROMPT, whole):
        body = TEXT | {"prompt": prompt, "truncate_prompt_tokens": 21, "temperature": 0}
        answer = post(api, "/v1/completions", body)
        assert answer["choices"][0]["prompt_token_ids"] == whole[-21:]
        assert answer["usage"]["prompt_tokens"] == 21
        assert drawn(answer) == greedy(EMBEDDED, [whole[-21:]], 6)
    uncut = post(api, "/v1/completions", TEXT | {"truncate_prompt_tokens": 4000, "temperature": 0})
    assert uncut["choices"][0]["prompt_token_ids"] == whole
    messages = [{"role": "user", "content": PROMPT}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    cut = post(api, "/v1/chat/completions", CHAT | {"messages": messages, "truncate_prompt_tokens": 30})
    assert cut["prompt_token_ids"] == rendered[-30:]


def test_a_last_message_is_gone_on_with(api: httpx.Client, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "What is a KV cache?"}, {"role": "assistant", "content": "A KV cache"}]
    wanted = tokenizer.apply_chat_template(messages, continue_final_message=True)["input_ids"]
    answer = post(api, "/v1/chat/completions", CHAT | {"messages": messages, "continue_final_message": True})
    assert answer["prompt_token_ids"] == wanted
    (choice,) = answer["choices"]
    tokens = choice["token_ids"]
    assert tokens == greedy(EMBEDDED, [wanted], 12)[0][: len(tokens)]
    assert choice["message"]["content"] == tokenizer.decode(tokens, skip_special_tokens=True)
    opened = post(api, "/v1/chat/completions", CHAT | {"messages": messages})
    assert opened["prompt_token_ids"] != wanted


def served_with(tmp_path: Path, **generation: Any) -> EmbeddedServer:
    """The embedded model with another generation_config.json."""
    for file in EMBEDDED.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]} | generation))
    return EmbeddedServer(model=str(tmp_path), served_model_name="embedded", max_model_len=160)


@pytest.mark.parametrize(
    ("greedy_by", "user"),
    [
        ({"temperature": 0.0}, {"temperature": 1.5}),
        ({"top_k": 1, "temperature": 1.5}, {"top_k": -1}),
        ({"top_p": 1e-6, "temperature": 1.5}, {"top_p": 1}),
    ],
    ids=["temperature", "top_k", "top_p"],
)
def test_the_checkpoints_wishes_hold_until_the_user_has_others(
    tmp_path: Path, tokenizer: Any, greedy_by: dict[str, Any], user: dict[str, Any]
) -> None:
    """Compares with transformers' tokens: a default that makes answers greedy, a penalty, and a length."""
    (prompt,) = random_prompts(1, 3000, longest=40, seed=1)
    body = {"model": "embedded", "prompt": prompt, "return_token_ids": True, "ignore_eos": True, "seed": 5}
    plain, penalized = greedy(EMBEDDED, [prompt], 12)[0], penalized_greedy(prompt, 9, 1.7)
    assert penalized != plain[:9]
    with (
        served_with(tmp_path, **greedy_by, repetition_penalty=1.7, max_new_tokens=9) as url,
        httpx.Client(base_url=url, timeout=300) as api,
    ):
        assert drawn(post(api, "/v1/completions", body)) == [penalized]
        longer = body | {"repetition_penalty": 1, "max_tokens": 12}
        assert drawn(post(api, "/v1/completions", longer)) == [plain]
        assert drawn(post(api, "/v1/completions", longer | user)) != [plain]
        assert len(drawn(post(api, "/v1/completions", body | {"min_tokens": 11}))[0]) == 11
        check_length_of_chat(api)
        full = body | {"prompt": (prompt * 30)[:155]}
        assert len(drawn(post(api, "/v1/completions", full))[0]) == 5, "a default is cut to the room"


def check_length_of_chat(api: httpx.Client) -> None:
    chat = {"model": "embedded", "messages": [{"role": "user", "content": "Hi"}], "ignore_eos": True}
    assert post(api, "/v1/chat/completions", chat)["usage"]["completion_tokens"] == 9
    assert post(api, "/v1/chat/completions", chat | {"max_tokens": 14})["usage"]["completion_tokens"] == 14
    response = post(api, "/v1/responses", {"model": "embedded", "input": "Count to a hundred."})
    assert response["usage"]["output_tokens"] <= 9


@torch.inference_mode()
def penalized_greedy(prompt: list[int], count: int, penalty: float) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "temperature": None, "top_p": None}
    out = model.generate(ids, max_new_tokens=count, repetition_penalty=penalty, **options)
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (
            {"structured_outputs": {"choice": ["yes"]}, "allowed_token_ids": [5], "ignore_eos": False},
            "allowed_token_ids",
        ),
        ({"repetition_penalty": 1e-300}, "repetition_penalty"),
    ],
)
def test_a_contradiction_is_the_clients_and_prompts_stay_cached(
    api: httpx.Client, wrong: dict[str, Any], told: str
) -> None:
    body = TEXT | {"prompt": f"{told}: {PROMPT}"}
    post(api, "/v1/completions", body)
    answer = api.post("/v1/completions", json=body | wrong)
    assert answer.status_code == 400, answer.text
    assert told in answer.json()["error"]["message"]
    assert post(api, "/v1/completions", body)["usage"]["prompt_tokens_details"]["cached_tokens"] >= BLOCK
