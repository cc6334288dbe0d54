"""Small sums, differences and products, with the written column method as the thought."""

import random

import words
from words import PHRASES, Split, Turn


def operands(rng: random.Random, split: Split) -> tuple[int, int]:
    """Two operands up to 99 whose pair belongs to this half; one-digit ones are drawn more often than their share."""
    while True:
        a, b = (rng.randint(0, rng.choice((9, 99, 99, 99))) for _ in range(2))
        if words.fits(f"{min(a, b)},{max(a, b)}", split):
            return a, b


def add_by_column(a: int, b: int) -> str:
    """The written sum, column by column from the right."""
    steps, carry = [], 0
    for i in range(max(len(str(a)), len(str(b)))):
        x, y = a // 10**i % 10, b // 10**i % 10
        total, carried = x + y + carry, f" + {carry}" if carry else ""
        carry = total // 10
        steps.append(f"{x} + {y}{carried} = {total}" + (f", write {total % 10}, carry {carry}" if total > 9 else ""))
    return "; ".join(steps) + f". So {a} + {b} = {a + b}."


def subtract_by_column(a: int, b: int) -> str:
    """The written difference, column by column from the right."""
    steps, borrow = [], 0
    for i in range(len(str(a))):
        x, y = a // 10**i % 10, b // 10**i % 10 + borrow
        borrow = int(x < y)
        x += 10 * borrow
        steps.append(f"{x} - {y} = {x - y}" + (", borrow 1" if borrow else ""))
    return "; ".join(steps) + f". So {a} - {b} = {a - b}."


def addition(rng: random.Random, split: Split) -> Turn:
    """Sums of numbers up to 99."""
    a, b = operands(rng, split)
    return Turn(rng.choice(PHRASES["sum"]).format(a=a, b=b), f"{a} + {b} = {a + b}.", add_by_column(a, b))


def subtraction(rng: random.Random, split: Split) -> Turn:
    """Differences of numbers up to 99, never negative."""
    b, a = sorted(operands(rng, split))
    while split == "drill" and a - b > 9 and rng.random() < 0.7:
        b, a = sorted(operands(rng, split))
    question = rng.choice(PHRASES["difference"]).format(a=a, b=b)
    return Turn(question, f"{a} - {b} = {a - b}.", subtract_by_column(a, b))


def multiplication(rng: random.Random, split: Split) -> Turn:
    """The table of one-digit products; its hundred facts are all known, the pair of fact and wording is held out."""
    while True:
        a, b = rng.randint(0, 9), rng.randint(0, 9)
        question = rng.choice(PHRASES["product"]).format(a=a, b=b)
        if words.fits(question, split):
            return Turn(question, f"{a} * {b} = {a * b}.", f"From the table: {a} * {b} = {a * b}.")


def one_step(rng: random.Random, split: Split) -> Turn:
    """One of the three operations."""
    return rng.choices((addition, subtraction, multiplication), (5, 4, 2))[0](rng, split)


def word_problem(rng: random.Random, split: Split) -> Turn:
    """A sum or a difference told as a story."""
    b, a = sorted(operands(rng, split))
    thing, more = rng.choice(words.WORDS["objects"]), rng.random() < 0.5
    story = rng.choice(PHRASES["story_more" if more else "story_less"])
    thought = f"More means plus: {add_by_column(a, b)}" if more else f"Less means minus: {subtract_by_column(a, b)}"
    question = story.format(n=words.name(rng, split), a=a, b=b, o=thing)
    return Turn(question, f"{a + b if more else a - b} {thing}s.", thought)


def three_terms(rng: random.Random, split: Split) -> Turn:
    """A sum of three numbers up to 99."""
    (a, b), c = operands(rng, split), rng.randint(0, 99)
    question = rng.choice(("What is {x}?", "{x}", "Calculate {x}.", "How much is {x}?")).format(x=f"{a} + {b} + {c}")
    return Turn(question, f"{a} + {b} + {c} = {a + b + c}.", f"{add_by_column(a, b)} {add_by_column(a + b, c)}")
