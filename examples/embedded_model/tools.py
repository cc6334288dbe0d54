"""Tools with made-up names and arguments, and the turns in which they are called in the Hermes form."""

import json
import random
from dataclasses import dataclass
from typing import Any

import words
from words import LEXICON, WORDS, Split, Turn

KNOWN = {word.lower() for pool in WORDS.values() for word in pool}


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool, the kinds of its arguments, and the ways in which a user asks for it ({0}, {1}: the values)."""

    name: str
    description: str
    arguments: dict[str, str]
    requests: list[str]
    enums: dict[str, list[str]]

    def schema(self, rng: random.Random) -> dict[str, Any]:
        """The tool as an OpenAI client sends it; how much is described varies."""
        properties: dict[str, Any] = {}
        for key, kind in self.arguments.items():
            properties[key] = {"type": {"number": "integer", "small": "integer", "flag": "boolean"}.get(kind, "string")}
            if key in self.enums:
                properties[key]["enum"] = self.enums[key]
            elif rng.random() < 0.3:
                properties[key]["description"] = f"The {key}"
        parameters: dict[str, Any] = {"type": "object", "properties": properties}
        if rng.random() < 0.7:
            parameters["required"] = list(properties)
        function: dict[str, Any] = {"name": self.name, "description": self.description, "parameters": parameters}
        if rng.random() < 0.1:
            del function["description"]
        return {"type": "function", "function": function}


def word_of(rng: random.Random, split: Split, pool: list[str]) -> str:
    """A part of a tool's name: a known word or an invented one."""
    if split in ("whole", "drill", "test"):
        known = rng.choice(pool if rng.random() < 0.5 else WORDS["common"]).lower()
        other = (
            words.jumble(rng, split)
            if split in ("whole", "drill") and rng.random() < 0.3
            else words.invented(rng, split)
        )
        return known if rng.random() < 0.55 else other
    if split == "wide" and rng.random() < 0.6:
        return rng.choice((words.jumble(rng, split), words.pick(rng, WORDS["common"], split).lower()))
    return words.pick(rng, pool, split) if rng.random() < 0.6 else words.invented(rng, split)


def key_of(rng: random.Random, split: Split, pool: list[str]) -> str:
    """The name of an argument; in the test half made of two words, or invented."""
    if split not in ("whole", "drill", "test") or (split in ("whole", "drill") and rng.random() < 0.3):
        return word_of(rng, split, pool)
    key = words.invented(rng, split)
    if rng.random() < 0.4 and key not in KNOWN:
        return key
    while True:
        key = f"{word_of(rng, split, pool)}_{word_of(rng, split, pool)}"
        if words.fits(key, split):
            return key


def verb_and_noun(rng: random.Random, split: Split) -> tuple[str, str]:
    """The two words of a tool's name."""
    while True:
        verb, noun = word_of(rng, split, WORDS["tool_actions"]), word_of(rng, split, WORDS["tool_subjects"])
        if split not in ("whole", "drill", "test") or words.fits(f"{verb} {noun}", split):
            return verb, noun


def requests(verb: str, noun: str, name: str, keys: list[str]) -> list[str]:
    """How a user asks for an invented tool, with {0}, {1} for the values."""
    named = " and ".join(f"{key} {{{i}}}" for i, key in enumerate(keys))
    plain = ", ".join(f"{{{i}}}" for i in range(len(keys)))
    equal = ", ".join(f"{key} = {{{i}}}" for i, key in enumerate(keys))
    stated = " and ".join(f"the {key} is {{{i}}}" for i, key in enumerate(keys))
    do = verb.capitalize()
    return [
        f"Call {name} with {named}.",
        f"Use {name}: {equal}.",
        f"Please {verb} the {noun} with {named}.",
        f"{do} the {noun}: {equal}.",
        f"{do} the {noun}; {stated}.",
        f"I want to {verb} the {noun} for {plain}.",
        f"{do} the {noun} for {plain}.",
        f"Can you {verb} the {noun} of {named}?",
        f"Please {verb} the {noun} for {plain}.",
        f"Use {name} for {plain}.",
    ]


def invented_tool(rng: random.Random, split: Split) -> Tool:
    """A tool named by a verb and a noun, with one to three arguments."""
    verb, noun = verb_and_noun(rng, split)
    keys: list[str] = []
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        key = key_of(rng, split, WORDS["tool_arguments"])
        if key not in keys:
            keys.append(key)
    kinds = {key: rng.choice(("name", "city", "word", "number", "small", "enum", "flag")) for key in keys}
    enums = {key: [words.thing(rng, split) for _ in range(3)] for key, kind in kinds.items() if kind == "enum"}
    name = rng.choice((f"{verb}_{noun}", f"{verb}_{noun}", f"{verb}{noun.capitalize()}", f"{noun}_{verb}"))
    description = rng.choice(
        (f"{verb.capitalize()} the {noun}", f"{verb.capitalize()} a {noun}", f"Tool to {verb} the {noun}")
    )
    return Tool(name, description, kinds, requests(verb, noun, name, keys), enums)


def known_tool(rng: random.Random) -> Tool:
    """One of the usual tools under one of its usual names."""
    known = rng.choice(LEXICON["tools"])
    kinds = {rng.choice(argument["names"]): argument["kind"] for argument in known["arguments"]}
    return Tool(rng.choice(known["names"]), rng.choice(known["descriptions"]), kinds, known["requests"], {})


def toolbox(rng: random.Random, split: Split) -> list[Tool]:
    """One to three tools with different names; the test half has invented ones only."""
    tools: dict[str, Tool] = {}
    known = {"test": 0.0, "drill": 0.1}.get(split, 0.35)
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        tool = known_tool(rng) if rng.random() < known else invented_tool(rng, split)
        tools[tool.name] = tool
    return list(tools.values())


def argument(rng: random.Random, split: Split, tool: Tool, key: str) -> str | int | bool:
    """A value for the argument `key`."""
    match tool.arguments[key]:
        case "name":
            return words.name(rng, split)
        case "city":
            return words.city(rng, split)
        case "number":
            return int(words.number(rng, split, 2, 5))
        case "small":
            return int(words.number(rng, split, 1, 2))
        case "enum":
            return rng.choice(tool.enums[key])
        case "flag":
            return rng.random() < 0.5
        case "words":
            return " ".join(words.thing(rng, split) for _ in range(rng.randint(1, 5)))
        case _:
            return rng.choice((words.invented, words.thing, words.scramble))(rng, split)


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """A call in the Hermes form, written as the chat template writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>'


def said(value: str | int | bool) -> str:
    """The value as a user writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def call(rng: random.Random, split: Split, tools: list[Tool]) -> Turn:
    """The user asks for one of the tools, now and then twice at once."""
    tool = rng.choice(tools)
    unnamed = [wording for wording in tool.requests if " for {0}" in wording]
    wording = rng.choice(unnamed if split == "drill" and unnamed and rng.random() < 0.5 else tool.requests)
    rounds = 2 if rng.random() < 0.06 else 1
    values = [{key: argument(rng, split, tool, key) for key in tool.arguments} for _ in range(rounds)]
    user = " ".join(wording.format(*map(said, each.values())) for each in values)
    answer = "\n".join(call_text(tool.name, each) for each in values)
    return Turn(user, answer, f"The tool {tool.name} does this.")


def result(rng: random.Random, split: Split) -> Turn:
    """What the tool answered, and how the model passes it on."""
    if rng.random() < 0.4:
        text = " ".join(words.thing(rng, split) for _ in range(rng.randint(1, 6)))
        return Turn(text, f"The tool says: {text}.", "I pass on what the tool said.", "tool")
    fields: dict[str, str | int] = {}
    for _ in range(rng.randint(1, 3)):
        number = rng.random() < 0.5
        fields[key_of(rng, split, WORDS["tool_arguments"] + WORDS["tool_subjects"])] = (
            int(words.number(rng, split, 1, 4))
            if number
            else rng.choice((words.thing, words.name, words.city))(rng, split)
        )
    shown = ", ".join(f"{key}: {value}" for key, value in fields.items())
    return Turn(json.dumps(fields), f"The tool says: {shown}.", "I pass on what the tool said.", "tool")
