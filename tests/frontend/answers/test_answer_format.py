"""The parts of an answer, and the tokens of its text, do not depend on how tokens were batched and read."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raylm.checkpoint import EMBEDDED
from raylm.frontend.answers.answer_format import AnswerFormat, AnswerReader
from raylm.frontend.answers.reasoning_parsers import REASONING_PARSERS
from raylm.frontend.answers.tool_calls import TOOL_PARSERS
from raylm.frontend.outputs import CompletionDelta, TokenLogprob
from raylm.frontend.prompt_state import PromptState, process
from raylm.frontend.telemetry import Telemetry
from raylm.frontend.text.tokenizer import Tokenizer
from raylm.messages import EngineCoreRequest, ReasoningTokenIds
from raylm.params import SamplingParams
from tests.frontend.played_engine import batch
from tests.ingress.writing_engine import CALLS, SAID, logprobs

TOKENIZER = Tokenizer(EMBEDDED)
EOS = 2
TOOLS: Any = {"f": {"properties": {"city": {"type": "string"}}}}
CODED = "<tool_call>\n<function=f>\n<parameter=city>\nKöln\n</parameter>\n</function>\n</tool_call>"
# (text that a model draws, parser of its tool calls)
ANSWERS = [
    *((said, "hermes") for said in SAID),
    (f"<think>\nHm </thin 🙂\n</think>\n\nI << <tool ask. \n{CALLS} And then?\n{CALLS}", "hermes"),
    (f"Zürich 🙂?\n{CODED}\nWell, <tool_call> no.\n{CODED}", "qwen3_coder"),
    ('{"name": "f", "parameters": {"city": "Rom"}}; {"name": "f", "parameters": {}} and text', "llama3_json"),
    ('  {"name": "g", "parameters": {}} is no call', "llama3_json"),
]
Part = tuple[str, Any]


@cache
def form_of(parser: str) -> AnswerFormat:
    backend = TOKENIZER.backend
    start, end = backend.token_to_id("<think>"), backend.token_to_id("</think>")
    thinking = ReasoningTokenIds(start, end, (end,), begun=False)
    return AnswerFormat(REASONING_PARSERS["think"], thinking, TOOL_PARSERS[parser], TOOLS)


async def read(
    said: str, parser: str, sizes: list[int], reads: list[bool], reason: Any
) -> tuple[list[Part], list[int]]:
    """The parts of an answer in order, and the tokens of its text. ``reads`` says which batches are read at once."""
    drawn = TOKENIZER.encode_now(said, add_special_tokens=False) + ([EOS] if reason == "stop" else [])
    params = SamplingParams(logprobs=0, skip_special_tokens=False, stop=("END",))
    request = EngineCoreRequest(key=1, request_id="r", prompt_token_ids=[5], params=params, arrival_time=0.0)
    opened = PromptState(request, TOKENIZER, Telemetry("m", dict), form_of(parser))
    parts: list[Part] = []
    tokens: list[int] = []
    at = place = 0
    while at < len(drawn) and not opened.finished:
        ids = drawn[at : at + sizes[place % len(sizes)]]
        at += len(ids)
        ended = reason if at == len(drawn) else None
        process({1: opened}, batch((1, 0, ids, ended), logprobs=logprobs(ids, 0)))
        if opened.finished or reads[place % len(reads)]:
            for delta in (await opened.get()).deltas:
                add(parts, delta)
                tokens += [entry.token_id for entry in delta.text_logprobs or ()]
        place += 1
    return parts, tokens


def add(parts: list[Part], delta: CompletionDelta) -> None:
    for kind, text in (("reasoning", delta.reasoning), ("text", delta.text)):
        if text and parts and parts[-1][0] == kind:
            parts[-1] = kind, parts[-1][1] + text
        elif text:
            parts.append((kind, text))
    for call in delta.tool_calls or ():
        if call.id is not None:
            parts.append((f"call {call.index}", call.arguments))
        else:
            assert parts[-1][0] == f"call {call.index}"
            parts[-1] = parts[-1][0], parts[-1][1] + call.arguments


@pytest.mark.parametrize(("said", "parser"), ANSWERS)
@pytest.mark.parametrize("reason", ["stop", "length"])
@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12), reads=st.lists(st.booleans(), min_size=1, max_size=12)
)
def test_any_partition_of_the_tokens_gives_the_same_answer(
    said: str, parser: str, reason: str, sizes: list[int], reads: list[bool]
) -> None:
    one_by_one = asyncio.run(read(said, parser, [1], [True], reason))
    assert asyncio.run(read(said, parser, sizes, reads, reason)) == one_by_one
    parts, tokens = one_by_one
    joined = b"".join(map(TOKENIZER.token_bytes, tokens)).decode(errors="replace")
    if "END" not in said:  # a token may contain a stop string and text before it
        assert without_space(joined) == without_space("".join(text for kind, text in parts if kind == "text"))


def without_space(text: str) -> str:
    """Remove white space. Parsers drop it beside their markers, and a token can contain some of it with text."""
    return "".join(text.split())


def test_the_tokens_of_a_text_are_told_from_markers_and_white_space() -> None:
    said = ["<think>", "so", "</think>", "\n\n", "n", "<", "<", " ", "<tool_call>", '{"name": "f"', "}", "\n",
            "</tool_call>", "\n", "é", "!", ""]  # fmt: skip
    thinking = ReasoningTokenIds(0, 2, (2,), begun=False)
    reader = AnswerReader(AnswerFormat(REASONING_PARSERS["think"], thinking, TOOL_PARSERS["hermes"]))
    found = []
    for token_id, text in enumerate(said):
        held = text == "é"  # as if a character needed two tokens
        reason = "stop" if token_id == len(said) - 1 else None
        entries = [TokenLogprob(token_id, -1.0, 1)]
        delta = CompletionDelta(0, "" if held else text, [token_id], entries, reason)  # type: ignore[arg-type]
        if said[token_id - 1] == "é" and not held:
            delta.text = f"é{text}"
        found += [entry.token_id for part in reader.read(delta) for entry in part.text_logprobs or ()]
    assert [said[token_id] for token_id in found] == ["n", "<", "<", "\n", "é", "!"]


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ([".\n", "[", "]\n\n", "x"], [0, 1, 2, 3]),
        (["a", "\n\n[TO", "O", "\n\n[T"], [0, 1, 2, 3]),
        (["a", "\n\n[TO", "O", "\n\n[T", 'OOL_CALLS][{"name": "f"'], [0, 1, 2]),
    ],
)
def test_a_token_that_is_held_twice_belongs_to_the_text_once(said: list[str], wanted: list[int]) -> None:
    """A parser holds the end of a token, and a later token before it can return the text of both."""
    reader, found = AnswerReader(AnswerFormat(tool_parser=TOOL_PARSERS["mistral"])), []
    for token_id, text in enumerate(said):
        reason = "stop" if token_id == len(said) - 1 else None
        entries = [TokenLogprob(token_id, -1.0, 1)]
        delta = CompletionDelta(0, text, [token_id], entries, reason)  # type: ignore[arg-type]
        found += [entry.token_id for part in reader.read(delta) for entry in part.text_logprobs or ()]
    assert found == wanted


def test_tokens_of_reasoning_after_white_space_are_counted() -> None:
    thinking = ReasoningTokenIds(1, 2, (2,), begun=False)
    reader, whole = AnswerReader(AnswerFormat(REASONING_PARSERS["think"], thinking)), CompletionDelta(0)
    for token_id, text in [(9, "\n"), (1, "<think>"), (5, "so"), (6, " so"), (2, "</think>"), (7, "Yes")]:
        for part in reader.read(CompletionDelta(0, text, [token_id])):
            whole.add(part)
    assert (whole.reasoning, whole.text) == ("so so", "Yes")
    assert (whole.reasoning_tokens, whole.token_ids[whole.tokens_before_answer :]) == (2, [7])
