"""ChatProcessor and the reading of answers, with the embedded model's tokenizer and template, and a played engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from raylm.config import Config
from raylm.errors import ConfigError, UnsupportedFieldError
from raylm.frontend import AsyncLLM, ChatRequest, CompletionDelta, RequestHead
from raylm.params import SamplingParams
from tests.frontend.checkpoints import byte_level, write_checkpoint
from tests.frontend.played_engine import PlayedEngine

ASK = [{"role": "user", "content": "What is the weather in Rome?"}]
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
PARAMS = SamplingParams(max_tokens=100)


@pytest.fixture
async def embedded() -> AsyncIterator[tuple[AsyncLLM, PlayedEngine]]:
    llm, engine = AsyncLLM(Config()), PlayedEngine("e", max_model_len=2048, vocab_size=6142)
    llm.add_engine(engine)
    yield llm, engine
    await llm.stop()


async def answer(
    llm: AsyncLLM,
    engine: PlayedEngine,
    text: str,
    *,
    pieces: int = 3,
    reason: Any = "stop",
    params: SamplingParams = PARAMS,
    **request: Any,
) -> CompletionDelta:
    """The whole answer, if the engine sends the tokens of ``text`` in batches of ``pieces``."""
    prompt = await llm.prepare_chat(ChatRequest(messages=ASK, **request), params)
    drawn = await llm.tokenize(text)
    drawn += [2] if reason == "stop" else []
    outputs = llm.generate(prompt.token_ids, prompt.params, RequestHead(request_id="r"), prompt.answer_format)
    whole = CompletionDelta(0)
    waiting = asyncio.ensure_future(anext(outputs))
    await asyncio.sleep(0)
    key = engine.added[-1].key
    for at in range(0, len(drawn), pieces):
        last = at + pieces >= len(drawn)
        engine.say((key, 0, drawn[at : at + pieces], reason if last else None))
    output = await waiting
    while True:
        for delta in output.deltas:
            whole.add(delta)
        if output.finished:
            return whole
        output = await anext(outputs)


async def test_calls_and_thoughts_are_told_from_the_text(embedded: tuple[AsyncLLM, PlayedEngine]) -> None:
    thinking = {"enable_thinking": True}
    text = f"<think>\nI call it.\n</think>\n\n{CALL}"
    for pieces in (1, 5, 1000):
        got = await answer(*embedded, text, pieces=pieces, tools=[TOOL], template_kwargs=thinking)
        assert (got.reasoning, got.text, got.finish_reason) == ("I call it.", "", "tool_calls")
        assert got.tool_calls is not None
        assert [(call.name, call.arguments) for call in got.tool_calls] == [("get_weather", '{"city": "Rome"}')]
        assert got.reasoning_tokens == len(await embedded[0].tokenize("\nI call it.\n"))


async def test_without_tools_or_with_none_text_stays_text(embedded: tuple[AsyncLLM, PlayedEngine]) -> None:
    for options in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        got = await answer(*embedded, CALL, **options)
        assert (got.text, got.tool_calls, got.finish_reason) == (CALL, None, "stop")


async def test_an_answer_cut_short_has_made_no_tool_call(embedded: tuple[AsyncLLM, PlayedEngine]) -> None:
    got = await answer(*embedded, CALL[:50], reason="length", tools=[TOOL])
    assert got.finish_reason == "length"
    assert got.tool_calls is not None
    assert got.tool_calls[0].name == "get_weather"


async def test_one_call_ends_the_answer_and_not_what_comes_behind_it(embedded: tuple[AsyncLLM, PlayedEngine]) -> None:
    llm, engine = embedded
    params = replace(PARAMS, stop=("More",))
    for pieces in (1, 7, 1000):
        text = f"{CALL}\n{CALL}\nMore."
        got = await answer(llm, engine, text, pieces=pieces, params=params, tools=[TOOL], parallel_tool_calls=False)
        assert got.stop_reason is None
        assert got.tool_calls is not None
        assert [call.index for call in got.tool_calls] == [0]
        assert (got.text, got.finish_reason) == ("", "tool_calls")
        assert got.tool_calls[0].arguments == '{"city": "Rome"}'
    assert engine.stopped


@pytest.mark.parametrize("effort", [None, "none", "high"])
@pytest.mark.parametrize("enabled", [None, True, False])
async def test_effort_and_enable_thinking(
    embedded: tuple[AsyncLLM, PlayedEngine], effort: str | None, enabled: bool | None
) -> None:
    llm, _ = embedded
    kwargs = {} if enabled is None else {"enable_thinking": enabled}
    request = ChatRequest(messages=ASK, reasoning_effort=effort, template_kwargs=kwargs)
    prompt = await llm.prepare_chat(request, PARAMS)
    thinks = effort == "high" if enabled is None else enabled
    assert (await llm.detokenize(prompt.token_ids)).endswith("</think>\n\n") == (not thinks)
    assert (prompt.answer_format is not None) == thinks


async def test_a_prompt_may_begin_the_thoughts(embedded: tuple[AsyncLLM, PlayedEngine]) -> None:
    llm, _ = embedded
    messages = [*ASK, {"role": "assistant", "content": "<think>\nso"}]
    template_kwargs = {"enable_thinking": True}
    request = ChatRequest(messages=messages, template_kwargs=template_kwargs)
    form = (await llm.prepare_chat(request, PARAMS)).answer_format
    assert form is not None
    assert form.thinking is not None
    assert (form.thinking.begun, form.thinking.start_token_id, form.thinking.end_token_id) == (False, 3, 4)
    assert form.thinking.closing_token_ids.count(4) == 1


async def test_a_template_that_opens_the_thoughts(tmp_path: Path) -> None:
    backend = byte_level()
    backend.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    template = "{{ messages[0].content }}<think>\n{# </think> #}"
    path = write_checkpoint(tmp_path, backend, tokenizer_config={"chat_template": template})
    llm = AsyncLLM(Config(model=str(path)))
    form = (await llm.prepare_chat(ChatRequest(messages=ASK), PARAMS)).answer_format
    assert form is not None
    assert form.thinking is not None
    assert form.thinking.begun
    with pytest.raises(UnsupportedFieldError) as refused:
        await llm.prepare_chat(ChatRequest(messages=ASK, tools=[TOOL]), PARAMS)
    assert refused.value.param == "tools"
    await llm.stop()


async def test_markers_that_are_special_tokens_are_shown_to_their_parsers(tmp_path: Path) -> None:
    backend = byte_level()
    backend.add_special_tokens(["[TOOL_CALLS]", "[THINK]", "[/THINK]"])
    template = "{{ messages[0].content }}{# [TOOL_CALLS] [THINK] [/THINK] #}"
    path = write_checkpoint(tmp_path, backend, tokenizer_config={"chat_template": template})
    llm = AsyncLLM(Config(model=str(path)))
    assert llm.chat_description == "tool calls: mistral; reasoning: mistral"
    prompt = await llm.prepare_chat(ChatRequest(messages=ASK), PARAMS)
    assert not prompt.params.skip_special_tokens
    await llm.stop()


async def test_parsers_are_chosen_by_name_or_not_at_all(llm: AsyncLLM, checkpoint: Path) -> None:
    assert llm.chat_description == "tool calls: hermes; reasoning: none"
    with pytest.raises(UnsupportedFieldError) as refused:
        await llm.prepare_chat(ChatRequest(messages=ASK, reasoning_effort="low"), PARAMS)
    assert refused.value.param == "reasoning_effort"
    with pytest.raises(ConfigError, match=r"tool_parser: 'hermse' is not known; use auto, none, .*hermes"):
        AsyncLLM(Config(model=str(checkpoint), tool_parser="hermse"))
    with pytest.raises(ConfigError, match="not tokens of this model's vocabulary"):
        AsyncLLM(Config(model=str(checkpoint), reasoning_parser="think"))
    chosen = AsyncLLM(Config(model="embedded", tool_parser="mistral", reasoning_parser="none"))
    assert chosen.chat_description == "tool calls: mistral; reasoning: none"
    await chosen.stop()
