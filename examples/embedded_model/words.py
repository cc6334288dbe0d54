"""Words, names and numbers for the generated conversations, each in the train or the test half by a hash."""

import random
import string
import tomllib
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

# "wide" and "whole" are the train half again, with far fewer of the known words. In "whole", the names of tools and of
# arguments differ from those of the test half as wholes, but may share words with them; "drill" is that
# with more of what is hard.
Split = Literal["train", "wide", "whole", "drill", "test"]

LEXICON: dict[str, Any] = tomllib.loads((Path(__file__).parent / "lexicon.toml").read_text(encoding="utf-8"))
WORDS: dict[str, list[str]] = {kind: text.split() for kind, text in LEXICON["words"].items()}
PHRASES: dict[str, list[str]] = LEXICON["phrases"]

_ONSETS = ["b", "br", "c", "ch", "d", "dr", "f", "fl", "g", "gr", "h", "j", "k", "kl", "l", "m", "n", "p", "pr", "r"]
_ONSETS += ["s", "sh", "sl", "st", "t", "th", "tr", "v", "w", "y", "z"]
_VOWELS = [*"aeiouaei", "o", "ai", "ea", "oo", "ou"]
_CODAS = ["", "", "", *"bdgklmnprstx", "nd", "rk", "st", "ll", "ck"]
HELD_OUT_IN = 8
LETTERS_AND_DIGITS = string.ascii_letters + string.digits
FOREIGN = [(0xC0, 0x17F), (0x391, 0x3C9), (0x410, 0x44F), (0x5D0, 0x5EA), (0x3041, 0x3096), (0x4E00, 0x9FA5)]
FOREIGN += [(0x1F600, 0x1F64F)]


@dataclass(frozen=True, slots=True)
class Turn:
    """One exchange; `role` is "tool" where the user text is the result of a tool call."""

    user: str
    answer: str
    thought: str
    role: str = "user"


def is_test(key: str) -> bool:
    """Whether `key` (a name, a number, an operand pair, a phrase) belongs to the test half: one in eight does."""
    return zlib.crc32(f"embedded:{key}".encode()) % HELD_OUT_IN == 0


def fits(key: str, split: Split) -> bool:
    """Whether `key` may be used in this half."""
    return is_test(key) == (split == "test")


def pick(rng: random.Random, pool: list[str], split: Split) -> str:
    """A member of `pool` that belongs to this half."""
    while True:
        value = rng.choice(pool)
        if fits(value, split):
            return value


def syllables(rng: random.Random, count: int) -> str:
    """An invented word of `count` syllables, in small letters."""
    return "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(count))


def invented(rng: random.Random, split: Split) -> str:
    """An invented word of one to three syllables of this half."""
    while True:
        word = syllables(rng, rng.choice((1, 2, 2, 3)))
        if len(word) > 2 and fits(word, split):
            return word


def jumble(rng: random.Random, split: Split) -> str:
    """Three to nine random letters, which are cut into rare tokens."""
    while True:
        word = "".join(rng.choice(string.ascii_lowercase) for _ in range(rng.randint(3, 9)))
        if fits(word, split):
            return word


def proper(rng: random.Random, split: Split, known: list[str]) -> str:
    """A capitalised name: half of them from `known`, half invented; in the wide half mostly anything else."""
    if split in ("wide", "whole", "drill") and rng.random() < 0.6:
        other = rng.choice((jumble(rng, split), pick(rng, WORDS["common"], split), invented(rng, split)))
        return other.capitalize()
    return pick(rng, known, split) if rng.random() < 0.5 else invented(rng, split).capitalize()


def name(rng: random.Random, split: Split) -> str:
    """A person's name: half of them known ones, half invented."""
    return proper(rng, split, WORDS["names"])


def city(rng: random.Random, split: Split) -> str:
    """A city's name: half of them known ones, half invented."""
    return proper(rng, split, WORDS["cities"])


def thing(rng: random.Random, split: Split) -> str:
    """A word for a thing: mostly a known one, sometimes an invented one."""
    kind = rng.random()
    if kind < 0.65:
        return rng.choice(WORDS["objects" if kind < 0.45 else "common"])
    return invented(rng, split)


def scramble(rng: random.Random, split: Split) -> str:
    """A password-like string of two to eight letters and digits, some with a mark and a word or number behind it."""
    while True:
        text = "".join(rng.choice(LETTERS_AND_DIGITS) for _ in range(rng.randint(2, 8)))
        if rng.random() < 0.4:
            text += rng.choice("-_.@/:#") + rng.choice((rng.choice(WORDS["objects"]), str(rng.randint(0, 999))))
        if fits(text, split):
            return text


def foreign(rng: random.Random, split: Split) -> str:
    """A word of one to five characters of another script, which takes several tokens a character."""
    while True:
        low, high = rng.choice(FOREIGN)
        text = "".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 5)))
        if fits(text, split):
            return text


def number(rng: random.Random, split: Split, low: int = 2, high: int = 6) -> str:
    """A number of `low` to `high` digits without a leading zero; those of one digit belong to both halves."""
    while True:
        digits = rng.randint(low, high)
        value = str(rng.randint(10 ** (digits - 1), 10**digits - 1))
        if fits(value, split) or digits == 1:
            return value


def sentence(rng: random.Random, split: Split) -> str:
    """A plain sentence about things and people; carries no fact that a later question asks for."""
    adjectives = WORDS["adjectives"]
    subject = f"The {rng.choice(adjectives)} {thing(rng, split)}" if rng.random() < 0.6 else name(rng, split)
    verb, adjective = rng.choice(WORDS["verbs"]), rng.choice(adjectives)
    return f"{subject} {verb} the {adjective} {thing(rng, split)} {rng.choice(PHRASES['places'])}."
