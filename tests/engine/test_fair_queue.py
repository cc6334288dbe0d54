"""Fair queue: waiting keys get service by weight, no key starves, and a request that does not fit blocks no other."""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from raylm.config import SchedulerConfig
from raylm.engine.kv_cache_manager import KVCacheManager
from raylm.engine.queues.fair import DRAWN_WEIGHT, MOST_PASSED, PROMPT_WEIGHT, RECENT_S
from raylm.engine.scheduler import Scheduler
from raylm.messages import EngineCoreRequest, ModelRunnerOutput, SchedulerOutput, ServiceLevel
from tests.engine.build import CLIENT, Engine, request
from tests.engine.integrity import check_kv
from tests.fakes import FakeModel, FakeWorker


def of(tenant: str, prompt: list[int], key: int, weight: float = 1.0, **params: Any) -> EngineCoreRequest:
    made: EngineCoreRequest = request(prompt, key, **params)
    return replace(made, service=ServiceLevel(tenant, weight))


def fair(**fields: Any) -> Engine:
    return Engine(policy="fair", **fields)


class Shop:
    """An engine with a few keys that always have a waiting request. It counts the service of each key."""

    def __init__(self, seed: int, tenants: int, weights: list[float]) -> None:
        self.random = Random(seed)
        self.block_size = self.random.choice([2, 4])
        self.num_blocks = self.random.randint(12, 60)
        self.budget = self.random.randint(4, 40)
        seats = self.random.randint(1, min(8, self.budget))
        self.longest = min(48, self.num_blocks * self.block_size)
        fields = {"max_num_seqs": seats, "max_num_batched_tokens": self.budget, "policy": "fair"}
        self.in_flight = self.random.choice([1, 2])
        config = SchedulerConfig.model_construct(**fields)  # type: ignore[arg-type]
        self.kv = KVCacheManager(self.num_blocks, self.block_size, self.random.random() < 0.5)
        self.scheduler = Scheduler(config, self.kv, self.longest)
        limits = {"max_model_len": self.longest, "max_num_seqs": seats, "max_num_batched_tokens": self.budget}
        self.worker = FakeWorker(self.num_blocks, self.block_size, **limits, model=FakeModel(4, 0, 9))
        self.names = [f"tenant {number}" for number in range(tenants)]
        self.weights = dict(zip(self.names, weights, strict=True))
        self.prompts = {name: self.random.randint(1, self.longest - 2) for name in self.names}
        self.outputs = {name: self.random.randint(1, 20) for name in self.names}
        self.flying: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.keys = 0
        self.owners: dict[int, str] = {}
        self.served: Counter[str] = Counter()
        self.reached: dict[int, int] = {}  # prompt tokens of a request that were computed or cached, each counted once

    def refill(self, name: str, waiting: int) -> None:
        while sum(seq.state.request.service.tenant == name for seq in self.scheduler.waiting) < waiting:
            key, self.keys = self.keys, self.keys + 1
            length = self.random.randint(1, self.prompts[name])
            prompt = self.random.choices([1, 2], [3, 1], k=length)
            self.owners[key] = name
            most = self.random.randint(1, self.outputs[name])
            self.scheduler.add(CLIENT, of(name, prompt, key, self.weights[name], max_tokens=most, ignore_eos=True))

    def step(self) -> None:
        while len(self.flying) < self.in_flight and (plan := self.scheduler.schedule()):
            self._count_prompts(plan)
            self.flying.append((plan, self.worker.execute(plan)))
        assert self.flying, "requests are open, but no step computes"
        for outputs in self.scheduler.update(*self.flying.popleft()).values():
            for key in outputs.keys:
                self.served[self.owners[key]] += DRAWN_WEIGHT / self.weights[self.owners[key]]
        check_kv(self.kv)

    def _count_prompts(self, plan: SchedulerOutput) -> None:
        running = {seq.id: seq for seq in self.scheduler.running}
        for seq_id, computed, count in zip(plan.seq_ids, plan.num_computed, plan.num_scheduled, strict=True):
            seq = running[seq_id]
            if seq.num_generated == 0:
                new = min(computed + count, seq.num_prompt_tokens) - max(computed, self.reached.get(seq.key, 0))
                if new > 0:
                    name = self.owners[seq.key]
                    self.served[name] += PROMPT_WEIGHT * new / self.weights[name]
                    self.reached[seq.key] = computed + count

    def charged(self) -> dict[str, float]:
        """The service counted by the queue, plus the uncharged tokens of preempted sequences."""
        queue: Any = self.scheduler.waiting
        charged = {name: queue.served()[name] for name in self.names}
        for seq in self.scheduler.waiting:
            if seq.num_generated:
                name = self.owners[seq.key]
                charged[name] += DRAWN_WEIGHT * (len(seq.token_ids) - seq.num_charged) / self.weights[name]
        return charged

    @property
    def bound(self) -> float:
        """2 (max(w_p L_in, w_q M) + Q). A weight below 1 makes a token count for more."""
        pool = self.num_blocks * self.block_size
        least = min(self.weights.values())
        return 2 * (max(PROMPT_WEIGHT * max(self.prompts.values()), DRAWN_WEIGHT * pool) / least + self.budget)


@example(seed=49, weights=[1.0, 1.0])  # the keys preempt each other all the time
@example(seed=185596, weights=[1.0, 1.0])  # 62 prompts of the second key are preempted and computed again
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), weights=st.lists(st.sampled_from([1.0, 1.0, 2.0, 4.0]), min_size=2, max_size=4))
def test_keys_that_wait_are_served_alike(seed: int, weights: list[float]) -> None:
    shop = Shop(seed, len(weights), weights)
    begin, steps = shop.random.randint(0, 60), 300
    for step in range(begin + steps):
        for place, name in enumerate(shop.names):
            if step >= begin or place == 0:  # the others return after the first key was served alone
                shop.refill(name, waiting=20)  # more requests than two steps can start
        if step == begin:
            shop.served.clear()
            before = shop.charged()
        shop.step()
        if step >= begin:
            served = [shop.served[name] for name in shop.names]
            assert max(served) - min(served) <= shop.bound
            charged = shop.charged()
            assert [charged[name] - before[name] for name in shop.names] == served
    while shop.scheduler.has_work:
        shop.step()
    shop.kv.check_idle()


def test_shares_are_as_the_weights() -> None:
    engine = fair(num_blocks=400, max_num_seqs=4)
    engine.scheduler.max_model_len = 1000
    drawn: Counter[str] = Counter()
    key = 0
    for _ in range(600):
        for tenant, weight in (("light", 1.0), ("heavy", 3.0)):
            while sum(seq.state.request.service.tenant == tenant for seq in engine.scheduler.waiting) < 3:
                engine.scheduler.add(CLIENT, of(tenant, [key + 1] * 8, key, weight, max_tokens=12))
                key += 1
        for seq in engine.scheduler.running:
            drawn[seq.state.request.service.tenant] += 1
        engine.step()
    assert 2.7 < drawn["heavy"] / drawn["light"] < 3.3


def test_a_prompt_of_a_key_above_its_share_gets_the_tokens_that_others_leave() -> None:
    engine = fair(num_blocks=400, max_num_batched_tokens=16)
    for key, tokens in enumerate([4, 4, 4, 100]):
        engine.scheduler.add(CLIENT, of("flood", [key + 1] * tokens, key, max_tokens=50))
    for _ in range(3):  # three sequences decode, and a part of the long prompt is computed
        engine.step()
    engine.scheduler.add(CLIENT, of("guest", [9] * 20, 9, max_tokens=5))
    flood, guest = 3, 4  # sequence ids
    first, second = engine.schedule(), engine.schedule()
    assert dict(zip(first.seq_ids, first.num_scheduled, strict=True)) == {0: 1, 1: 1, 2: 1, guest: 13}
    assert dict(zip(second.seq_ids, second.num_scheduled, strict=True)) == {0: 1, 1: 1, 2: 1, guest: 7, flood: 6}


def test_a_key_that_returns_has_saved_nothing_up() -> None:
    engine = fair(num_blocks=400, max_num_seqs=1)
    for key in range(40):
        engine.scheduler.add(CLIENT, of("busy", [key + 1] * 4, key, max_tokens=4))
    for _ in range(80):
        engine.step()
    for key in range(100, 140):
        engine.scheduler.add(CLIENT, of("returning", [key + 1] * 4, key, max_tokens=4))
    order = starts(engine)
    assert 13 <= sum(first > 100 for first in order[:30]) <= 17, "the keys take turns from the beginning"


@pytest.mark.parametrize("ahead", [2, 60])
def test_of_a_keys_first_ones_the_longest_cached_prefix_starts_if_others_wait(ahead: int) -> None:
    engine = fair(num_blocks=400, max_num_seqs=1)
    engine.scheduler.add(CLIENT, of("one", [7] * 9, 0, max_tokens=2))
    for key, first in enumerate([*range(1000, 1000 + ahead), 7], start=1):
        engine.scheduler.add(CLIENT, of("one", [first] * 9, key, max_tokens=2))
    for key in (ahead + 2, ahead + 3):
        engine.scheduler.add(CLIENT, of("other", [3] * 200, key, max_tokens=2))
    order = starts(engine)
    assert order.index(7, 1) < order.index(1000) < order.index(1001)


def starts(engine: Engine) -> list[int]:
    """The first token of each prompt, in the order of their starts."""
    order: list[int] = []
    while engine.scheduler.has_work:
        plan = engine.schedule()
        order += [new.token_ids[0] for new in plan.new]
        engine.update(plan)
    return order


def running(engine: Engine) -> set[int]:
    return {seq.key for seq in engine.scheduler.running}


@pytest.mark.parametrize("tenant", ["one", "other"])
def test_who_fits_does_not_wait_behind_who_does_not(tenant: str) -> None:
    """A request needs 938 blocks, 373 are free, and 20 small requests wait behind it."""
    engine = fair(num_blocks=1000, max_model_len=4000, max_num_seqs=64, max_num_batched_tokens=8192)
    engine.scheduler.add(CLIENT, of("one", [1] * (4 * 627 - 1), 0, max_tokens=1000))
    engine.step()
    engine.scheduler.add(CLIENT, of("one", [2] * (4 * 938 - 1), 1, max_tokens=2))
    for key in range(2, 22):
        engine.scheduler.add(CLIENT, of(tenant, [key + 1] * 8, key, max_tokens=50))
    for _ in range(5):
        engine.step()
    assert running(engine) == {0, *range(2, 22)}


def test_and_it_waits_for_a_bounded_number_of_them() -> None:
    engine = fair(num_blocks=100, max_model_len=400, max_num_seqs=4)
    engine.scheduler.add(CLIENT, of("one", [1] * 40, 0, max_tokens=300))
    engine.step()
    engine.scheduler.add(CLIENT, of("one", [2] * 390, 1, max_tokens=2))
    key, started = 1, 0
    while 1 not in running(engine):
        while len(engine.scheduler.waiting) < 5:
            key += 1
            engine.scheduler.add(CLIENT, of("one", [key + 1] * 8, key, max_tokens=3))
        plan = engine.schedule()
        started += len(plan.new)
        engine.update(plan)
        assert started <= MOST_PASSED + 1
    assert started == MOST_PASSED + 1


def test_preempted_first_is_the_key_that_was_served_most() -> None:
    engine = fair(num_blocks=40, max_num_seqs=8, max_num_batched_tokens=16)
    for key, tenant in enumerate(("small", "large", "large", "large", "small")):
        engine.scheduler.add(CLIENT, of(tenant, [key + 1] * 3, key, max_tokens=100))
    while engine.scheduler.counters.preemptions == 0:
        engine.step()
    (victim,) = engine.scheduler.waiting
    assert victim.key == 3, "preempted the newest sequence, of the key with less service"


def test_one_key_is_served_first_come_first_served_whatever_it_has_in_the_cache() -> None:
    engine = fair(num_blocks=400, max_num_seqs=1)
    engine.add([7] * 9, 0, max_tokens=2)
    for key, first in ((1, 1), (2, 7), (3, 2)):
        engine.add([first] * 9, key, max_tokens=2)
    order = starts(engine)
    assert order == [7, 1, 7, 2]


def test_the_charge_is_for_what_was_computed_and_drawn() -> None:
    engine = fair(num_blocks=50)
    engine.scheduler.add(CLIENT, of("one", [1] * 9, 0, max_tokens=3))
    engine.scheduler.add(CLIENT, of("two", [1] * 9, 1, 2.0, max_tokens=2))  # 8 of its 9 tokens are cached
    while engine.scheduler.has_work:
        engine.step()
    queue: Any = engine.scheduler.waiting
    assert queue.served() == {"one": 9 + 3 * DRAWN_WEIGHT, "two": (1 + 2 * DRAWN_WEIGHT) / 2}


# -------------------------------------------------------------------- deadlines


def urgent(
    prompt: list[int], key: int, ttft_s: float | None, arrived: float = 0.0, **service: Any
) -> EngineCoreRequest:
    made: EngineCoreRequest = request(prompt, key, max_tokens=2)
    return replace(made, arrival_time=arrived, service=ServiceLevel(ttft_s=ttft_s, **service))


def at(now: float, **fields: Any) -> Engine:
    """An engine with a stopped clock, which knows that a prompt token takes 10 ms."""
    engine = fair(num_blocks=400, max_num_seqs=1, **fields)
    engine.scheduler.clock = lambda: now
    engine.scheduler._budget.speed = 0.001, 0.01
    return engine


def test_the_first_token_that_is_due_first_comes_first() -> None:
    engine = at(1000.0)
    for key, ttft_s in enumerate([None, 5.0, 2.0, 30.0, None]):
        engine.scheduler.add(CLIENT, urgent([key + 1] * 4, key, ttft_s, arrived=1000.0))
    assert starts(engine) == [3, 2, 1, 5, 4], "without a target, a request is ordered as with 10 s"


def test_what_cannot_make_its_deadline_any_more_comes_behind_what_can() -> None:
    engine = at(1000.0)
    for key, (length, ttft_s) in enumerate([(4, 9.0), (200, 1.0), (50, 1.0), (4, None)]):
        engine.scheduler.add(CLIENT, urgent([key + 1] * length, key, ttft_s, arrived=1000.0))
    assert starts(engine) == [3, 1, 4, 2], "200 tokens take 2 s"


def test_and_is_not_put_off_for_ever() -> None:
    engine = at(1000.0)
    engine.scheduler.add(CLIENT, urgent([1] * 200, 0, 1.0, arrived=1000.0))
    engine.scheduler.add(CLIENT, urgent([2] * 4, 1, None, arrived=1000.0))
    engine.step()
    for key in range(2, 40):
        engine.scheduler.clock = lambda key=key: 1000.0 + key  # type: ignore[misc]
        engine.scheduler.add(CLIENT, urgent([key + 1] * 4, key, None, arrived=1000.0 + key))
    assert starts(engine)[0] == 1


def test_who_has_hung_up_is_not_computed_any_more() -> None:
    engine = at(1000.0)
    engine.scheduler.add(CLIENT, urgent([1] * 4, 0, None, arrived=990.0, timeout_s=11.0))
    engine.scheduler.add(CLIENT, urgent([2] * 4, 1, None, arrived=990.0, timeout_s=9.0))
    engine.scheduler.add(CLIENT, urgent([3] * 4, 2, None, arrived=990.0))
    assert starts(engine) == [1, 3]
    assert engine.scheduler.take_given_up() == [(CLIENT, 1)]
    assert engine.scheduler.take_given_up() == []
    engine.kv.check_idle()


def test_siblings_that_start_after_the_target_do_not_end_the_engine() -> None:
    """The first sequence draws after the target, and then the other sequences of the request are queued together."""
    engine = fair(num_blocks=400, max_num_seqs=8)
    now = 1000.0
    engine.scheduler.clock = lambda: now
    made = request([1] * 19, 1, n=5, max_tokens=20, ignore_eos=True)
    engine.scheduler.add(CLIENT, replace(made, arrival_time=now, service=ServiceLevel(ttft_s=0.05)))
    while engine.scheduler.has_work:
        plan = engine.schedule()
        now += 0.06
        engine.update(plan)
    engine.kv.check_idle()


@pytest.mark.parametrize("seats", [2, 1])
def test_a_request_that_has_drawn_is_not_given_up_for_a_sibling_that_waits(seats: int) -> None:
    """The client's limit ends before the second sequence can run, while the first one is already in the plan."""
    engine = fair(num_blocks=400, max_num_seqs=seats)
    now = 1000.0
    engine.scheduler.clock = lambda: now
    made = request([1] * 4, 1, n=2, max_tokens=5, ignore_eos=True)
    engine.scheduler.add(CLIENT, replace(made, arrival_time=now, service=ServiceLevel(timeout_s=5.0)))
    engine.step()
    now += 6.0
    ended: list[int] = []
    while engine.scheduler.has_work:
        if out := engine.step():
            ended += [index for index, reason in zip(out.indexes, out.finish_reasons, strict=True) if reason]
    assert ended == [0, 1]
    assert engine.scheduler.take_given_up() == []


@pytest.mark.parametrize("replayed", [False, True])
def test_siblings_keep_their_place_when_the_target_of_their_request_has_passed(replayed: bool) -> None:
    engine = at(1000.0)
    made = urgent([1] * 4, 0, 0.05, arrived=1000.0)
    made = replace(made, params=replace(made.params, n=4, max_tokens=3), drawn=((5,), (), (), ()) if replayed else ())
    engine.scheduler.add(CLIENT, made)
    engine.step()
    engine.scheduler.clock = lambda: 1000.1
    engine.scheduler.add(CLIENT, urgent([2] * 4, 1, None, arrived=1000.1))
    order = starts(engine)
    assert order == [1, 1, 1, 2], "first the three waiting sequences, then the later request"
    engine.kv.check_idle()


# -------------------------------------------------------------------- a key beside a flooder


def flooded(**fields: Any) -> Engine:
    """An engine for 32 sequences.

    A key has all but two of these places and more requests waiting. Another key was first.
    """
    engine = fair(num_blocks=400, max_num_seqs=32, max_num_batched_tokens=256, **fields)
    engine.scheduler.add(CLIENT, of("quiet", [1], 0, max_tokens=1, ignore_eos=True))
    engine.step()
    for key in range(1, 65):
        engine.scheduler.add(CLIENT, of("flood", [1] * 4, key, max_tokens=100, ignore_eos=True))
    engine.step()
    return engine


def shares(engine: Engine) -> Counter[str]:
    return Counter(seq.state.request.service.tenant for seq in engine.scheduler.running)


def test_a_place_is_free_for_a_key_that_comes_back_beside_a_flooder() -> None:
    engine = flooded()
    assert shares(engine) == {"flood": 30}
    engine.scheduler.add(CLIENT, of("quiet", [2] * 4, 100, max_tokens=100, ignore_eos=True))
    engine.step()
    assert shares(engine) == {"flood": 30, "quiet": 1}


def test_a_place_is_kept_for_the_next_request_of_a_key_that_has_just_been_served_more() -> None:
    engine = flooded()
    for key in (100, 101):
        engine.scheduler.add(CLIENT, of("quiet", [key] * 100, key, max_tokens=100, ignore_eos=True))
        engine.step()
    assert shares(engine) == {"flood": 30, "quiet": 2}


def test_beyond_that_who_runs_more_than_its_share_gives_its_places_to_it_until_both_have_theirs() -> None:
    engine = flooded()
    for key in range(100, 164):
        engine.scheduler.add(CLIENT, of("quiet", [2] * 4, key, max_tokens=100, ignore_eos=True))
    engine.step()
    assert shares(engine) == {"flood": 30, "quiet": 2}
    engine.step()
    assert shares(engine) == {"flood": 29, "quiet": 3}
    for _ in range(40):
        engine.step()
    assert shares(engine) == {"flood": 16, "quiet": 16}
    assert engine.scheduler.counters.preemptions == 14


def test_who_got_a_place_so_passed_nobody_who_has_left() -> None:
    engine = flooded()
    for key in range(100, 104):
        engine.scheduler.add(CLIENT, of("quiet", [2] * 4, key, max_tokens=100, ignore_eos=True))
    for _ in range(4):
        engine.step()
    assert {*engine.scheduler.waiting._passed} <= {*engine.scheduler.waiting}  # type: ignore[attr-defined]


def test_places_go_over_by_weight() -> None:
    engine = flooded()
    for key in range(100, 164):
        engine.scheduler.add(CLIENT, of("heavy", [2] * 4, key, weight=3.0, max_tokens=100, ignore_eos=True))
    for _ in range(40):
        engine.step()
    assert shares(engine) == {"flood": 8, "heavy": 24}


def test_no_place_is_kept_for_a_key_that_has_not_come_for_long() -> None:
    engine = flooded()
    engine.scheduler.clock = lambda: time.time() + RECENT_S + 1
    engine.step()
    assert shares(engine) == {"flood": 32}


def test_a_key_alone_has_all_places() -> None:
    engine = fair(num_blocks=400, max_num_seqs=32, max_num_batched_tokens=256)
    for key in range(64):
        engine.scheduler.add(CLIENT, of("only", [1] * 4, key, max_tokens=100, ignore_eos=True))
    engine.step()
    assert shares(engine) == {"only": 32}


def test_while_another_key_may_come_steps_are_no_longer_than_makes_them_efficient() -> None:
    engine, now = fair(num_blocks=400, max_num_seqs=32, max_num_batched_tokens=256), time.time()
    engine.scheduler.clock = lambda: now
    engine.scheduler.add(CLIENT, of("quiet", [1], 0, max_tokens=1, ignore_eos=True))
    engine.step()
    engine.scheduler._budget.speed = 0.01, 0.001  # 80 tokens take eight times as long as a step
    for key in range(1, 9):
        engine.scheduler.add(CLIENT, of("flood", [key] * 100, key, max_tokens=9, ignore_eos=True))
    assert engine.scheduler.schedule().num_tokens == 80  # type: ignore[union-attr]
    now += RECENT_S + 1
    assert engine.scheduler.schedule().num_tokens == 256  # type: ignore[union-attr]


def test_a_flooders_prompts_do_not_join_the_step_in_which_another_key_starts_but_the_next_one() -> None:
    engine = flooded()
    for seq in engine.scheduler.running[:8]:
        engine.scheduler.abort(CLIENT, seq.key)
    engine.scheduler.add(CLIENT, of("quiet", [2] * 4, 100, max_tokens=100, ignore_eos=True))
    engine.step()
    assert shares(engine) == {"flood": 22, "quiet": 1}
    engine.scheduler.add(CLIENT, of("quiet", [3] * 4, 101, max_tokens=100, ignore_eos=True))
    engine.step()
    assert shares(engine) == {"flood": 28, "quiet": 2}
