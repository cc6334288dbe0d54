"""FairQueue: tenants share an engine in proportion to their weights, measured in served tokens."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from itertools import islice

from sortedcontainers import SortedList

from raylm.engine.queues.base import Forecast, Rank, WaitingQueue
from raylm.engine.sequence import Sequence

PROMPT_WEIGHT = 1.0  # cost of a computed prompt token
DRAWN_WEIGHT = 2.0  # cost of a drawn token: each takes a row of a step
MOST_PASSED = 64  # sequences that may overtake a waiting one because they fit or have a longer cached prefix
_LOOK_AHEAD = 16  # sequences searched for one that fits
_PREFIXES = 64  # sequences searched for a longer cached prefix
PATIENCE_S = 10.0  # a request without a target for its first token is ordered as if its target were this
RECENT_S = 60.0  # a tenant stays a guest for this long after its queue became empty
GUEST_S = 1.0  # a tenant stays a guest for this long after it begins to wait; a longer backlog makes it a regular
_YIELDING = 1.5  # a tenant whose running sequences exceed its share this many times lets other prompts go first
KEPT_SHARE = 16  # one of this many places is kept for guests
_MOST_LATE = 32  # most late requests moved back in one step


class Tenant:
    """The sequences of one API key, and the service that it received.

    ``served`` counts weighted tokens divided by the weight of the key. ``line`` holds the waiting sequences.
    ``running`` holds the running sequences.
    """

    __slots__ = ("line", "running", "served", "weight")

    def __init__(self) -> None:
        self.line = SortedList()
        self.served = 0.0
        self.weight = 1.0
        self.running: dict[Sequence, None] = {}

    def charge(self, seq: Sequence) -> None:
        """Add the tokens of a sequence that were computed or drawn since the last call to ``served``."""
        charged, prompt = seq.num_charged, seq.num_prompt_tokens
        known = len(seq.token_ids)
        served = known if known > prompt else min(seq.num_computed, prompt)
        if served > charged:
            of_prompt = max(0, min(served, prompt) - charged)
            drawn = served - charged - of_prompt
            self.served += (PROMPT_WEIGHT * of_prompt + DRAWN_WEIGHT * drawn) / self.weight
            seq.num_charged = served

    def settle(self) -> None:
        for seq in self.running:
            self.charge(seq)


class FairQueue(WaitingQueue):
    """Serves the tenant with the least service first; with one tenant, first come, first served.

    Source: VTC (Sheng et al., OSDI 2024), but a prompt is charged for its computed tokens only. A token is charged
    once, also if its sequence is preempted and computes it again. A tenant that begins to wait is lifted to the least
    service of the waiting tenants, so no tenant can save up service. Among the first sequences of a tenant, the one
    with the longest cached prefix starts if other tenants wait too (DLPM, 2025). If the best sequence does not fit,
    later sequences may start instead, provided that their tenants were served at most ``quantum`` tokens more. After
    MOST_PASSED sequences have overtaken a sequence, all others wait until it fits.

    Guests are tenants that come and go. The last ``kept`` places of the batch are reserved for them: while there is a
    guest, a tenant that runs more than its share of the sequences does not take these places. Otherwise a guest would
    have to wait until a sequence ends. If no place is free, a sequence of the tenant that exceeds its share most is
    preempted for a guest below its share. In a step in which all waiting sequences of a tenant start, tenants above
    their share start none. While there is a guest, the running prompts of tenants far above their share (_YIELDING) get
    the tokens of a step that those leave that were served at most ``quantum`` tokens more.

    The sequences of a tenant are ordered by the due time of their requests' first tokens. A request that can no longer
    meet its due time is moved back by PATIENCE_S, once, behind the requests that can. The due time of a sequence
    changes only while the sequence is not in the line, and independently of the other sequences of its request.
    """

    def __init__(self, forecast: Forecast, quantum: int, kept: int = 0) -> None:
        self._forecast = forecast
        self._quantum = quantum
        self._kept = kept
        self._tenants: dict[str, Tenant] = {}
        self._backlogged: dict[str, Tenant] = {}  # tenants with waiting sequences
        self._last = Tenant()  # the last tenant whose line became empty
        self._guests: dict[Tenant, float] = {}  # each with the time at which it stops being a guest
        self._active: dict[Tenant, None] = {}  # tenants with running sequences
        # The step in which a tenant's last waiting sequence started while others waited; never two steps in a row.
        self._guest_step = -1
        self._invited: Sequence | None = None
        self._yielding: list[Sequence] = []
        self._first_served = 0.0  # a tenant that was served more starts none while prompts yield
        self._length = 0
        self._passed: Counter[Sequence] = Counter()
        self._first: Sequence | None = None
        self._newest = 0.0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        return (entry[-1] for tenant in self._backlogged.values() for entry in tenant.line)

    def rank(self, seq: Sequence) -> Rank:
        return (0, seq.state.arrival, seq.index)

    def push(self, seq: Sequence) -> None:
        service = seq.state.request.service
        name = service.tenant
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant()
        if name not in self._backlogged:
            self._lift(tenant)
            self._welcome(tenant, GUEST_S)
            tenant.weight = service.weight
            self._backlogged[name] = tenant
        if seq.state.due == 0.0:
            seq.state.due = self._due(seq)
        if seq.due == 0.0:
            seq.due = seq.state.due
            seq.num_charged = len(seq.token_ids) if seq.num_generated else 0
        tenant.line.add(self._entry(seq))
        self._length += 1

    def remove(self, seq: Sequence) -> None:
        if seq is self._invited:
            self._invited = None
        name = seq.state.request.service.tenant
        tenant = self._tenants[name]
        tenant.line.remove(self._entry(seq))
        tenant.charge(seq)  # the tokens in flight when it was preempted
        self._length -= 1
        self._passed.pop(seq, None)
        if not tenant.line:
            del self._backlogged[name]
            self._last = tenant
            self._welcome(tenant, RECENT_S)

    @property
    def is_shared(self) -> bool:
        if len(self._tenants) < 2:
            return False
        return len(self._active) > 1 or any(tenant not in self._active for tenant in self._newest_guests())

    def yielding(self, running: Iterable[Sequence]) -> list[Sequence]:
        self._yielding = []
        if len(self._tenants) > 1 and self._newest_guests():
            active = list(self._active)
            within = self._within_share(active, _YIELDING)
            if len(within) < len(active):
                for tenant in active:
                    tenant.settle()
                self._first_served = self._quantum + min(tenant.served for tenant in active if tenant not in within)
                before = {tenant for tenant in within if tenant.served <= self._first_served}
                self._yielding = [seq for seq in running if seq.has_prompt_left and self._tenant_of(seq) not in before]
        return self._yielding

    def displaced(self) -> tuple[Sequence, Collection[Sequence]] | None:
        waiting = (tenant for tenant in self._newest_guests() if tenant.line)
        if self._invited is not None or (coming := min(waiting, key=_crowd, default=None)) is None:
            return None
        share, most = self._share(coming), max(self._active, key=_crowd)
        if len(coming.running) + 1 > share * coming.weight or len(most.running) <= share * most.weight:
            return None
        coming.settle()
        most.settle()
        if coming.served > most.served + self._quantum:
            return None
        return coming.line[0][-1], most.running

    def invite(self, seq: Sequence) -> None:
        self._invited = seq

    def start(self, seq: Sequence, cached: int) -> None:
        tenant = self._tenant_of(seq)
        for passed in {self._first, tenant.line[0][-1]} - {seq, None}:
            assert passed is not None
            self._passed[passed] += 1
        self.remove(seq)
        self._active[tenant] = None
        tenant.running[seq] = None
        seq.num_charged = max(seq.num_charged, min(cached, seq.num_prompt_tokens))
        step = self._forecast.num_steps
        if not tenant.line and self._backlogged and step > self._guest_step + 1:
            self._guest_step = step

    def leave(self, seq: Sequence) -> None:
        tenant = self._tenant_of(seq)
        tenant.charge(seq)
        del tenant.running[seq]
        if not tenant.running:
            del self._active[tenant]

    def candidates(self) -> Iterator[Sequence]:
        self._first = None
        if self._invited is not None:
            yield self._invited
            if self._forecast.free_places() < 2:
                return  # the running sequences took its blocks; no other sequence takes its place meanwhile
        tenants = list(self._backlogged.values())
        last_places = self._guests and self._forecast.free_places() <= self._kept
        yielding = any(seq.has_prompt_left for seq in self._yielding)
        if last_places or yielding or self._guest_step == self._forecast.num_steps:
            tenants = self._within_share(tenants)
            if yielding:
                tenants = [tenant for tenant in tenants if tenant.served <= self._first_served]
            if not tenants:
                return
        if len(tenants) > 1:
            for tenant in tenants:
                tenant.settle()
            tenants.sort(key=lambda tenant: (tenant.served, len(tenant.running)))
        first = self._first = self._best(tenants)
        yield first
        if self._passed[first] >= MOST_PASSED:
            return
        most, left = tenants[0].served + self._quantum, _LOOK_AHEAD
        for tenant in tenants:
            if tenant.served > most:
                return
            for entry in islice(tenant.line, left):
                left -= 1
                if entry[-1] is not first:
                    yield entry[-1]

    def standing(self, seq: Sequence) -> float:
        return self._tenant_of(seq).served // self._quantum

    def settle(self) -> None:
        for tenant in self._tenants.values():
            tenant.settle()

    def served(self) -> dict[str, float]:
        """Service by tenant.

        Only differences have a meaning: they are bounded between tenants that have waited all the time.
        """
        self.settle()
        return {name: tenant.served for name, tenant in self._tenants.items()}

    def _tenant_of(self, seq: Sequence) -> Tenant:
        return self._tenants[seq.state.request.service.tenant]

    def _welcome(self, tenant: Tenant, seconds: float) -> None:
        self._guests.pop(tenant, None)
        self._guests[tenant] = self._forecast.now() + seconds

    def _newest_guests(self) -> list[Tenant]:
        now, guests = self._forecast.now(), self._guests
        while guests and next(reversed(guests.values())) < now:
            guests.popitem()
        return [tenant for tenant, until in islice(reversed(guests.items()), _LOOK_AHEAD) if until >= now]

    def _within_share(self, tenants: list[Tenant], times: float = 1.0) -> list[Tenant]:
        """The ``tenants`` that run at most ``times`` their share of the sequences; all of them if there is no guest."""
        if not (newest := self._newest_guests()):
            return tenants
        share = self._share(next((tenant for tenant in newest if tenant not in self._active), newest[0]))
        return [tenant for tenant in tenants if len(tenant.running) <= times * share * tenant.weight]

    def _share(self, coming: Tenant) -> float:
        """Running sequences due to a tenant of weight 1 if ``coming`` is one of the active tenants."""
        running = sum(len(tenant.running) for tenant in self._active)
        return running / sum(tenant.weight for tenant in {*self._active, coming})

    def _best(self, tenants: list[Tenant]) -> Sequence:
        """The best sequence of the first of ``tenants``. Late requests at the head of its line are moved back."""
        line = tenants[0].line
        head: Sequence = line[0][-1]
        for _ in range(_MOST_LATE):
            if not self._is_late(head):
                break
            line.remove(self._entry(head))
            head.due = max(self._newest, self._forecast.now() + PATIENCE_S) + 1e-3
            line.add(self._entry(head))
            head = line[0][-1]
        if len(tenants) == 1 or self._passed[head] >= MOST_PASSED or head.state.request.service.ttft_s is not None:
            return head
        waiting = [entry[-1] for entry in islice(line, _PREFIXES)]
        best: Sequence = max(waiting, key=self._forecast.cached_blocks)  # max() returns the earliest of equals
        return best

    def _lift(self, tenant: Tenant) -> None:
        """Lift a tenant that begins to wait to the least service of the waiting tenants.

        If no tenant waits, the tenant whose line became empty last counts.
        """
        others = list(self._backlogged.values()) or [self._last]
        if others == [tenant]:
            return
        for other in (tenant, *others):
            other.settle()
        tenant.served = max(tenant.served, min(other.served for other in others))

    def _key(self, seq: Sequence) -> tuple[float]:
        return (seq.due,)

    def _due(self, seq: Sequence) -> float:
        """The time at which the first token is due, in seconds since the epoch; -inf for a request that moved here.

        A request continued from a lost engine comes before all others.
        """
        request = seq.state.request
        if request.drawn:
            return -math.inf
        if request.service.ttft_s is not None:
            return request.arrival_time + request.service.ttft_s
        due = self._forecast.now() + PATIENCE_S
        if due > self._newest:  # keeps the order of arrival if the clock is set back
            self._newest = due
        return self._newest

    def _is_late(self, seq: Sequence) -> bool:
        """Whether the request will miss its target and was not moved back yet. False once it has drawn a token."""
        request, due = seq.state.request, seq.due
        target_s = request.service.ttft_s
        if target_s is None or due != request.arrival_time + target_s or seq.state.has_drawn:
            return False
        return self._forecast.now() + self._forecast.first_token_s(seq) > due


def _crowd(tenant: Tenant) -> tuple[float, float]:
    """Sort key: running sequences divided by weight, then service."""
    return len(tenant.running) / tenant.weight, tenant.served
