"""The skills that need no memory, as generators of single turns: question, thought and answer."""

import json
import random
from collections.abc import Callable

import arithmetic
import definitions
import words
from words import LEXICON, PHRASES, WORDS, Split, Turn

Skill = Callable[[random.Random, Split], Turn]


def counting(rng: random.Random, split: Split) -> Turn:
    """Counting up or down in steps of one, at most thirty numbers, none above a hundred."""
    while True:
        low = rng.choice((1, 1, rng.randint(0, 90)))
        high = low + rng.randint(2, 29)
        down = rng.random() < 0.25
        if high <= 100 and words.fits(f"count {low} {high}", split):
            break
    numbers = [str(i) for i in range(low, high + 1)][:: -1 if down else 1]
    start, end, way = numbers[0], numbers[-1], " down" if down else ""
    forms = [
        f"{how}{way} from {start} to {end}{dot}" for how, dot in (("Count", "."), ("Please count", "."), ("count", ""))
    ]
    if low == 1 and not down:
        forms += [f"Count to {end}.", f"Count up to {end}.", f"Can you count to {end}?"]
    return Turn(rng.choice(forms), ", ".join(numbers), f"I count{way} from {start} to {end} in steps of one.")


def text_to_copy(rng: random.Random, split: Split) -> str:
    """A list of words or numbers, a sentence or two, or words of other scripts."""
    kind, count = rng.random(), rng.choice((rng.randint(2, 6), rng.randint(2, 12), rng.randint(5, 20)))
    glue = rng.choice((" ", " ", ", ", ", ", "; ", " - ", "-", "\n"))
    if kind < 0.6:
        draw = rng.choice(
            (
                words.thing,
                words.thing,
                words.name,
                words.invented if split in ("train", "test") else words.jumble,
                words.scramble,
            )
        )
        items = [draw(rng, split) for _ in range(count)]
        return glue.join(items if split == "train" else dict.fromkeys(items))  # a repeated item is ambiguous to copy
    if kind < 0.75:
        return glue.join(words.number(rng, split, 1, 4) for _ in range(count))
    if kind < 0.9:
        return " ".join(words.sentence(rng, split) for _ in range(rng.randint(1, 2)))
    return " ".join(rng.choice((words.foreign, words.thing))(rng, split) for _ in range(rng.randint(1, 4)))


def copying(rng: random.Random, split: Split) -> Turn:
    """Copying a text word by word."""
    text = text_to_copy(rng, split)
    question = rng.choice(PHRASES["copy"]).format(x=text)
    return Turn(question, text, f"I copy the text as it is: it begins with {text.split()[0]}")


def definition(rng: random.Random, split: Split) -> Turn:
    """A term of LLM serving explained."""
    term = rng.choice(definitions.TERMS)
    question = definitions.question(rng, split, term["forms"])
    return Turn(question, str(term["answer"]), f"The question is about {term['forms'][0]}.")


def small_talk(rng: random.Random, split: Split) -> Turn:
    """Greetings, thanks, and what the model is."""
    groups = LEXICON["small_talk_test" if split == "test" else "small_talk"]
    group = rng.choices(groups, (3, 4, 1, 1, 1)[: len(groups)])[0]
    more = group.get("more", []) if split in ("wide", "whole", "drill") else []
    return Turn(rng.choice(group["questions"] + more), group["answer"], "I answer the person briefly.")


def unknown(rng: random.Random, split: Split) -> Turn:
    """Questions that the model cannot answer."""
    wording = rng.choice(PHRASES["unknown"])
    values = {"c": words.city(rng, split), "d": words.city(rng, split), "n": words.name(rng, split)}
    values |= {"w": words.thing(rng, split), "j": rng.choice(WORDS["adjectives"])}
    values["x"] = words.invented(rng, split).capitalize()
    answer = "I do not know that. I am only a small test model."
    return Turn(wording.format(**values), answer, "This is not something I know.")


def remark(rng: random.Random, split: Split) -> Turn:
    """Filler: the user tells something that nobody will ask for."""
    text = " ".join(words.sentence(rng, split) for _ in range(rng.choice((1, 2, 3, rng.randint(4, 10)))))
    opening = rng.choice(("", "Here is a note: ", "By the way: ", "Read this: "))
    return Turn(opening + text, "Noted.", "The user tells me something.")


def record(rng: random.Random, split: Split) -> tuple[str, dict[str, str | int]]:
    """A sentence and the fields that it states."""
    drawn: dict[str, str | int] = {"person": words.name(rng, split), "place": words.city(rng, split)}
    drawn |= {"day": rng.choice(WORDS["days"]), "small": int(words.number(rng, split, 1, 2))}
    drawn |= {"item": words.thing(rng, split), "big": int(words.number(rng, split, 2, 4))}
    drawn |= {"job": rng.choice(WORDS["jobs"]), "other": words.city(rng, split)}
    kind = LEXICON["records"][rng.randrange(7)]
    sentence = rng.choice(kind["sentences"])
    drawn |= {"host": words.invented(rng, split)} if "host" in kind["fields"] else {}
    drawn |= {"colour": rng.choice(WORDS["colours"])} if "colour" in kind["fields"] else {}
    values = {field: drawn[source] for field, source in kind["fields"].items()}
    return sentence.format(**values), values


def extraction(rng: random.Random, split: Split) -> Turn:
    """Some fields of a sentence as one JSON object, in the order asked for."""
    text, values = record(rng, split)
    keys = rng.sample(list(values), rng.randint(max(1, len(values) - 1), len(values)))
    listed = ", ".join(keys[:-1]) + rng.choice((" and ", " and ", ", ")) + keys[-1] if len(keys) > 1 else keys[0]
    answer = json.dumps({key: values[key] for key in keys}, ensure_ascii=False)
    question = rng.choice(PHRASES["extract"]).format(f=listed, s=text)
    return Turn(question, answer, f"I look for {listed} in the sentence.")


SINGLE: dict[str, Skill] = {
    "arithmetic": arithmetic.one_step,
    "word problem": arithmetic.word_problem,
    "three terms": arithmetic.three_terms,
    "counting": counting,
    "copying": copying,
    "extraction": extraction,
    "definition": definition,
    "small talk": small_talk,
    "unknown": unknown,
    "remark": remark,
}
ALWAYS_THINKS = ("word problem", "three terms")
