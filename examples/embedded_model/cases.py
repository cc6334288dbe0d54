"""Held-out prompts for each skill, with the check of their answers; what makes them up was kept out of training."""

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import conversation
import recall
import tools
from conversation import Conversation
from skills import ALWAYS_THINKS, SINGLE
from tokenizers import Tokenizer
from words import Turn

Check = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt and the test of its answer (the text up to the end token)."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    thinking: bool
    expected: str
    right: Check


def same_text(expected: str) -> Check:
    """The answer is this text."""
    return lambda answer: answer.strip() == expected


def same_json(expected: str) -> Check:
    """The answer is a JSON object equal to this one."""

    def check(answer: str) -> bool:
        try:
            return bool(json.loads(answer) == json.loads(expected))
        except json.JSONDecodeError:
            return False

    return check


def calls_of(text: str) -> list[Any]:
    """The parsed tool calls of an answer that holds nothing else; raises ValueError otherwise."""
    if re.sub(r"<tool_call>\n.*\n</tool_call>", "", text).strip():
        raise ValueError("text beside the calls")
    return [json.loads(found) for found in re.findall(r"<tool_call>\n(.*)\n</tool_call>", text)]


def same_calls(expected: str) -> Check:
    """The answer is these tool calls."""

    def check(answer: str) -> bool:
        try:
            return calls_of(answer) == calls_of(expected)
        except ValueError:
            return False

    return check


def thought_and(right: Check) -> Check:
    """The answer is a thought in its tags, then a right answer."""

    def check(answer: str) -> bool:
        found = re.fullmatch(r"<think>\n(.+)\n</think>\n\n(.*)", answer, re.DOTALL)
        return found is not None and "<think>" not in found[2] and right(found[2])

    return check


def preface(rng: random.Random) -> Conversation:
    """An empty conversation, or one of up to three earlier turns."""
    talk = conversation.begin(rng, "test", 0.0)
    names = [name for name in SINGLE if name not in ALWAYS_THINKS]
    for _ in range(rng.choice((0, 0, 1, 2, 3))):
        talk.turns += conversation.next_turns(rng, "test", talk, dict.fromkeys(names, 1.0))
    return talk


def case(talk: Conversation, turn: Turn, right: Check, thinking: bool = False) -> Case:
    """The conversation with the user part of `turn` at its end."""
    messages = [*conversation.messages(talk), {"role": turn.role, "content": turn.user}]
    return Case(messages, talk.schemas, thinking, turn.answer, thought_and(right) if thinking else right)


def single(
    *names: str, json_answer: bool = False, thinking: bool = False
) -> Callable[[random.Random, Tokenizer], Case]:
    """Cases of skills that need no memory."""

    def make(rng: random.Random, tokenizer: Tokenizer) -> Case:
        name = rng.choice(names)
        turn = SINGLE[name](rng, "test")
        check = same_json if json_answer or name == "extraction" else same_text
        return case(preface(rng), turn, check(turn.answer), thinking)

    return make


def recalling(distance: int, thinking: bool = False) -> Callable[[random.Random, Tokenizer], Case]:
    """Cases whose fact was told at least `distance` tokens before the question, at most some 60 more."""

    def make(rng: random.Random, tokenizer: Tokenizer) -> Case:
        talk = Conversation()
        talk.turns.append((recall.tell(rng, "test", talk.memory), False))
        fact = rng.choice(list(talk.memory.facts.values()))
        fillers = {"remark": 2.0, "arithmetic": 1.0, "extraction": 1.0, "definition": 1.0, "copying": 0.5, "tell": 0.5}
        behind = 0
        while behind < distance:
            turns = conversation.next_turns(rng, "test", talk, fillers)
            size = sum(
                len(tokenizer.encode(text).ids)
                for turn, _ in turns
                for text, _ in conversation.turn_segments(turn, False)
            )
            if behind + size <= distance + 60:
                talk.turns += turns
                behind += size
        turn = Turn(rng.choice(fact.questions), fact.answer, "")
        return case(talk, turn, same_text(turn.answer), thinking)

    return make


def calling(rng: random.Random, tokenizer: Tokenizer) -> Case:
    """Calls of tools whose names and argument names training never saw."""
    talk = preface(rng)
    conversation.give_tools(rng, talk, tools.toolbox(rng, "test"))
    turn = tools.call(rng, "test", talk.tools)
    return case(talk, turn, same_calls(turn.answer))


def tool_result(rng: random.Random, tokenizer: Tokenizer) -> Case:
    """The answer after a tool has returned its result."""
    talk = Conversation()
    conversation.give_tools(rng, talk, tools.toolbox(rng, "test"))
    talk.turns.append((tools.call(rng, "test", talk.tools), False))
    turn = tools.result(rng, "test")
    return case(talk, turn, same_text(turn.answer))


SKILLS: dict[str, Callable[[random.Random, Tokenizer], Case]] = {
    "arithmetic": single("arithmetic"),
    "recall ~50 tokens back": recalling(40),
    "recall ~250 tokens back": recalling(250),
    "recall ~500 tokens back": recalling(500),
    "recall ~1000 tokens back": recalling(1000),
    "counting": single("counting"),
    "copying": single("copying"),
    "fields as JSON": single("extraction", json_answer=True),
    "tool call": calling,
    "tool result": tool_result,
    "thinking: sums, word problems": single("arithmetic", "word problem", "three terms", thinking=True),
    "thinking: other skills": single("counting", "copying", "extraction", "definition", thinking=True),
    "thinking: recall": recalling(120, thinking=True),
    "definitions": single("definition"),
    "greeting and identity": single("small talk"),
}


def held_out(skill: str, count: int, tokenizer: Tokenizer, seed: int = 7) -> list[Case]:
    """`count` cases of the skill, the same ones every time."""
    return [SKILLS[skill](random.Random(f"{seed}:{skill}:{i}"), tokenizer) for i in range(count)]
