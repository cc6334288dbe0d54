"""Reasoning parsers separate reasoning from answers, however the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raylm.frontend.answers.reasoning_parsers import (
    REASONING_PARSERS,
    ReasoningParser,
    ReasoningTokenCounter,
    detect_reasoning_parser,
)
from raylm.messages import ReasoningTokenIds
from tests.frontend.pieces import cut


def read(name: str, pieces: list[str], *, thinking: bool) -> tuple[str, str]:
    parser = ReasoningParser(REASONING_PARSERS[name], thinking=thinking)
    found = [*(parser.push(piece) for piece in pieces), parser.flush()]
    return "".join(thoughts for thoughts, _ in found), "".join(answer for _, answer in found)


CASES = [
    ("<think>\nI see.\n</think>\n\nYes.", False, ("I see.", "Yes.")),
    ("\nI see.\n</think>\n\nYes.", True, ("I see.", "Yes.")),
    ("\n</think>\n\nYes.", True, ("", "Yes.")),
    ("<think></think>Yes.\n", False, ("", "Yes.\n")),
    ("Yes, <think>no</think>", False, ("", "Yes, <think>no</think>")),
    ("  Yes.", False, ("", "  Yes.")),
    ("<", False, ("", "<")),
    ("I think < and [", True, ("I think < and [", "")),
    ("a </think> b </think> c", True, ("a", "b </think> c")),
    ("", True, ("", "")),
    (" \n", False, ("", " \n")),
]


@pytest.mark.parametrize("name", REASONING_PARSERS)
@pytest.mark.parametrize(("text", "thinking", "wanted"), CASES)
def test_thoughts_and_answer(name: str, text: str, thinking: bool, wanted: tuple[str, str]) -> None:
    parser = REASONING_PARSERS[name]
    text, *wanted_ = (t.replace("<think>", parser.start).replace("</think>", parser.end) for t in (text, *wanted))
    for pieces in ([text], list(text), cut(text, 5)):
        assert read(name, pieces, thinking=thinking) == tuple(wanted_)


@given(
    text=st.lists(st.sampled_from(["<think>", "</think>", "<", "/", "think", ">", " ", "\n", "a"])), seed=st.integers()
)
@settings(max_examples=200, deadline=None)
def test_the_cuts_do_not_matter(text: list[str], seed: int) -> None:
    for thinking in (False, True):
        whole = read("think", ["".join(text)], thinking=thinking)
        assert read("think", cut("".join(text), seed), thinking=thinking) == whole


def test_thoughts_come_as_they_are_thought() -> None:
    parser = ReasoningParser(REASONING_PARSERS["think"], thinking=True)
    assert parser.push("one two ") == ("one two", "")
    assert parser.push("three") == (" three", "")


@pytest.mark.parametrize("sizes", [1, 2, 100])
def test_tokens_of_thoughts_are_counted_without_their_markers_and_with_them(sizes: int) -> None:
    def count(token_ids: list[int], *, begun: bool) -> tuple[int, int]:
        counter = ReasoningTokenCounter(ReasoningTokenIds(3, 4, (4,), begun=begun))
        counts = [counter.count(token_ids[at : at + sizes]) for at in range(0, len(token_ids), sizes)]
        return sum(bare for bare, _ in counts), sum(marked for _, marked in counts)

    assert count([3, 9, 9, 9, 4, 9, 3, 9], begun=False) == (3, 5)
    assert count([9, 3, 9, 9, 4, 9], begun=False) == (0, 0)
    assert count([9, 9, 4, 9, 9], begun=True) == (2, 3)
    assert count([9, 9, 9], begun=True) == (3, 3)
    assert count([4, 9, 9], begun=True) == (0, 1)


def test_parsers_are_told_by_templates() -> None:
    assert detect_reasoning_parser("{{ '<think>' }}{{ '</think>' }}") == "think"
    assert detect_reasoning_parser("[THINK][/THINK]") == "mistral"
    assert detect_reasoning_parser("<seed:think></seed:think>") == "seed_oss"
    assert detect_reasoning_parser("{{ messages }}") is None
