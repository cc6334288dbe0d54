"""Facts that the user tells in one turn and asks for in a later one."""

import random
from dataclasses import dataclass, field

import words
from words import LEXICON, WORDS, Split, Turn

ATTRIBUTES = [("colour", "colour"), ("price", "number"), ("owner", "name"), ("number", "number"), ("code", "number")]
ATTRIBUTES += [("size", "number"), ("maker", "name"), ("name", "name"), ("password", "word"), ("weight", "number")]
NOT_TOLD = "You have not told me that."


@dataclass(slots=True)
class Fact:
    """One fact as told: its value and statement, the questions for it, and the answer."""

    value: str
    statement: str
    questions: list[str]
    answer: str

    @property
    def thought(self) -> str:
        """How the model recalls the fact."""
        return f"The user told me this before: {self.value}."


@dataclass(slots=True)
class Memory:
    """The facts told so far in a conversation, by key; a key is told once."""

    facts: dict[str, Fact] = field(default_factory=dict)


def value(rng: random.Random, split: Split, kind: str) -> str:
    """A value of this half for the kind of fact."""
    match kind:
        case "name":
            return words.name(rng, split)
        case "city":
            return words.city(rng, split)
        case "number":
            return words.number(rng, split, 2, 6)
        case "age":
            return words.number(rng, split, 2, 2)
        case "colour":
            return rng.choice(WORDS["colours"])
        case "job":
            return rng.choice(WORDS["jobs"])
        case _:
            return rng.choice((words.invented, words.thing, words.scramble))(rng, split)


def about_user(rng: random.Random, split: Split) -> tuple[str, Fact]:
    """A fact about the user, such as a name, a city, or a code to keep."""
    fact = rng.choice(LEXICON["facts"])
    v = value(rng, split, fact["kind"])
    return fact["key"], Fact(
        v, rng.choice(fact["statements"]).format(v=v), fact["questions"], fact["answer"].format(v=v)
    )


def about_relative(rng: random.Random, split: Split) -> tuple[str, Fact]:
    """The name of somebody whom the user knows."""
    who, v = rng.choice(WORDS["relatives"]), words.name(rng, split)
    statement = rng.choice((f"My {who} is called {v}.", f"My {who}'s name is {v}.", f"The name of my {who} is {v}."))
    questions = [f"What is my {who} called?", f"What is the name of my {who}?", f"What is my {who}'s name?"]
    return who, Fact(v, statement, questions, f"Your {who} is called {v}.")


def about_thing(rng: random.Random, split: Split) -> tuple[str, Fact]:
    """An attribute of a thing."""
    (attribute, kind), thing = rng.choice(ATTRIBUTES), words.thing(rng, split)
    v, what = value(rng, split, kind), f"the {attribute} of the {thing}"
    statement = rng.choice((f"The {what[4:]} is {v}.", f"Remember: {what} is {v}."))
    return what[4:], Fact(
        v, statement, [f"What is {what}?", f"Tell me {what}.", f"What was {what}?"], f"The {what[4:]} is {v}."
    )


def draw(rng: random.Random, split: Split) -> tuple[str, Fact]:
    """A new fact and its key."""
    choice = rng.random()
    return (about_user if choice < 0.5 else about_relative if choice < 0.75 else about_thing)(rng, split)


def new_facts(rng: random.Random, split: Split, memory: Memory, count: int) -> list[Fact]:
    """Facts with keys not yet told, now in memory."""
    facts: list[Fact] = []
    while len(facts) < count:
        key, fact = draw(rng, split)
        if key not in memory.facts:
            memory.facts[key] = fact
            facts.append(fact)
    return facts


def tell(rng: random.Random, split: Split, memory: Memory) -> Turn:
    """The user tells one to three facts."""
    facts = new_facts(rng, split, memory, rng.choice((1, 1, 1, 2, 3)))
    introduced = memory.facts.get("name") is facts[0]
    answer = f"Nice to meet you, {facts[0].value}." if introduced else "I will remember that."
    return Turn(" ".join(fact.statement for fact in facts), answer, f"The user tells me: {facts[0].value}.")


def ask(rng: random.Random, split: Split, memory: Memory) -> Turn:
    """The user asks for a fact told earlier, now and then for one not told."""
    if rng.random() > 0.07 and memory.facts:
        fact = rng.choice(list(memory.facts.values()))
        return Turn(rng.choice(fact.questions), fact.answer, fact.thought)
    while True:
        key, fact = draw(rng, split)
        if key not in memory.facts:
            return Turn(rng.choice(fact.questions), NOT_TOLD, "I look for it, but the user has not told me this.")


def tell_and_ask(rng: random.Random, split: Split, memory: Memory) -> Turn:
    """Facts and a question for one of them in the same turn."""
    facts = new_facts(rng, split, memory, rng.choice((1, 1, 2, 3)))
    fact = rng.choice(facts)
    text = " ".join([*(one.statement for one in facts), rng.choice(fact.questions)])
    return Turn(text, fact.answer, fact.thought)
