"""Plain completions: forms of prompts, batches, echo, logprobs, streams."""

from __future__ import annotations

from typing import Any, cast

import httpx
import pytest

from raylm.frontend.outputs import TokenLogprob
from raylm.ingress.openai.logprobs import CompletionLogprobs, TokenTexts
from tests.ingress.fake_llm import BOS, EOS, FakeAsyncLLM, logprob
from tests.ingress.harness import CHAT, TEXT, events

PATH = "/v1/completions"


async def post(client: httpx.AsyncClient, **fields: Any) -> Any:
    answer = await client.post(PATH, json=TEXT | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def streamed_choices(client: httpx.AsyncClient, **fields: Any) -> dict[int, dict[str, Any]]:
    """The choices of a stream, joined."""
    answer = await client.post(PATH, json=TEXT | {"stream": True} | fields)
    assert answer.status_code == 200, answer.text
    *chunks, done = events(answer.text)
    assert done == "[DONE]"
    found: dict[int, dict[str, Any]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        whole = found.setdefault(choice["index"], {"text": "", "logprobs": None, "finish_reason": None})
        assert whole["finish_reason"] is None
        whole["text"] += choice["text"]
        whole["finish_reason"] = choice["finish_reason"]
        for name, column in (choice["logprobs"] or {}).items():
            whole["logprobs"] = whole["logprobs"] or {}
            whole["logprobs"][name] = whole["logprobs"].get(name, []) + column
    return found


@pytest.mark.parametrize(
    ("prompt", "received"),
    [
        ("Say", ["Say"]),
        (["a", "b", "c"], ["a", "b", "c"]),
        ([5, 6], [[5, 6]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ],
)
@pytest.mark.parametrize("n", [1, 2])
async def test_choices_are_numbered_prompt_times_n(
    client: httpx.AsyncClient, llm: FakeAsyncLLM, prompt: Any, received: list[Any], n: int
) -> None:
    answer = await post(client, prompt=prompt, n=n)
    assert [call.prompt for call in llm.calls] == received
    assert len({call.head.request_id for call in llm.calls}) == len(received)
    assert [c["index"] for c in answer["choices"]] == list(range(len(received) * n))
    texts = [c["text"] for c in answer["choices"]]
    assert texts == ["Hello wörld", "Hello wörld1"][:n] * len(received)
    assert [c["text"] for _, c in sorted((await streamed_choices(client, prompt=prompt, n=n)).items())] == texts


async def test_usage_sums_over_prompts_and_choices(client: httpx.AsyncClient) -> None:
    usage = (await post(client, prompt=[[1, 2], [3, 4, 5, 6]], n=2, max_tokens=3))["usage"]
    assert usage == {
        "prompt_tokens": 6,
        "completion_tokens": 12,
        "total_tokens": 18,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    body = TEXT | {"prompt": [[1, 2], [3, 4, 5, 6]], "n": 2, "max_tokens": 3, "stream": True}
    answer = await client.post(PATH, json=body | {"stream_options": {"include_usage": True}})
    assert events(answer.text)[-2]["usage"] == usage


async def test_default_length_is_openais(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    await post(client)
    llm.default_max_tokens = 40  # the checkpoint's default, which generate applies
    await post(client)
    await post(client, max_tokens=5)
    assert [call.params.max_tokens for call in llm.calls] == [16, None, 5]


async def test_echo_of_text_and_of_ids(client: httpx.AsyncClient) -> None:
    assert (await post(client, echo=True))["choices"][0]["text"] == "SayHello wörld"
    assert (await post(client, echo=True, prompt=[72, 105]))["choices"][0]["text"] == "HiHello wörld"
    assert (await streamed_choices(client, echo=True))[0]["text"] == "SayHello wörld"


async def test_logprobs_in_columns(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    llm.reply = "aö"
    wanted = {
        "tokens": ["a", "\\xc3", "\\xb6", "</s>"],
        "token_logprobs": [-0.25] * 4,
        "top_logprobs": [
            {"a": -0.25, "b": -0.5},
            {"\\xc3": -0.25, "\\xc4": -0.5},
            {"\\xb6": -0.25, "\\xb7": -0.5},
            {"</s>": -0.25, "\x00": -0.5},
        ],
        "text_offset": [0, 1, 1, 2],
    }
    assert (await post(client, logprobs=2))["choices"][0]["logprobs"] == wanted
    assert (await streamed_choices(client, logprobs=2))[0]["logprobs"] == wanted


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_echoed_logprobs_as_evaluation_harnesses_read_them(
    client: httpx.AsyncClient, llm: FakeAsyncLLM, max_tokens: int
) -> None:
    fields = {"prompt": [BOS, *"hö!".encode()], "echo": True, "logprobs": 1, "max_tokens": max_tokens}
    (choice,) = (await post(client, **fields))["choices"]
    more = max_tokens == 1
    assert choice["text"] == "<s>hö!" + "H" * more
    assert choice["finish_reason"] == "length"
    columns = choice["logprobs"]
    assert columns["tokens"] == ["<s>", "h", "\\xc3", "\\xb6", "!"] + ["H"] * more
    assert columns["token_logprobs"] == [None] + [-0.25] * (4 + more)
    assert columns["top_logprobs"] == [None, {"h": -0.25}, {"\\xc3": -0.25}, {"\\xb6": -0.25}, {"!": -0.25}] + (
        [{"H": -0.25}] * more
    )
    assert columns["text_offset"] == [0, 3, 4, 4, 5] + [6] * more
    assert (await streamed_choices(client, **fields))[0] == {
        "text": choice["text"], "logprobs": columns, "finish_reason": "length"
    }  # fmt: skip
    usage = (await post(client, **fields))["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, max_tokens)
    assert llm.calls[0].params.max_tokens == 1


async def test_offsets_of_a_text_prompt_leave_out_the_bos(client: httpx.AsyncClient) -> None:
    (choice,) = (await post(client, prompt="hi", echo=True, logprobs=0, max_tokens=2))["choices"]
    assert choice["text"] == "hiHe"
    assert choice["logprobs"]["tokens"] == ["<s>", "h", "i", "H", "e"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2, 3]


async def test_truncation_keeps_the_end(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    answer = await post(client, prompt="abcdef", truncate_prompt_tokens=3, echo=True)
    assert llm.calls[0].prompt == [*b"def"]
    assert answer["choices"][0]["text"] == "defHello wörld"
    await post(client, prompt="ab", truncate_prompt_tokens=3)
    assert llm.calls[1].prompt == "ab"


async def test_prompt_logprobs_beside_echoed_ones(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    fields = {"prompt": [[1, 2], [3]], "prompt_logprobs": 1, "logprobs": 2, "echo": True, "max_tokens": 1}
    first, second = (await post(client, **fields))["choices"]
    assert first["prompt_logprobs"] == [None, {"2": {"logprob": -0.25, "rank": 1, "decoded_token": "\x02"}}]
    assert first["logprobs"]["top_logprobs"][1] == {"\x02": -0.25, "\x03": -0.5}
    assert second["prompt_logprobs"] == [None]
    assert llm.calls[0].params.prompt_logprobs == 2


async def test_token_ids_are_returned_when_asked_for(client: httpx.AsyncClient) -> None:
    first, second = (await post(client, prompt=["a", "b"], return_token_ids=True, max_tokens=2))["choices"]
    assert first["token_ids"] == second["token_ids"] == [72, 101]
    assert (first["prompt_token_ids"], second["prompt_token_ids"]) == ([BOS, 97], [BOS, 98])


async def test_best_of_equal_to_n_means_nothing(client: httpx.AsyncClient) -> None:
    assert len((await post(client, n=2, best_of=2))["choices"]) == 2


async def test_a_failing_prompt_ends_the_others(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    llm.max_model_len = 100
    answer = await client.post(PATH, json=TEXT | {"prompt": ["x" * 200, "b", "c"]})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert all(call.ended != "open" for call in llm.calls)


async def test_tokenize_and_detokenize(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    found = (await client.post("/tokenize", json={"prompt": "hö", "return_token_strs": True})).json()
    assert found == {
        "count": 4,
        "max_model_len": 4096,
        "tokens": [BOS, 104, 0xC3, 0xB6],
        "token_strs": ["<s>", "<0x68>", "<0xC3>", "<0xB6>"],
    }
    bare = (await client.post("/tokenize", json={"prompt": "h", "add_special_tokens": False})).json()
    assert (bare["tokens"], bare["token_strs"]) == ([104], None)
    chat = (await client.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]})).json()
    assert chat["tokens"] == [BOS, *b"user:x\n"]
    assert llm.rendered[0].add_generation_prompt is True
    text = await client.post("/detokenize", json={"model": llm.model_name, "tokens": [104, 0xC3, 0xB6, EOS]})
    assert text.json() == {"prompt": "hö</s>"}


def test_offsets_go_on_after_the_prompts_text_whatever_its_tokens_are() -> None:
    columns = CompletionLogprobs(TokenTexts(FakeAsyncLLM()), 0)  # type: ignore[arg-type]
    assert columns.prompt("hi there", [BOS, 120, 104], [None] * 3)["text_offset"] == [0, 0, 0]
    assert columns.generated([97, 98], [TokenLogprob(97, -1.0, 1), TokenLogprob(98, -1.0, 1)])["text_offset"] == [8, 9]


def test_minus_infinity_is_told_as_openai_does() -> None:
    columns = CompletionLogprobs(TokenTexts(FakeAsyncLLM()), 1)  # type: ignore[arg-type]
    shown = columns.generated([97], [TokenLogprob(97, float("-inf"), 9, [(98, float("-inf"))])])
    assert shown["token_logprobs"] == [-9999.0]
    assert list(shown["top_logprobs"].values) == [{"a": -9999.0, "b": -9999.0}]


@pytest.mark.parametrize(("path", "prompt"), [(PATH, TEXT), ("/v1/chat/completions", CHAT)])
async def test_answers_and_chunks_name_what_computed_them(
    client: httpx.AsyncClient, llm: FakeAsyncLLM, path: str, prompt: dict[str, Any]
) -> None:
    assert (await client.post(path, json=prompt)).json()["system_fingerprint"] == llm.fingerprint
    *chunks, _ = events((await client.post(path, json=prompt | {"stream": True})).text)
    assert {chunk["system_fingerprint"] for chunk in chunks} == {llm.fingerprint}


@pytest.mark.parametrize(("skip", "wanted"), [(True, [0, 1, 1, 2]), (False, [0, 1, 5, 6])])
def test_offsets_count_only_tokens_of_the_text(skip: bool, wanted: list[int]) -> None:
    tokens = TokenTexts(cast(Any, FakeAsyncLLM()))
    columns = CompletionLogprobs(tokens, 0, tokens.special if skip else ())
    token_ids = [*b"a", EOS, *b"bc"]
    assert columns.generated(token_ids, [logprob(token_id, 0) for token_id in token_ids])["text_offset"] == wanted
