"""ClientLoads: what an engine has to do for each of its clients, kept up to date by the Scheduler."""

from __future__ import annotations

from collections import Counter

from raylm.engine.sequence import Sequence, Status
from raylm.messages import OtherClients


class ClientLoads:
    """Open sequences by client, and the tokens that they owe: known ones to compute, less the one of each step.

    Of a sequence that waits the tokens are what its client expects; from its start on they are what is left. So a
    sequence that decodes owes none.
    """

    def __init__(self) -> None:
        self._tokens: Counter[str] = Counter()
        self._sequences: Counter[str] = Counter()
        self._owed: dict[int, int] = {}  # by sequence, of those that owe any

    def enter(self, seq: Sequence) -> None:
        """A sequence is open from now on, and waits."""
        client = seq.client_id
        self._sequences[client] += 1
        if (tokens := _expected(seq)) > 0:
            self._tokens[client] += tokens
            self._owed[seq.id] = tokens

    def owe(self, seq: Sequence, tokens: int) -> None:
        """So many are to be computed, 0 if fewer."""
        more = max(0, tokens) - self._owed.pop(seq.id, 0)
        self._tokens[seq.client_id] += more
        if tokens > 0:
            self._owed[seq.id] = tokens

    def leave(self, seq: Sequence) -> None:
        """A sequence has ended."""
        client = seq.client_id
        self.owe(seq, 0)
        self._sequences[client] -= 1
        if not self._sequences[client]:
            del self._sequences[client], self._tokens[client]

    def others(self, client_id: str) -> OtherClients:
        """What there is to do for all clients but one."""
        tokens, sequences = self._tokens, self._sequences
        return OtherClients(tokens.total() - tokens[client_id], sequences.total() - sequences[client_id])


def _expected(seq: Sequence) -> int:
    known = len(seq.token_ids) - 1
    if seq.status is Status.PREEMPTED:
        return known
    if seq.index > 0:
        return 0  # the first sequence of the request has computed the prompt
    expected = seq.state.request.uncached_tokens
    return known if expected is None else min(known, expected - 1)
