"""``tool_parser: prompt``: tools, calls and results as text of messages, and the grammar of calls within texts."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from raylm.config import Config
from raylm.frontend import AsyncLLM, ChatRequest
from raylm.frontend.answers.tool_parsers.prompt import PromptParser
from raylm.params import SamplingParams
from tests.frontend.checkpoints import byte_level, write_checkpoint
from tests.frontend.played_engine import PlayedEngine

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}
NOTE = {"type": "function", "function": {"name": "note", "parameters": {"type": "object"}}}
ASK = {"role": "user", "content": "How is it in Rome?"}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if tools or messages | selectattr('tool_calls', 'defined') | list %}{{ raise_exception('tools') }}{% endif %}"
)


@pytest.fixture
async def llm(tmp_path: Path) -> AsyncIterator[AsyncLLM]:
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": TEMPLATE,
    }
    config = {"vocab_size": 330, "eos_token_id": 2, "max_position_embeddings": 4096}
    write_checkpoint(tmp_path, byte_level(), config=config, tokenizer_config=tokenizer_config)
    llm = AsyncLLM(Config(model=str(tmp_path), tool_parser="prompt"))
    llm.add_engine(PlayedEngine("e", max_model_len=4096, vocab_size=512))
    yield llm
    await llm.stop()


async def text_of(llm: AsyncLLM, messages: list[dict[str, Any]], **fields: Any) -> str:
    prompt = await llm.prepare_chat(ChatRequest(messages=messages, **fields), SamplingParams())
    return llm.text_of(prompt.token_ids)


async def accepts(llm: AsyncLLM, text: str, **fields: Any) -> bool:
    """Whether the grammar of an answer accepts all of ``text``."""
    request = ChatRequest(messages=[ASK], tools=[TOOL, NOTE], **fields)
    form = (await llm.prepare_chat(request, SamplingParams())).params.structured_outputs
    assert form is not None
    matcher = LLMatcher(LLTokenizer("byte"), form.grammar or "")
    assert not matcher.get_error()
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


async def test_tools_are_described_in_the_system_message(llm: AsyncLLM) -> None:
    described = json.dumps(TOOL["function"])
    alone = await text_of(llm, [ASK], tools=[TOOL])
    assert alone.startswith("[system]# Tools\n")
    assert described in alone
    assert alone.endswith("[user]How is it in Rome?")
    system = [{"role": "system", "content": "Be brief."}, ASK]
    assert (await text_of(llm, system, tools=[TOOL])).startswith("[system]Be brief.\n\n# Tools\n")
    assert await text_of(llm, system) == "[system]Be brief.[user]How is it in Rome?"
    assert await text_of(llm, system, tools=[TOOL], tool_choice="none") == await text_of(llm, system)


async def test_past_calls_and_results_are_text_with_tools_or_without(llm: AsyncLLM) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        ASK,
        {"role": "assistant", "content": "I look.", "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
        {"role": "tool", "tool_call_id": "c", "content": "warm"},
        {"role": "user", "content": "And now?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
    ]
    history = (
        f"[user]How is it in Rome?[assistant]I look.\n{CALL}\n{CALL}"
        "[user]<tool_response>\nsunny\n</tool_response>\n<tool_response>\nwarm\n</tool_response>\nAnd now?"
        f"[assistant]{CALL}[user]<tool_response>\nrain\n</tool_response>"
    )
    assert await text_of(llm, messages) == history
    assert (await text_of(llm, messages, tools=[TOOL])).endswith(history)
    assert messages[1]["content"] == "I look.", "the caller's messages must not change"


async def test_any_text_is_an_answer_and_what_begins_as_a_call_is_one(llm: AsyncLLM) -> None:
    note = '<tool_call>\n{"name": "note", "arguments": {}}\n</tool_call>'
    for text in ("Hello.", "A <tool_cal", CALL, f"I look. {CALL}", f"{CALL}\n{note}", f"{CALL} Done.", ""):
        assert await accepts(llm, text), text
    for text in (
        "<tool_call>",
        "See <tool_call> for calls.",
        CALL.replace("get_weather", "get_whether"),
        CALL.replace("Rome", "Paris"),
        CALL.removesuffix("</tool_call>"),
        f"{CALL}\n<tool_call>\nnote",
    ):
        assert not await accepts(llm, text), text
    assert await accepts(llm, f"{CALL}\n{note}", parallel_tool_calls=True)
    assert not await accepts(llm, f"{CALL}\n{note}", parallel_tool_calls=False)


async def test_required_and_named_calls_are_held_as_well(llm: AsyncLLM) -> None:
    assert await accepts(llm, CALL, tool_choice="required")
    assert not await accepts(llm, f"Hello. {CALL}", tool_choice="required")


async def test_the_marker_may_be_a_token_of_the_model() -> None:
    llm = AsyncLLM(Config(tool_parser="prompt"))  # the embedded model, although its template has tools
    request = ChatRequest(messages=[ASK], tools=[TOOL])
    prompt = await llm.prepare_chat(request, SamplingParams())
    assert prompt.params.structured_outputs is not None
    assert "# Tools" in llm.text_of(prompt.token_ids)
    await llm.stop()


def test_it_is_never_chosen_by_a_template() -> None:
    assert not PromptParser.serves(CALL)
