"""Operations on the columns of messages.Logprobs: select tokens, and join parts."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

from raylm.messages import Logprobs


def select(columns: Logprobs, positions: list[int]) -> Logprobs | None:
    """Select the tokens at ``positions``. None if none of them has entries."""
    counts = [columns.counts[position] for position in positions]
    if not any(counts):
        return None
    ends = list(accumulate(columns.counts))
    spans = [slice(ends[position] - columns.counts[position], ends[position]) for position in positions]
    return Logprobs(
        counts=counts,
        token_ids=[token for span in spans for token in columns.token_ids[span]],
        logprobs=[value for span in spans for value in columns.logprobs[span]],
        ranks=[columns.ranks[position] for position in positions],
    )


def join(parts: Iterable[Logprobs]) -> Logprobs:
    """Concatenate consecutive parts."""
    whole = Logprobs([], [], [], [])
    for part in parts:
        _extend(whole, part)
    return whole


def append(held: Logprobs | None, num_held: int, fresh: Logprobs | None, num_fresh: int) -> Logprobs | None:
    """Append the columns of ``num_fresh`` tokens to those of ``num_held`` tokens. Extends the lists of ``held``.

    None stands for columns without entries.
    """
    if held is None and fresh is None:
        return None
    whole = held or Logprobs([0] * num_held, [], [], [0] * num_held)
    _extend(whole, fresh or Logprobs([0] * num_fresh, [], [], [0] * num_fresh))
    return whole


def _extend(whole: Logprobs, part: Logprobs) -> None:
    for name in Logprobs.__slots__:
        getattr(whole, name).extend(getattr(part, name))
