"""Conversations of mixed skills, rendered as the chat template renders them, with the answers marked for the loss."""

import json
import random
from dataclasses import dataclass, field, replace
from typing import Any

import recall
import tools
import words
from recall import Memory
from skills import ALWAYS_THINKS, SINGLE
from tokenizers import Tokenizer
from tools import Tool
from words import PHRASES, Split, Turn

Segment = tuple[str, bool]
TOOL_PROMPT = """You may call these tools:
<tools>
{}
</tools>
To call one, write its name and arguments as JSON inside <tool_call></tool_call>."""


@dataclass(slots=True)
class Conversation:
    """A conversation under construction: the text of the system turn, the facts mentioned, and the turns so far."""

    system: str = ""
    tools: list[Tool] = field(default_factory=list)
    schemas: list[dict[str, Any]] = field(default_factory=list)
    memory: Memory = field(default_factory=Memory)
    turns: list[tuple[Turn, bool]] = field(default_factory=list)


def begin(rng: random.Random, split: Split, tool_share: float) -> Conversation:
    """An empty conversation, some with a system prompt, some with tools."""
    talk = Conversation()
    if rng.random() < 0.35:
        told = words.sentence(rng, split) if rng.random() < 0.2 else rng.choice(PHRASES["systems"])
        talk.system = told
        if rng.random() < 0.3:
            talk.system += " " + recall.new_facts(rng, split, talk.memory, 1)[0].statement
    if rng.random() < tool_share:
        give_tools(rng, talk, tools.toolbox(rng, split))
    return talk


def give_tools(rng: random.Random, talk: Conversation, box: list[Tool]) -> None:
    """Describe the tools of `box` in the system turn."""
    talk.tools, talk.schemas = box, [tool.schema(rng) for tool in box]


def next_turns(
    rng: random.Random, split: Split, talk: Conversation, weights: dict[str, float]
) -> list[tuple[Turn, bool]]:
    """One exchange of a skill drawn by weight (two turns where a tool answers), each with whether the model thinks."""
    calls = talk.tools and rng.random() < 0.5
    skill = "call" if calls else rng.choices(list(weights), list(weights.values()))[0]
    thinks = skill in ALWAYS_THINKS or rng.random() < 0.15
    match skill:
        case "call":
            turns = [tools.call(rng, split, talk.tools)]
            if rng.random() < 0.5:
                turns.append(tools.result(rng, split))
        case "tell":
            turns = [recall.tell(rng, split, talk.memory)]
        case "ask":
            turns = [recall.ask(rng, split, talk.memory)]
        case "tell and ask":
            turns = [recall.tell_and_ask(rng, split, talk.memory)]
        case _:
            turns = [SINGLE[skill](rng, split)]
    if split != "test" and skill != "copying" and rng.random() < 0.1:
        turns[0] = replace(turns[0], user=casual(rng, turns[0].user))
    return [(turn, thinks) for turn in turns]


def casual(rng: random.Random, text: str) -> str:
    """The text as typed in haste: a small first letter, no mark at the end, or both."""
    if rng.random() < 0.7:
        text = text[:1].lower() + text[1:]
    return text.rstrip(".?!") or text if rng.random() < 0.7 else text


def system_segment(talk: Conversation) -> Segment:
    """The system turn, empty where there is none."""
    if not talk.system and not talk.schemas:
        return "", False
    listed = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in talk.schemas)
    described = TOOL_PROMPT.format(listed)
    glue = "\n\n" if talk.system and talk.schemas else ""
    return f"<|im_start|>system\n{talk.system}{glue}{described if talk.schemas else ''}<|im_end|>\n", False


def turn_segments(turn: Turn, thinks: bool) -> list[Segment]:
    """The prompt of a turn, its answer up to the end token, and the newline behind it."""
    user = f"<tool_response>\n{turn.user}\n</tool_response>" if turn.role == "tool" else turn.user
    prompt = f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
    if thinks:
        return [(prompt, False), (f"<think>\n{turn.thought}\n</think>\n\n{turn.answer}<|im_end|>", True), ("\n", False)]
    return [(f"{prompt}<think>\n\n</think>\n\n", False), (f"{turn.answer}<|im_end|>", True), ("\n", False)]


def encode(tokenizer: Tokenizer, segments: list[Segment]) -> tuple[list[int], list[bool]]:
    """Token ids of the segments and whether each is a token that the model must write."""
    ids: list[int] = []
    mask: list[bool] = []
    for encoded, (_, written) in zip(
        tokenizer.encode_batch_fast([text for text, _ in segments]), segments, strict=True
    ):
        ids += encoded.ids
        mask += [written] * len(encoded.ids)
    return ids, mask


def row(
    rng: random.Random,
    tokenizer: Tokenizer,
    length: int,
    weights: dict[str, float],
    tool_share: float,
    split: Split = "train",
) -> tuple[list[int], list[bool]]:
    """One conversation of at most `length` tokens with its mask: turns are added until three in a row do not fit."""
    talk = begin(rng, split, tool_share)
    ids, mask = encode(tokenizer, [system_segment(talk)])
    if len(ids) > length // 2:
        talk = Conversation()
        ids, mask = [], []
    misses = 0
    while misses < 3:
        turns = next_turns(rng, split, talk, weights)
        more, marks = encode(tokenizer, [segment for turn in turns for segment in turn_segments(*turn)])
        if len(ids) + len(more) > length:
            misses += 1
            continue
        talk.turns += turns
        ids += more
        mask += marks
    return ids, mask


def messages(talk: Conversation) -> list[dict[str, str]]:
    """The same conversation as the messages of a chat request."""
    out = [{"role": "system", "content": talk.system}] if talk.system else []
    for turn, _ in talk.turns:
        out += [{"role": turn.role, "content": turn.user}, {"role": "assistant", "content": turn.answer}]
    return out
