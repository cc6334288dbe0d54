"""The terms of LLM serving that the model explains, and the wordings of the questions."""

import random

from words import LEXICON, PHRASES, Split

TERMS: list[dict[str, list[str]]] = LEXICON["terms"]
COUNTED = {"request", "sequence", "token", "tokenizer", "block", "batch", "cache", "table", "pool", "worker", "actor"}
COUNTED |= {"replica", "sampler", "detokenizer", "model"}
PROPER = ("RayLM", "Ray", "Ray Serve")


def with_article(term: str) -> str:
    """The term as a question names it: counted nouns and class names take an article."""
    if term.split()[-1].lower().removeprefix("kv-").removeprefix("key-value-") in COUNTED:
        return f"{'an' if term[0].lower() in 'aeiou' else 'a'} {term}"
    return f"the {term}" if term[0].isupper() and term[1:2].islower() and term not in PROPER else term


def question(rng: random.Random, split: Split, forms: list[str]) -> str:
    """A question about the term in one of its forms; the test half uses wordings that training never sees."""
    form = rng.choice(forms)
    wording = rng.choice(PHRASES["define_test" if split == "test" else "define"])
    article = with_article(form)
    if split != "test" and rng.random() < 0.2:
        article = rng.choice(("a ", "an ", "the ", "")) + form
    return wording.format(t=form, a=article)
