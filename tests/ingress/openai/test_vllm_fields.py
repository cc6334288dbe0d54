"""Fields of vLLM's clients that OpenAI does not have, and their effects, whole and streamed."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from raylm.frontend import TokenLogprob
from raylm.frontend.answers.answer_format import AnswerFormat
from raylm.frontend.answers.reasoning_parsers import REASONING_PARSERS
from raylm.ingress.openai.logprobs import CompletionLogprobs, TokenTexts, prompt_logprobs
from raylm.messages import ReasoningTokenIds
from tests.ingress.fake_llm import CUSTOM_ROLE, FakeAsyncLLM
from tests.ingress.harness import CHAT, TEXT, events
from tests.ingress.openai.test_chat import PATH, post, stream


async def test_an_echo_puts_the_continued_message_before_its_answer(client: httpx.AsyncClient) -> None:
    parts = [{"type": "text", "text": "So"}, {"type": "text", "text": "far: "}]
    for content, echoed in (("So far: ", "So far: "), (parts, "So\nfar: ")):
        messages = [*CHAT["messages"], {"role": "assistant", "content": content}]
        for options in ({"continue_final_message": True}, {}):
            body = {"messages": messages, "echo": True, "n": 2} | options
            texts = [choice["message"]["content"] for choice in (await post(client, **body))["choices"]]
            assert texts == [f"{echoed}Hello wörld", f"{echoed}Hello wörld1"]
            chunks = [chunk["choices"][0] for chunk in await stream(client, **body)]
            for index, text in enumerate(texts):
                mine = [chunk["delta"].get("content") for chunk in chunks if chunk["index"] == index]
                assert mine[:2] == ["", echoed]
                assert "".join(map(str, filter(None, mine))) == text
    (choice,) = (await post(client, echo=True))["choices"]
    assert choice["message"]["content"] == "Hello wörld", "the last message is the user's"


async def test_reasoning_may_be_left_out(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    llm.reply = "<think>\nHm.\n</think>\n\nI answer."
    llm.answer_format = AnswerFormat(
        reasoning=REASONING_PARSERS["think"], thinking=ReasoningTokenIds(ord("<"), ord("/"), (), begun=False)
    )
    (bare,) = (await post(client, include_reasoning=False))["choices"]
    (whole,) = (await post(client, include_reasoning=True))["choices"]
    assert whole["message"]["reasoning"] == "Hm."
    assert bare["message"] == {"role": "assistant", "content": "I answer.", "refusal": None, "annotations": []}
    for step in (1, 7, 100):
        llm.step = step
        deltas = [chunk["choices"][0]["delta"] for chunk in await stream(client, include_reasoning=False)]
        assert not [delta for delta in deltas if delta.keys() & {"reasoning", "reasoning_content"}]
        assert "".join(delta.get("content") or "" for delta in deltas) == "I answer."
        assert all(delta["content"] for delta in deltas[1:-1]), "an empty chunk"


async def test_reasoning_that_is_left_out_shows_in_no_token(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    llm.reply = "<think>\nHm.\n</think>\n\nI answer."
    thinking = ReasoningTokenIds(ord("<"), ord("/"), (), begun=False)  # a token of the fake is a byte
    llm.answer_format = AnswerFormat(reasoning=REASONING_PARSERS["think"], thinking=thinking)
    fields = {"logprobs": True, "return_token_ids": True}
    (whole,) = (await post(client, **fields, include_reasoning=True))["choices"]
    assert whole["token_ids"][: len(llm.reply)] == list(llm.reply.encode()), "visible reasoning has its tokens"
    assert len(whole["logprobs"]["content"]) == len(whole["token_ids"])
    answer = whole["token_ids"][llm.reply.index("/") + 1 :]  # the tokens after the end marker
    (bare,) = (await post(client, **fields, include_reasoning=False))["choices"]
    assert bare["token_ids"] == answer
    assert bare["logprobs"]["content"] == whole["logprobs"]["content"][-len(answer) :]
    for step in (1, 7, 100):
        llm.step = step
        chunks = [chunk["choices"][0] for chunk in await stream(client, **fields, include_reasoning=False)]
        assert [token_id for chunk in chunks for token_id in chunk.get("token_ids", ())] == answer
        entries = [entry for chunk in chunks for entry in (chunk["logprobs"] or {}).get("content", ())]
        assert entries == bare["logprobs"]["content"]
        assert all(chunk["token_ids"] for chunk in chunks[1:-1]), "an empty chunk"


async def test_tokens_are_shown_by_their_ids(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    llm.reply = "ö"
    fields = {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    (choice,) = (await post(client, **fields))["choices"]
    entries = choice["logprobs"]["content"]
    assert [(entry["token"], entry["bytes"]) for entry in entries[:2]] == [
        ("token_id:195", [195]),
        ("token_id:182", [182]),
    ]
    assert entries[0]["top_logprobs"][0]["token"] == "token_id:195"
    streamed = [
        entry
        for chunk in await stream(client, **fields)
        for entry in (chunk["choices"][0]["logprobs"] or {}).get("content", ())
    ]
    assert streamed == entries
    body = TEXT | {"logprobs": 1, "return_tokens_as_token_ids": True}
    (text,) = (await client.post("/v1/completions", json=body)).json()["choices"]
    assert text["logprobs"]["tokens"][:2] == ["token_id:195", "token_id:182"]
    assert "token_id:195" in text["logprobs"]["top_logprobs"][0]
    chunks = events((await client.post("/v1/completions", json=body | {"stream": True})).text)
    assert chunks[0]["choices"][0]["logprobs"]["tokens"] == ["token_id:195"]


async def test_a_prompt_is_cut_on_either_side(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    whole = [256, *b"user:Hi\n"]
    for side, kept in (("left", whole[-4:]), ("right", whole[:4])):
        await post(client, truncate_prompt_tokens=4, truncation_side=side)
        assert llm.calls[-1].prompt == kept
        body = TEXT | {"truncate_prompt_tokens": 4, "truncation_side": side}
        for prompt in ("Hello there", [256, *b"Hello there"]):
            assert (await client.post("/v1/completions", json=body | {"prompt": prompt})).status_code == 200
            assert llm.calls[-1].prompt == ([*b"here"] if side == "left" else [256, *b"Hel"])


async def test_minus_one_cuts_a_prompt_to_the_context(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    llm.max_model_len = 6
    for fields, kept in (({}, b"er:Hi\n"[-5:]), ({"max_tokens": 4}, b"i\n")):
        await post(client, truncate_prompt_tokens=-1, **fields)
        assert llm.calls[-1].prompt == [*kept]
    body = TEXT | {"truncate_prompt_tokens": -1, "max_tokens": 2, "prompt": "Hello there"}
    assert (await client.post("/v1/completions", json=body)).status_code == 200
    assert llm.calls[-1].prompt == [*b"here"]


@pytest.mark.parametrize("name", ["schema", "value"])
async def test_a_json_object_may_have_a_schema(client: httpx.AsyncClient, llm: FakeAsyncLLM, name: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    await post(client, response_format={"type": "json_object", name: schema})
    form = llm.calls[-1].params.structured_outputs
    assert form is not None
    assert (form.json, form.json_object, form.param) == (schema, False, f"response_format.{name}")
    await post(client, response_format={"type": "json_object", name: None})
    form = llm.calls[-1].params.structured_outputs
    assert form is not None
    assert form.json_object
    both = {"type": "json_object", "schema": schema, "value": schema}
    answer = await client.post("/v1/chat/completions", json=CHAT | {"response_format": both})
    assert answer.json()["error"]["param"] == "response_format.value"


async def test_special_tokens_are_added_as_asked(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    await post(client, add_special_tokens=True)
    assert llm.rendered[-1].add_special_tokens
    await post(client)
    assert not llm.rendered[-1].add_special_tokens
    assert (await client.post("/v1/completions", json=TEXT | {"add_special_tokens": False})).status_code == 200
    assert llm.calls[-1].prompt == [*b"Say"]
    for fields, wanted in (({}, False), ({"add_special_tokens": True}, True)):
        body = {"messages": CHAT["messages"]} | fields
        assert (await client.post("/tokenize", json=body)).status_code == 200
        assert llm.rendered[-1].add_special_tokens is wanted


async def test_any_json_may_be_asked_for(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    for anything in (True, "true"):
        await post(client, structured_outputs={"json": anything})
        form = llm.calls[-1].params.structured_outputs
        assert form is not None
        assert form.json == {}


async def test_numbers_beyond_64_bits_are_called_so(client: httpx.AsyncClient) -> None:
    for number in (2**64, -(2**63) - 1, 10**30):
        answer = await client.post(PATH, json=CHAT | {"seed": number})
        assert "64-bit integer, from -2**63 to 2**63 - 1" in answer.json()["error"]["message"]
    answer = await client.post(PATH, json=CHAT | {"seed": 2**63})
    assert "less than 9223372036854775808" in answer.json()["error"]["message"]
    for seed in (2**63 - 1, -(2**63)):
        assert (await client.post(PATH, json=CHAT | {"seed": seed})).status_code == 200


async def test_a_role_of_the_templates_own_is_taken(client: httpx.AsyncClient, llm: FakeAsyncLLM) -> None:
    await post(client, messages=[*CHAT["messages"], {"role": CUSTOM_ROLE, "content": [{"type": "text", "text": "a"}]}])
    assert llm.rendered[-1].messages[1] == {"role": CUSTOM_ROLE, "content": "a"}
    answer = await client.post(PATH, json=CHAT | {"messages": [{"role": "asistant", "content": "x"}]})
    assert "did you mean 'assistant'?" in answer.json()["error"]["message"]


def test_a_token_is_the_first_of_its_alternatives(llm: FakeAsyncLLM) -> None:
    of_prompt: Any
    tokens = TokenTexts(llm)  # type: ignore[arg-type]
    entry = TokenLogprob(99, -3.0, 3, [(97, -0.5), (98, -1.0)])
    (top,) = CompletionLogprobs(tokens, 2).generated([99], [entry])["top_logprobs"].values
    assert list(top.items()) == [("c", -3.0), ("a", -0.5), ("b", -1.0)]
    (of_prompt,) = prompt_logprobs([entry], 2, tokens).values
    assert list(of_prompt) == ["99", "97", "98"]
    assert of_prompt["99"] == {"logprob": -3.0, "rank": 3, "decoded_token": "c"}
    entry = TokenLogprob(99, -3.0, 3, [(97, -0.5), (99, -3.0)])
    (of_prompt,) = prompt_logprobs([entry], 2, tokens).values
    assert [(name, found["rank"]) for name, found in of_prompt.items()] == [("99", 3), ("97", 1)]
