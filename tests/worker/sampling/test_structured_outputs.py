"""StructuredOutputs with thinking budgets: masks, compared with brute force over a small language, and rows."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from raylm.checkpoint import EMBEDDED
from raylm.grammar import grammar_of
from raylm.messages import NewSequence, ReasoningTokenIds
from raylm.params import SamplingParams
from raylm.params import StructuredOutputs as Spec
from raylm.worker.input_batch import InputBatch
from raylm.worker.sampling.grammars import AnswerMatcher, Grammars
from raylm.worker.sampling.sampler import Sampler, process_logits

VOCAB, EOS = 6142, (2, 0)
WORDS = ("yes", "yesterday", "no", "a b", "a bc", '"q"', "é")
TOKENIZER = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
TEXTS = [TOKENIZER.decode([token], skip_special_tokens=False) for token in range(VOCAB)]
THINKING = ReasoningTokenIds(3, 4, (*TOKENIZER.encode("\n</think>\n\n").ids,), begun=False)


@cache
def grammars() -> Grammars:
    return Grammars(EMBEDDED, EOS, VOCAB)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps wait for every mask. test_late_masks.py tests steps that do not wait."""
    for name in ("QUICK_MASKS_S", "WAIT_S", "LONE_WAIT_S"):
        monkeypatch.setattr(f"raylm.worker.sampling.grammars.{name}", 60.0)


def new_batch(rows: int = 4) -> InputBatch:
    return InputBatch(rows, 128, 16, VOCAB, grammars())


def sequence(
    seq_id: int,
    spec: Spec | None,
    generated: list[int] | None = None,
    thinking: ReasoningTokenIds | None = None,
    **params: Any,
) -> NewSequence:
    grammar = grammar_of(spec) if spec else None
    tokens = [9, 10, *(generated or ())]
    sampling = SamplingParams(**params)
    return NewSequence(seq_id, tokens, 2, [0], sampling, seq_id, stop_token_ids=EOS, grammar=grammar, thinking=thinking)


def allowed(batch: InputBatch, *ids: int) -> list[set[int]]:
    """The tokens that each sequence may draw next."""
    rows = batch.rows(ids)
    step = process_logits(torch.zeros(len(ids), VOCAB), rows, batch, np.zeros(len(ids), np.bool_))
    return [set(np.flatnonzero(np.isfinite(row)).tolist()) for row in step.processed.logits.numpy()]


def push(batch: InputBatch, seq_id: int, token: int) -> None:
    batch.append_tokens(batch.rows([seq_id]), np.array([token]))


def test_a_mask_allows_exactly_what_leads_to_a_word() -> None:
    """Walk every path that the masks allow: exactly the words are reached, and EOS ends only words."""
    begun: list[list[int]] = [[]]
    ended = set()
    while begun:
        tokens = begun.pop()
        batch = new_batch(1)
        batch.add(sequence(0, Spec(choice=WORDS), tokens))
        (found,) = allowed(batch, 0)
        text = TOKENIZER.decode(tokens)
        assert bool(found & set(EOS)) == (text in WORDS)
        for token in found - set(EOS):
            longer = TOKENIZER.decode([*tokens, token])
            assert any(word.startswith(longer.removesuffix("\ufffd")) for word in WORDS)
            begun.append([*tokens, token])
        if text in WORDS:
            ended.add(text)
        assert found
    assert ended == set(WORDS)


@pytest.mark.parametrize("text", WORDS)
def test_a_word_as_it_is_tokenized_is_let_through(text: str) -> None:
    batch = new_batch(1)
    batch.add(sequence(0, Spec(choice=WORDS)))
    for token in TOKENIZER.encode(text).ids:
        assert token in allowed(batch, 0)[0]
        push(batch, 0, token)
    assert EOS[0] in allowed(batch, 0)[0]


def test_a_regular_expression_against_brute_force_over_the_vocabulary() -> None:
    """For [0-9]+x, a token may be digits, digits and an x, or an x after digits."""
    batch = new_batch(1)
    batch.add(sequence(0, Spec(regex="[0-9]+x")))
    digits = {token for token, text in enumerate(TEXTS) if text.isascii() and text.isdecimal()}
    ends = {token for token, text in enumerate(TEXTS) if text[:-1].isdecimal() and text[-1:] == "x"}
    assert allowed(batch, 0) == [digits | ends]
    push(batch, 0, min(digits))
    assert allowed(batch, 0) == [digits | ends | {TEXTS.index("x")}]


def test_other_rows_are_free_and_raw_logits_are_kept() -> None:
    batch = new_batch()
    batch.add(sequence(0, None))
    batch.add(sequence(1, Spec(choice=("yes",)), logprobs=2))
    batch.add(sequence(2, Spec(regex="[ab]+")))
    free, yes, ab = allowed(batch, 0, 1, 2)
    assert len(free) == VOCAB
    assert yes == {TOKENIZER.token_to_id("yes")}
    assert ab == {token for token, text in enumerate(TEXTS) if text and set(text) <= {"a", "b"}}
    drawn = Sampler().sample(torch.randn(3, VOCAB), batch.rows([0, 1, 2]), batch)
    assert drawn.logprobs is not None
    assert drawn.logprobs.counts == [0, 3, 0]
    assert drawn.token_ids[1] == TOKENIZER.token_to_id("yes")
    assert min(drawn.logprobs.logprobs) < -3  # in the raw distribution "yes" is one of thousands


def test_a_row_that_comes_back_goes_on_where_it_was() -> None:
    """Preemption removes and adds a row. Copies of one grammar are independent."""
    spec = Spec(json={"type": "object", "properties": {"a": {"enum": ["x", "yy"]}}, "required": ["a"]})
    tokens = TOKENIZER.encode('{"a":"yy"').ids
    batch = new_batch()
    for seq_id in (0, 1):
        batch.add(sequence(seq_id, spec))
    for token in tokens[:3]:
        push(batch, 0, token)
    before = allowed(batch, 0, 1)
    batch.remove(0)
    batch.add(sequence(5, spec, tokens[:3]))
    assert allowed(batch, 5, 1) == before
    batch.remove(1)
    assert allowed(batch, 5) == before[:1]
    for token in tokens[3:]:
        push(batch, 5, token)
    batch.add(sequence(6, spec, tokens))
    first, second = allowed(batch, 5, 6)
    assert first == second


def test_the_end_is_forced_and_more_tokens_change_nothing() -> None:
    batch = new_batch()
    batch.add(sequence(0, Spec(choice=("yes",)), min_tokens=4))
    push(batch, 0, TOKENIZER.token_to_id("yes"))
    for _ in range(5):  # only EOS is left, although min_tokens forbids it; a step in flight draws after the end
        assert allowed(batch, 0) == [{EOS[0]}]
        push(batch, 0, EOS[0])


def test_a_sequence_is_not_ended_before_min_tokens_if_it_can_go_on() -> None:
    batch = new_batch()
    batch.add(sequence(0, Spec(regex="a+"), min_tokens=3))
    push(batch, 0, TOKENIZER.token_to_id("a"))
    assert not allowed(batch, 0)[0] & set(EOS)
    push(batch, 0, TOKENIZER.token_to_id("a"))
    push(batch, 0, TOKENIZER.token_to_id("a"))
    assert EOS[0] in allowed(batch, 0)[0]


def test_nothing_left_fails_the_row_alone(caplog: pytest.LogCaptureFixture) -> None:
    """The row's next mask is computed after a token that the mask forbids. Clients could fill the log with that."""
    batch = new_batch()
    batch.add(sequence(0, Spec(choice=("yes",)), allowed_token_ids=(50, 51)))
    batch.add(sequence(1, Spec(choice=("yes",))))
    drawn = Sampler().sample(torch.randn(2, VOCAB), batch.rows([0, 1]), batch)
    assert [position for position, _ in drawn.failed] == [0]
    assert "form of the answer" in drawn.failed[0][1]
    batch.append_tokens(batch.rows([0]), drawn.token_ids[:1])
    assert Sampler().sample(torch.randn(1, VOCAB), batch.rows([0]), batch).failed
    assert not caplog.records


def test_a_grammar_too_complex_to_follow_fails_the_row_with_its_reason() -> None:
    batch = new_batch()
    batch.add(sequence(0, Spec(regex="((a{1,100}){1,100}){1,100}")))
    batch.add(sequence(1, None))
    for _ in range(200):
        drawn = Sampler().sample(torch.zeros(2, VOCAB), batch.rows([0, 1]), batch)
        if drawn.failed:
            break
        push(batch, 0, TOKENIZER.token_to_id("a"))
    assert drawn.failed == [(0, "the form asked of the answer became too complex to follow")]


class Panic(BaseException):
    """Like llguidance's panics, which are not Exceptions."""


def panic(*_: object) -> Any:
    raise Panic("index out of bounds")


@pytest.mark.parametrize("prepared", [True, False])
@pytest.mark.parametrize("slow", [True, False])
def test_a_panic_fails_the_row_alone(monkeypatch: pytest.MonkeyPatch, slow: bool, prepared: bool) -> None:
    made, yes = Grammars(EMBEDDED, EOS, VOCAB), TOKENIZER.token_to_id("yes")
    monkeypatch.setattr("raylm.worker.sampling.grammars.SLOW_S", -1.0 if slow else 1.0)
    batch = InputBatch(4, 128, 16, VOCAB, made)
    if prepared:
        batch.prepare_grammar(grammar_of(Spec(regex="(yes)+")))
    for seq_id in (0, 1):
        batch.add(sequence(seq_id, Spec(regex="(yes)+")))
    assert yes in allowed(batch, 0)[0]
    monkeypatch.setattr(state(batch, 0), "_step", panic)
    for _ in range(3):
        batch.append_tokens(batch.rows([0, 1]), np.array([yes, yes]))
        drawn = Sampler().sample(torch.zeros(2, VOCAB), batch.rows([0, 1]), batch)
        assert drawn.failed == [(0, "the form asked of the answer became too complex to follow")]


def state(batch: InputBatch, seq_id: int) -> AnswerMatcher:
    answer: AnswerMatcher = batch.processors[-1].states[batch.rows([seq_id])[0]].answer
    return answer


def test_a_grammar_that_does_not_compile_fails_the_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Grammars(EMBEDDED, EOS, VOCAB)
    monkeypatch.setattr(made, "_compile", panic)
    batch = InputBatch(4, 128, 16, VOCAB, made)
    batch.prepare_grammar(grammar_of(Spec(regex="a")))
    batch.add(sequence(0, Spec(regex="a")))
    batch.add(sequence(1, None))
    drawn = Sampler().sample(torch.randn(2, VOCAB), batch.rows([0, 1]), batch)
    assert [position for position, _ in drawn.failed] == [0]


def test_a_prepared_grammar_waits_for_no_other_one() -> None:
    """New and preempted rows start while the compiling thread is busy."""
    made, a = Grammars(EMBEDDED, EOS, VOCAB), TOKENIZER.token_to_id("a")
    batch, over = InputBatch(4, 128, 16, VOCAB, made), threading.Event()
    batch.prepare_grammar(grammar_of(Spec(regex="[ab]+c")))
    made._compiling.submit(over.wait)
    try:
        batch.add(sequence(0, Spec(regex="[ab]+c")))
        batch.add(sequence(1, Spec(regex="[ab]+c"), [a]))
        new, preempted = allowed(batch, 0, 1)
    finally:
        over.set()
    assert a in new
    assert TOKENIZER.token_to_id("c") not in new
    assert TOKENIZER.token_to_id("c") in preempted


def test_slow_masks_are_computed_beside_the_step_and_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = Spec(json={"type": "array", "items": {"enum": ["x", "yy", 3]}, "minItems": 1})
    tokens = TOKENIZER.encode('["x",3,"yy"]').ids
    followed = []
    for slow_s in (1.0, -1.0):
        monkeypatch.setattr("raylm.worker.sampling.grammars.SLOW_S", slow_s)
        batch = InputBatch(4, 128, 16, VOCAB, Grammars(EMBEDDED, EOS, VOCAB))
        batch.add(sequence(0, spec))
        masks = [allowed(batch, 0)[0]]
        for token in tokens:
            push(batch, 0, token)
            assert (state(batch, 0).coming is not None) == (slow_s < 0)
            masks.append(allowed(batch, 0)[0])
        followed.append(masks)
    assert followed[0] == followed[1]


def test_which_rows_may_be_drawn_ahead() -> None:
    batch = new_batch(5)
    for seq_id, params in enumerate(({}, {"repetition_penalty": 1.5}, {"thinking_token_budget": 5})):
        batch.add(sequence(seq_id, Spec(regex="a+"), thinking=THINKING if seq_id == 2 else None, **params))
    batch.add(sequence(3, None, repetition_penalty=1.5))
    batch.add(sequence(4, Spec(regex="b+")))
    batch.structured.states[4].answer.pace.slow = True  # type: ignore[union-attr]
    for answer in (state(batch, 0), state(batch, 1)):
        answer.settle()
    assert batch.may_be_drawn_ahead(batch.rows(range(5))).tolist() == [True, False, False, False, False]


@pytest.mark.parametrize(
    "spec", [Spec(json={"type": "array", "items": {"enum": ["x", "yy", 3]}, "minItems": 1}), Spec(choice=WORDS)]
)
def test_masks_behind_drafts_are_those_of_single_steps(spec: Spec) -> None:
    """Also if the last draft ends the form. Rejected drafts have no effect on later masks."""
    words = '["x",3,"yy"]' if spec.json else "yesterday"
    tokens = TOKENIZER.encode(words).ids
    single, ahead = new_batch(1), new_batch(1)
    for batch in (single, ahead):
        batch.add(sequence(0, spec))
        state(batch, 0).settle()
    at = 0
    for count in (0, 1, 3, 2, len(tokens)):
        drafts = tokens[at : at + count]
        ahead.token_ids[0, 2 + at : 2 + at + len(drafts)] = drafts
        assert ahead.structured.num_fitting(0, [*drafts, 5000]) == len(drafts)
        rows = np.zeros(len(drafts) + 1, np.int64)
        step = process_logits(torch.zeros(len(rows), VOCAB), rows, ahead, np.zeros(len(rows), np.bool_))
        behind = [set(np.flatnonzero(np.isfinite(row)).tolist()) for row in step.processed.logits.numpy()]
        accepted = drafts[: max(1, count - 1)]
        for token in accepted:
            assert allowed(single, 0) == [behind.pop(0)]
            push(single, 0, token)
            push(ahead, 0, token)
        at += len(accepted)
        assert allowed(single, 0) == [behind[0]]


def test_what_alone_may_come_is_told() -> None:
    batch = new_batch(1)
    batch.add(
        sequence(0, Spec(json={"type": "object", "properties": {"name": {"const": "Ada"}}, "required": ["name"]}))
    )
    assert TOKENIZER.decode(batch.structured.forced(0)) == '{"name":"Ada'
    one = new_batch(1)
    one.add(sequence(0, Spec(regex="[ab]+")))
    assert one.structured.forced(0) == []


def walk(batch: InputBatch, wish: list[int]) -> list[int]:
    """Draw the wished tokens if they are allowed, otherwise the smallest allowed token."""
    drawn = []
    for token in wish:
        (found,) = allowed(batch, 0)
        drawn.append(token if token in found else min(found))
        push(batch, 0, drawn[-1])
    return drawn


def test_thoughts_are_free_and_the_answer_has_its_form() -> None:
    batch = new_batch(1)
    batch.add(sequence(0, Spec(choice=("a", "b")), thinking=THINKING))
    a, b = TOKENIZER.token_to_id("a"), TOKENIZER.token_to_id("b")
    assert allowed(batch, 0) == [{3, a, b}]
    tail = THINKING.closing_token_ids[THINKING.closing_token_ids.index(4) + 1 :]
    push(batch, 0, 3)
    assert allowed(batch, 0) == [set(range(VOCAB)) - set(EOS)]
    assert walk(batch, [700, 4, 700, 700, EOS[0]]) == [700, 4, *tail, min(a, b), EOS[0]]
    again = new_batch(1)
    again.add(sequence(0, Spec(choice=("a", "b")), [3, 700, 4, *tail], thinking=THINKING))
    assert allowed(again, 0) == [{a, b}]


def test_an_answer_without_thoughts() -> None:
    batch = new_batch(1)
    batch.add(sequence(0, Spec(choice=("a", "b")), thinking=THINKING, thinking_token_budget=5))
    push(batch, 0, TOKENIZER.token_to_id("a"))
    assert allowed(batch, 0) == [{EOS[0]}]
    push(batch, 0, EOS[0])


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("budget", [0, 1, 2, 7])
@pytest.mark.parametrize("cut", [None, 0, 3, 6])
def test_a_budget_ends_thoughts(begun: bool, budget: int, cut: int | None) -> None:
    """Also after a preemption, reasoning ends at the budget with the closing tokens, and later tokens are free."""
    thinking = ReasoningTokenIds(3, 4, THINKING.closing_token_ids, begun=begun)
    wish = [*([] if begun else [3]), *[700] * 20]
    batch = new_batch(1)
    batch.add(sequence(0, None, thinking=thinking, thinking_token_budget=budget))
    drawn = walk(batch, wish[:cut]) if cut is not None else []
    if cut is not None:
        batch.remove(0)
        batch.add(sequence(0, None, drawn, thinking=thinking, thinking_token_budget=budget))
    drawn += walk(batch, wish[len(drawn) :])
    thoughts = drawn[0 if begun else 1 : drawn.index(4)]
    assert len(thoughts) == budget
    closing = list(THINKING.closing_token_ids)
    end = closing.index(4)
    kept = min(end, budget)
    assert thoughts == [700] * (budget - kept) + closing[end - kept : end]
    after = drawn[drawn.index(4) + 1 :]
    assert after[: len(closing) - end - 1] == closing[end + 1 :]
    assert set(after[len(closing) - end - 1 :]) == {700}
    assert not any(processor.states for processor in batch.processors)
