"""Random runs of the Scheduler with a fake worker. The expected tokens of each request are computed without both."""

from __future__ import annotations

import pickle
from array import array
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from raylm.config import SchedulerConfig
from raylm.engine.kv_cache_manager import KVCacheManager
from raylm.engine.queues.base import AGING_S
from raylm.engine.queues.fair import FairQueue
from raylm.engine.scheduler import Scheduler
from raylm.engine.sequence import Sequence, sequence_seed
from raylm.errors import ContextLengthError
from raylm.messages import EngineCoreOutputs, EngineCoreRequest, ModelRunnerOutput, SchedulerOutput, ServiceLevel
from raylm.params import SamplingParams
from tests.engine.integrity import check_kv
from tests.fakes import FakeModel, FakeWorker

MODEL = FakeModel(vocab_size=4, eos_token_id=0, eos_period=9)
POISON = 99
WEIGHTS = {"": 1.0, "one": 1.0, "other": 0.1, "third": 7.0}  # of the API keys


@dataclass(frozen=True)
class Setup:
    """The limits of one engine, all tiny. With a ``moving_clock``, targets and time limits have an effect."""

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    policy: str
    steps_in_flight: int
    prefix_caching: bool
    speculative_tokens: int
    lateness: float
    target_itl_ms: float | None
    moving_clock: bool
    stages: int = field(default=1, repr=False)  # not in the repr, which is the seed of a run

    @property
    def most_in_flight(self) -> int:
        """The number of steps in flight: one more for each further stage."""
        return self.steps_in_flight + self.stages - 1


@dataclass(frozen=True)
class Op:
    """``add`` a request, ``abort`` one, ``schedule`` a step, ``update`` with the oldest one, or ``reset`` the pool.

    ``replay`` adds an open request again with the client's tokens, as if another engine had begun it.
    """

    kind: str
    request: EngineCoreRequest | None = None
    pick: int = 0
    client_id: str = ""


def random_setup(rng: Random) -> Setup:
    """Pools of 3 to 10 blocks of 2 or 4 tokens."""
    return Setup(
        num_blocks=rng.randint(3, 10),
        block_size=rng.choice([2, 4]),
        max_model_len=rng.randint(8, 48),
        max_num_seqs=rng.randint(1, 5),
        max_num_batched_tokens=rng.randint(1, 14),
        policy=rng.choice(["fair", "fcfs", "priority", "priority", "priority"]),
        steps_in_flight=rng.choice([1, 2, 2, 3]),
        prefix_caching=rng.random() < 0.7,
        speculative_tokens=rng.choice([0, 0, 1, 3, 9]),
        lateness=rng.choice([0.0, 0.0, 0.2, 0.7]),
        target_itl_ms=rng.choice([None, None, 5.0, 50.0]),
        moving_clock=rng.random() < 0.6,
    )


def random_request(rng: Random, key: int) -> EngineCoreRequest:
    """Prompts of two token ids, so that many have common prefixes. A few contain the poison token."""
    prompt = rng.choices([1, 2], [3, 1], k=rng.randint(1, 14))
    if rng.random() < 0.04:
        prompt[rng.randrange(len(prompt))] = POISON
    max_tokens = rng.choice([None, *range(1, 20)])
    params = SamplingParams(
        n=rng.choice([1, 1, 1, 2, 3]),
        seed=rng.randint(-3, 3),
        max_tokens=max_tokens,
        min_tokens=rng.choice([0, rng.randint(0, min(max_tokens or 4, 4))]),
        ignore_eos=rng.random() < 0.5,
        stop_token_ids=rng.choice([(), (), (3,), (0,)]),
        logprobs=rng.choice([None, None, 0, 2]),
        prompt_logprobs=rng.choice([None, None, None, 0, 1]),
    )
    return EngineCoreRequest(
        key=key,
        request_id=str(key),
        prompt_token_ids=array("I", prompt),
        params=params,
        eos_token_ids=(MODEL.eos_token_id,),
        priority=rng.randint(0, 2),
        cache_salt=rng.choice([None, None, "salt"]),
        service=random_service(rng),
        grammar=rng.choice([None, None, "a form"]),
    )


def random_service(rng: Random) -> ServiceLevel:
    """Four keys. Some requests have targets that cannot be met, and time limits that end while they wait."""
    tenant = rng.choice([*WEIGHTS])
    return ServiceLevel(
        tenant=tenant,
        weight=WEIGHTS[tenant],
        ttft_s=rng.choice([None, None, 0.001, 0.05, 0.5, 5.0]),
        itl_s=rng.choice([None, None, None, 1e-4, 0.02]),
        timeout_s=rng.choice([None, None, 0.05, 1.0, 20.0]),
    )


def random_script(rng: Random, length: int) -> list[Op]:
    """About two steps for each added request, and some aborts."""
    kinds = rng.choices(["add", "abort", "schedule", "update", "reset", "replay"], [12, 3, 20, 18, 1, 4], k=length)
    script = []
    for key, kind in enumerate(kinds):
        client_id, pick = rng.choice("ab"), rng.randrange(1000)
        script.append(Op(kind, random_request(rng, key) if kind == "add" else None, pick, client_id))
    return script


@dataclass
class Answer:
    """A client's outputs of one sequence."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, ...]] = field(default_factory=list)
    finish: tuple[str, int | None] | None = None
    cached_tokens: int = 0


@dataclass
class Run:
    """A run of one engine, checked at every step."""

    setup: Setup
    handed_over: list[tuple[SchedulerOutput, bytes]] = field(default_factory=list)
    in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = field(default_factory=deque)
    added: list[tuple[str, EngineCoreRequest]] = field(default_factory=list)
    aborted: set[int] = field(default_factory=set)
    refused: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    answers: dict[tuple[int, int], Answer] = field(default_factory=dict)
    prompt_logprobs: dict[int, Any] = field(default_factory=dict)
    replayed: dict[int, int] = field(default_factory=dict)  # negative numbers, which are before all keys
    owner: dict[int, int] = field(default_factory=dict)
    wasted: Counter[int] = field(default_factory=Counter)
    started: list[tuple[str | None, list[int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        setup = self.setup
        self.rng, self.now = Random(repr(setup)), 1e9
        names = (
            "max_num_seqs", "max_num_batched_tokens", "policy", "steps_in_flight", "speculative_tokens",
            "target_itl_ms",
        )  # fmt: skip
        config = SchedulerConfig.model_construct(**{name: getattr(setup, name) for name in names})
        self.kv = KVCacheManager(setup.num_blocks, setup.block_size, setup.prefix_caching)
        self.scheduler = Scheduler(config, self.kv, setup.max_model_len, lambda: self.now, stages=setup.stages)
        self.max_model_len = min(setup.max_model_len, setup.num_blocks * setup.block_size)
        self.worker = FakeWorker(
            num_blocks=setup.num_blocks,
            block_size=setup.block_size,
            max_model_len=self.max_model_len,
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.max_num_batched_tokens,
            poison=POISON,
            speculative_tokens=setup.speculative_tokens,
            lateness=setup.lateness,
            unseen_steps=max(3, setup.most_in_flight),
            model=MODEL,
        )

    # -------------------------------------------------------------- events

    def play(self, script: list[Op]) -> None:
        """Run a script, let all requests end, and compare their outputs."""
        for op in script:
            getattr(self, op.kind)(op)
            check_kv(self.kv)
        budget = 60 + 48 * sum(request.params.n * self.max_model_len for _, request in self.added)
        while self.scheduler.has_work or self.in_flight:
            given_up = len(self.aborted)
            self.schedule(Op("schedule"))
            assert self.in_flight or len(self.aborted) > given_up, "requests are open, but no step can be scheduled"
            self.update(Op("update"))
            budget -= 1
            assert budget > 0, "the engine makes no progress"
        check_kv(self.kv)
        self.kv.check_idle()
        self.compare()

    def add(self, op: Op) -> None:
        """A request arrives. The scheduler refuses it if it cannot be served."""
        assert op.request is not None
        key = len(self.added)
        request = replace(op.request, key=key, arrival_time=self.now - self.rng.choice([0.0, 0.01, 3.0]))
        self.added.append((op.client_id, request))
        try:
            self.scheduler.add(op.client_id, request)
        except ContextLengthError:
            assert len(request.prompt_token_ids) >= self.max_model_len
            self.refused.add(key)
        else:
            assert len(request.prompt_token_ids) < self.max_model_len

    def abort(self, op: Op) -> None:
        """A client aborts one of its requests, in any state."""
        if self.added:
            client_id, request = self.added[op.pick % len(self.added)]
            if (client_id, request.key) in self.scheduler.open_requests():
                self.aborted.add(request.key)
            self.scheduler.abort(client_id, request.key)
            assert (client_id, request.key) not in self.scheduler.open_requests()

    def replay(self, op: Op) -> None:
        """An open request is added again, with its client's tokens of each sequence."""
        if not self.added:
            return
        client_id, request = self.added[op.pick % len(self.added)]
        if (client_id, request.key) not in self.scheduler.open_requests():
            return
        self.scheduler.abort(client_id, request.key)
        answers = [self.answers.get((request.key, index), Answer()) for index in range(request.params.n)]
        drawn = tuple(None if answer.finish else tuple(answer.token_ids) for answer in answers)
        self.scheduler.add(client_id, replace(request, drawn=drawn))
        self.replayed[request.key] = max(self.replayed.values(), default=-(10**6)) + 1

    def reset(self, op: Op) -> None:
        """Empty the prefix cache. Later sequences must not find earlier blocks."""
        self.kv.reset()
        self.started.clear()

    def schedule(self, op: Op) -> None:
        """Schedule a step and run it, if the number of steps in flight allows it."""
        if len(self.in_flight) == self.setup.most_in_flight:
            return
        self._pass_time()
        ready = [seq for seq in self.scheduler.running if seq.num_tokens < seq.limit and not self._may_rest(seq)]
        before = list(self.scheduler.running)
        plan = self.scheduler.schedule()
        self._give_up(self.scheduler.take_given_up())
        preempted = [seq for seq in before if seq not in self.scheduler.running]
        if plan is not None:
            self._check_order(plan, ready, preempted)
            self._check_hits(plan)
            self.handed_over.append((plan, pickle.dumps(plan)))
            self.in_flight.append((plan, self.worker.execute(plan)))

    def update(self, op: Op) -> None:
        """Process the result of the oldest step."""
        if not self.in_flight:
            return
        self._pass_time()
        plan, result = self.in_flight.popleft()
        if self.setup.moving_clock:
            result = replace(result, step_s=self.rng.choice([0.001, 0.01, 0.05]) * (1 + plan.num_tokens / 8))
        known = {seq.id for seq in self._sequences()}
        self.wasted.update(seq_id for seq_id in result.seq_ids if seq_id not in known)
        for client_id, outputs in self.scheduler.update(plan, result).items():
            self._take(client_id, outputs)

    def _pass_time(self) -> None:
        """Advance the clock. Sometimes it jumps, as if it were set."""
        if self.setup.moving_clock:
            self.now += self.rng.choice([0.0, 0.001, 0.01, 0.1, 1.0, 11.0])
            self.now += self.rng.choice([-3600, 3600, -20, 70]) if self.rng.random() < 0.03 else 0

    # -------------------------------------------------------------- checks at every step

    def _give_up(self, given_up: list[tuple[str, int]]) -> None:
        """Only requests without tokens may be given up, after their time limits."""
        for client_id, key in given_up:
            owner, request = self.added[key]
            assert (client_id, key) not in self.scheduler.open_requests(), "it is given up and still open"
            assert owner == client_id
            assert request.service.timeout_s is not None, "it has no time limit"
            assert self.now > request.arrival_time + request.service.timeout_s, "its time limit is not over"
            drawn = [self.answers[key, index] for index in range(request.params.n) if (key, index) in self.answers]
            assert not any(answer.token_ids for answer in drawn), "it has already drawn a token"
            self.aborted.add(key)

    def _rank(self, seq: Sequence) -> tuple[int, int, int]:
        priority = seq.state.request.priority if self.setup.policy == "priority" else 0
        return (priority, self.replayed.get(seq.key, seq.key), seq.index)  # keys are numbered in the order of arrival

    def _place(self, seq: Sequence) -> tuple[float, int, int]:
        """The place of a waiting sequence under a strict policy. Waiting for AGING_S is worth one priority class."""
        priority, order, index = self._rank(seq)
        aged = seq.state.request.arrival_time / AGING_S if self.setup.policy == "priority" else 0.0
        return (priority + aged, order, index)

    def _sequences(self) -> list[Sequence]:
        return [*self.scheduler.running, *self.scheduler.waiting]

    def _may_rest(self, seq: Sequence) -> bool:
        """Whether a running sequence may skip a step: with several stages, decoding sequences take turns."""
        return self.setup.stages > 1 and seq.num_tokens - seq.num_computed == 1

    def _check_order(self, plan: SchedulerOutput, ready: list[Sequence], preempted: list[Sequence]) -> None:
        """Running sequences come first, except prompts.

        Then the waiting order is strict. Preemption takes the lowest class.
        """
        running = {seq.id: seq for seq in self.scheduler.running}
        waiting = [self._place(seq) for seq in self.scheduler.waiting]
        displaced = self._displaced(plan, preempted)
        if plan.new:
            others = [seq for seq in ready if seq.id not in plan.seq_ids and seq is not displaced]
            waits = [seq for seq in others if self.setup.policy == "fcfs" or not seq.has_prompt_left]
            assert not waits, "a new sequence runs although a running one must wait"
            last = max(self._place(running[new.seq_id]) for new in plan.new)
            assert self.setup.policy == "fair" or all(last < rank for rank in waiting), "a new sequence passed another"
        for victim in preempted:
            assert all(self._rank(seq)[0] <= self._rank(victim)[0] for seq in running.values()), "a lower class runs"
            better = any(self._rank(running[seq_id]) < self._rank(victim) for seq_id in plan.seq_ids)
            assert better or victim is displaced, "the preemption helps no sequence of a higher rank"

    def _displaced(self, plan: SchedulerOutput, preempted: list[Sequence]) -> Sequence | None:
        """The sequence preempted for a new one, because its tenant had more sequences relative to its weight."""
        queue = self.scheduler.waiting
        if not isinstance(queue, FairQueue) or not plan.new or len(self.scheduler.running) < self.setup.max_num_seqs:
            return None
        runs = Counter(seq.state.request.service.tenant for seq in self.scheduler.running)
        weights = {name: tenant.weight for name, tenant in queue._tenants.items()}
        new = next(seq for seq in self.scheduler.running if seq.id == plan.new[0].seq_id)
        of_new = new.state.request.service.tenant
        tenants = [(seq, seq.state.request.service.tenant) for seq in preempted]
        most = runs[of_new] / weights[of_new]
        return next((seq for seq, tenant in tenants if (runs[tenant] + 1) / weights[tenant] > most), None)

    def _check_hits(self, plan: SchedulerOutput) -> None:
        """A prefix hit needs an earlier sequence with the same salt and the same prefix."""
        for new in plan.new:
            computed = plan.num_computed[plan.seq_ids.index(new.seq_id)]
            request = next(seq for seq in self.scheduler.running if seq.id == new.seq_id).state.request
            self.owner[new.seq_id] = request.key
            longest = max(
                (_common(new.token_ids, tokens) for salt, tokens in self.started if salt == request.cache_salt),
                default=0,
            )
            assert computed <= longest, f"{computed} tokens from the cache, {longest} can be there"
            assert computed == 0 or self.setup.prefix_caching
            whole = MODEL.continuation(list(request.prompt_token_ids), new.seed, self.max_model_len)
            self.started.append((request.cache_salt, [*request.prompt_token_ids, *whole]))

    def _take(self, client_id: str, outputs: EngineCoreOutputs) -> None:
        start = entry = 0
        for row, (key, index) in enumerate(zip(outputs.keys, outputs.indexes, strict=True)):
            assert self.added[key][0] == client_id, "tokens of another client's request"
            answer = self.answers.setdefault((key, index), Answer())
            assert answer.finish is None, "a token after the end of the sequence"
            assert key not in self.aborted, "a token after an abort"
            end = start + outputs.token_counts[row]
            answer.token_ids += outputs.token_ids[start:end]
            for position in range(start, end):
                count = outputs.logprobs.counts[position] if outputs.logprobs else 0
                if outputs.logprobs and count:
                    answer.logprobs.append(tuple(outputs.logprobs.token_ids[entry : entry + count]))
                entry += count
            start = end
            answer.cached_tokens = outputs.cached_tokens[row]
            if (reason := outputs.finish_reasons[row]) is not None:
                answer.finish = (reason, outputs.stop_reasons[row])
        for key, logprobs in outputs.prompt_logprobs:
            assert key not in self.prompt_logprobs, "prompt logprobs came twice"
            self.prompt_logprobs[key] = logprobs
        self.failed.update(key for key, _ in outputs.errors)

    # -------------------------------------------------------------- checks at the end

    @property
    def settled(self) -> set[int]:
        """Keys of the requests that ended in any way."""
        ended = {key for (key, _), answer in self.answers.items() if answer.finish is not None}
        return ended | self.aborted | self.refused | self.failed

    def compare(self) -> None:
        """Check that every request got the tokens that it gets alone."""
        assert all(pickle.loads(before) == plan for plan, before in self.handed_over), (
            "a plan was changed after it was handed over"
        )
        for seq_id, count in self.wasted.items():
            most = self.setup.most_in_flight - (self.owner[seq_id] not in self.aborted | self.replayed.keys())
            assert count <= most, f"{count} tokens of sequence {seq_id} were drawn in vain"
        assert set(self.worker.rows) <= set(self.scheduler._finished), "the worker still has rows of ended sequences"
        for _, request in self.added:
            if request.key in self.refused:
                continue
            if POISON in request.prompt_token_ids:
                assert request.key in self.failed | self.aborted
                continue
            assert request.key not in self.failed
            for index in range(request.params.n):
                self._compare_sequence(request, index)
            if request.params.prompt_logprobs is not None and request.key not in self.aborted:
                self._compare_prompt_logprobs(request)

    def _compare_sequence(self, request: EngineCoreRequest, index: int) -> None:
        tokens, finish = expected(request, index, self.max_model_len)
        answer = self.answers.get((request.key, index), Answer())
        if request.key in self.aborted:
            assert answer.token_ids == tokens[: len(answer.token_ids)]
            return
        assert answer.token_ids == tokens, f"request {request.key}, sequence {index}"
        assert answer.finish == finish
        assert answer.cached_tokens < len(request.prompt_token_ids)
        count = request.params.logprobs
        others = tuple(range(1000, 1000 + (count or 0)))
        assert answer.logprobs == ([] if count is None else [(token, *others) for token in tokens])

    def _compare_prompt_logprobs(self, request: EngineCoreRequest) -> None:
        """One entry for each prompt token, with the token itself first. The entry of the first token is empty."""
        logprobs = self.prompt_logprobs[request.key]
        count = 1 + (request.params.prompt_logprobs or 0)
        prompt = list(request.prompt_token_ids)
        assert logprobs.counts == [0] + [count] * (len(prompt) - 1)
        assert logprobs.token_ids[::count] == prompt[1:]


def expected(
    request: EngineCoreRequest, index: int, max_model_len: int, adapter: str = ""
) -> tuple[list[int], tuple[str, int | None]]:
    """The tokens and (finish reason, stop reason) of one sequence alone, by the rules of the API.

    ``adapter`` is the path of its LoRA adapter.
    """
    params, prompt = request.params, list(request.prompt_token_ids)
    assert params.seed is not None
    room = min(max_model_len - len(prompt), params.max_tokens or max_model_len)
    tokens = MODEL.continuation(prompt, sequence_seed(params.seed, index), room, adapter)
    for length, token in enumerate(tokens, start=1):
        if length > params.min_tokens:
            if token in request.eos_token_ids and not params.ignore_eos:
                return tokens[:length], ("stop", None)
            if token in params.stop_token_ids:
                return tokens[:length], ("stop", token)
    return tokens, ("length", None)


def _common(left: list[int], right: list[int]) -> int:
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count
