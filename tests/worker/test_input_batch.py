"""InputBatch: its columns, compared with plain lists, in random sequences of calls."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raylm.errors import InvalidRequestError
from raylm.messages import NewSequence, ReasoningTokenIds
from raylm.params import SamplingParams
from raylm.worker.input_batch import NO_LOGPROBS, InputBatch

ROWS, LENGTH, BLOCK, VOCAB = 5, 24, 4, 50


def new_sequence(seq_id: int, tokens: list[int], blocks: list[int], **fields: object) -> NewSequence:
    return NewSequence(seq_id, tokens, 1, blocks, SamplingParams(**fields), seed=seq_id)  # type: ignore[arg-type]


class Model:
    """The same data as lists."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.blocks: dict[int, list[int]] = {}

    def check(self, batch: InputBatch) -> None:
        ids = list(self.tokens)
        rows = batch.rows(ids)
        assert len(set(rows.tolist())) == len(ids) == len(batch._row_of)
        for seq_id, row in zip(ids, rows.tolist(), strict=True):
            assert batch.token_ids[row, : batch.num_tokens[row]].tolist() == self.tokens[seq_id]
            assert batch.block_tables[row, : batch.num_blocks[row]].tolist() == self.blocks[seq_id]
            assert batch.num_prompt_tokens[row] == 1
            assert batch.sampling[row]["seed"] == seq_id


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_columns_follow_random_lives(data: st.DataObject) -> None:
    batch, model, next_id, next_block = InputBatch(ROWS, LENGTH, BLOCK, VOCAB), Model(), 0, 0
    for _ in range(data.draw(st.integers(1, 12))):
        for seq_id in data.draw(
            st.lists(st.sampled_from(sorted(model.tokens)), unique=True) if model.tokens else st.just([])
        ):
            batch.remove(seq_id)
            del model.tokens[seq_id], model.blocks[seq_id]
        for _ in range(data.draw(st.integers(0, ROWS - len(model.tokens)))):
            tokens = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8))
            model.tokens[next_id], model.blocks[next_id] = list(tokens), [next_block]
            fields = data.draw(st.sampled_from([{}, {"presence_penalty": 1.0}, {"min_tokens": 3}]))
            batch.add(new_sequence(next_id, tokens, [next_block], **fields))
            next_id, next_block = next_id + 1, next_block + 1
        chosen = data.draw(st.permutations(sorted(model.tokens)))
        chosen = [s for s in chosen if len(model.blocks[s]) < 4 and len(model.tokens[s]) < LENGTH]
        counts = [data.draw(st.integers(0, 2)) for _ in chosen]
        added = list(range(next_block, next_block + sum(counts)))
        next_block += len(added)
        rows = batch.rows(chosen)
        batch.append_blocks(rows, counts, added)
        drawn = np.array([data.draw(st.integers(0, VOCAB - 1)) for _ in chosen], np.int64)
        batch.append_tokens(rows, drawn)
        for seq_id, count, token in zip(chosen, counts, drawn.tolist(), strict=True):
            model.blocks[seq_id] += [added.pop(0) for _ in range(count)]
            model.tokens[seq_id].append(token)
        model.check(batch)


def test_sampling_columns_hold_resolved_parameters() -> None:
    batch = InputBatch(ROWS, LENGTH, BLOCK, VOCAB)
    plain = batch.add(new_sequence(1, [1], [0]))
    off = batch.add(new_sequence(2, [1], [0], top_k=0, logprobs=0))
    rich = batch.add(new_sequence(3, [1], [0], temperature=0.5, top_p=0.9, min_p=0.1, top_k=7, logprobs=4))
    assert batch.sampling[plain].item() == (1.0, 1.0, 0.0, VOCAB, 1, NO_LOGPROBS)
    assert batch.sampling[off].item() == (1.0, 1.0, 0.0, VOCAB, 2, 0)
    assert batch.sampling[rich].item() == (0.5, 0.9, 0.1, 7, 3, 4)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": (3, VOCAB)}, "allowed_token_ids"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused_and_leave_no_trace(fields: dict[str, object], param: str) -> None:
    batch = InputBatch(1, LENGTH, BLOCK, VOCAB)
    with pytest.raises(InvalidRequestError, match=param) as caught:
        batch.add(new_sequence(1, [1], [0], presence_penalty=1.0, **fields))
    assert caught.value.param == param
    assert 1 not in batch._row_of
    assert not any(processor.states for processor in batch.processors)
    batch.add(new_sequence(2, [1], [0]))


def test_misuse_is_named() -> None:
    batch = InputBatch(2, LENGTH, BLOCK, VOCAB)
    batch.add(new_sequence(1, [1], [0]))
    with pytest.raises(RuntimeError, match="1 has a row"):
        batch.add(new_sequence(1, [1], [0]))
    with pytest.raises(RuntimeError, match="25 tokens"):
        batch.add(new_sequence(2, [1] * 25, [0]))
    batch.add(new_sequence(2, [1] * 24, list(range(6))))
    with pytest.raises(RuntimeError, match="2 rows are taken"):
        batch.add(new_sequence(3, [1], [0]))
    with pytest.raises(KeyError):
        batch.remove(3)
    with pytest.raises(KeyError):
        batch.rows([1, 3])


def test_a_freed_row_forgets_what_its_sequence_asked() -> None:
    batch = InputBatch(1, LENGTH, BLOCK, VOCAB)
    rare = {"presence_penalty": 1.0, "logit_bias": {1: 1.0}, "allowed_token_ids": (1, 2), "min_tokens": 2}
    params = SamplingParams(**rare, thinking_token_budget=3)  # type: ignore[arg-type]
    more = {"bad_words_token_ids": ((3,),), "thinking": ReasoningTokenIds(4, 5, (5,), begun=True)}
    row = batch.add(NewSequence(1, [1], 1, [0], params, 0, stop_token_ids=(2,), **more))  # type: ignore[arg-type]
    assert all(processor.owned(np.array([row])).tolist() == [0] for processor in batch.processors)
    batch.remove(1)
    assert batch.add(new_sequence(2, [1], [0])) == row
    assert all(processor.owned(np.array([row])).size == 0 for processor in batch.processors)
