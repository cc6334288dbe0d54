"""Random runs of EngineCores with changing clients, adapters and engines, with targets, limits and a moving clock."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random

from raylm.config import CacheConfig, Config, LoRAConfig, SchedulerConfig
from raylm.engine import EngineCore
from raylm.engine.outbox import Outbox
from raylm.errors import DeadlineExceededError, InvalidRequestError, ModelNotFoundError, RayLMError
from raylm.messages import EngineCoreOutputs, EngineCoreRequest, LoRAAdapter
from tests.engine.build import request
from tests.engine.integrity import check_kv
from tests.engine.simulation import MODEL, expected, random_service
from tests.fakes import FakeExecutor, FakeWorker

LONGEST = 100
MOST_TURNS = 200_000  # turns of the event loop until all open requests have ended; 1,051 requests needed 26,000
ADAPTERS = [LoRAAdapter(name, f"path/{name}") for name in "xy"]


@dataclass
class Asked:
    """One request, its client's tokens of each sequence, and its end. A request that is ``gone`` needs no end."""

    request: EngineCoreRequest
    tokens: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    finished: set[int] = field(default_factory=set)
    stopped: set[int] = field(default_factory=set)
    error: RayLMError | None = None
    gone: bool = False

    @property
    def ended(self) -> bool:
        return self.gone or self.error is not None or len(self.finished | self.stopped) == self.request.params.n

    def again(self) -> EngineCoreRequest:
        """The request as it is sent to another engine after the first one is lost."""
        over = self.finished | self.stopped
        drawn = [None if index in over else tuple(self.tokens[index]) for index in range(self.request.params.n)]
        return replace(self.request, drawn=tuple(drawn))

    def check(self) -> None:
        """Check that each sequence has the tokens of a run alone, and all of them unless the request was ended."""
        path = f"path/{self.request.adapter}" if self.request.adapter else ""
        if self.error is not None:
            self._check_error(self.error)
        assert self.ended, "a request has no end"
        for index in range(self.request.params.n):
            whole, _ = expected(self.request, index, LONGEST, path)
            tokens = self.tokens[index]
            assert tokens == whole[: len(tokens)], f"request {self.request.key}, sequence {index}"
            assert index not in self.finished or len(tokens) == len(whole), "a sequence ended early"

    def _check_error(self, error: RayLMError) -> None:
        drawn = any(self.tokens.values())
        match error:
            case DeadlineExceededError():
                assert self.request.service.timeout_s is not None
                assert not drawn, "a request was given up after it drew a token"
            case ModelNotFoundError():
                assert self.request.adapter is not None
            case InvalidRequestError():
                assert self.request.grammar == "bad"
            case _:
                raise AssertionError(f"request {self.request.key}: {error!r}") from error


@dataclass
class Client:
    outbox: Outbox
    reader: asyncio.Task[None]


class Life:
    """Some clients of a series of engines, with all kinds of calls."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(seed)
        self.now = 1e9
        self.keys: Iterator[int] = count()
        self.asked: dict[tuple[str, int], Asked] = {}
        self.clients: dict[str, Client] = {}
        self.calls: list[asyncio.Task[None]] = []
        self.done: Counter[str] = Counter()
        self.num_blocks, self.seats = rng.randint(12, 60), rng.choice([2, 5, 20])
        self.drafts, self.lateness = rng.choice([0, 0, 3]), rng.choice([0.0, 0.0, 0.4])
        self.config = Config(
            cache=CacheConfig(num_blocks=self.num_blocks),
            lora=LoRAConfig(root="/adapters", max_adapters=3),
            max_model_len=LONGEST,
            scheduler=SchedulerConfig(
                max_num_seqs=self.seats,
                max_num_batched_tokens=max(self.seats, 30),
                policy=rng.choice(["fair", "fair", "priority", "fcfs"]),
                steps_in_flight=rng.choice([1, 2]),
                speculative_tokens=self.drafts,
                target_itl_ms=rng.choice([None, 5.0]),
            ),
        )

    async def begin(self) -> None:
        """Start an engine."""
        worker = FakeWorker(
            num_blocks=self.num_blocks,
            max_model_len=LONGEST,
            max_num_seqs=self.seats,
            max_num_batched_tokens=max(self.seats, 30),
            speculative_tokens=self.drafts,
            lateness=self.lateness,
            luck=Random(self.rng.random()),
            model=MODEL,
        )
        self.core = EngineCore(self.config, FakeExecutor(worker), clock=lambda: self.now)
        await self.core.start()
        self.run = asyncio.create_task(self.core.run())

    async def live(self, length: int) -> None:
        """Run ``length`` random events, then let all requests end."""
        await self.begin()
        kinds = {
            "connect": 8, "drop": 4, "add": 48, "abort": 10, "stop": 5, "load": 6, "unload": 4, "watch": 5, "take": 3,
            "lose": 2,
        }  # fmt: skip
        for kind in self.rng.choices(list(kinds), list(kinds.values()), k=length):
            self._pass_time()
            client_id = self.rng.choice("abc")
            if client_id not in self.clients:
                self.connect(client_id)
            await self._do(kind, client_id)
            await turns(self.rng.choice([0, 1, 3, 30]))
            if self.run.done():
                break
        await self._end()

    def _pass_time(self) -> None:
        """Advance the clock. Sometimes it jumps, as if it were set."""
        self.now += self.rng.choice([0.0, 0.01, 0.5, 5.0])
        self.now += self.rng.choice([-3600, 3600, -20, 70]) if self.rng.random() < 0.03 else 0

    async def _do(self, kind: str, client_id: str) -> None:
        self.done[kind] += 1
        if kind == "lose":
            await self.lose()
        else:
            getattr(self, kind)(client_id)

    # -------------------------------------------------------------- events

    def connect(self, client_id: str) -> None:
        self.leave(client_id)
        outbox = self.core.connect(client_id)
        self.clients[client_id] = Client(outbox, asyncio.create_task(self._read(client_id, outbox)))

    def drop(self, client_id: str) -> None:
        self.leave(client_id)
        self.core.drop_client(client_id)

    def leave(self, client_id: str) -> None:
        """Disconnect a client. Its open requests need no end."""
        if (client := self.clients.pop(client_id, None)) is not None:
            client.reader.cancel()
        for (owner, _), asked in self.asked.items():
            asked.gone |= owner == client_id

    def add(self, client_id: str) -> None:
        many = 300 if self.rng.random() < 0.01 else self.rng.choice([1, 3, 8])
        requests = [self._request() for _ in range(many)]
        self.asked |= {(client_id, made.key): Asked(made) for made in requests}
        self.core.add(client_id, requests)

    def _request(self) -> EngineCoreRequest:
        rng = self.rng
        prompt = rng.choices([1, 2], [3, 1], k=rng.randint(1, 60))
        params = {"n": rng.choice([1, 1, 2, 5]), "max_tokens": rng.randint(1, 30), "ignore_eos": rng.random() < 0.5}
        made: EngineCoreRequest = request(prompt, next(self.keys), priority=rng.randint(0, 2), **params)
        service = random_service(rng)
        if self.config.scheduler.policy != "fair":
            service = replace(service, ttft_s=None)
        return replace(
            made,
            adapter=rng.choice([None, None, "x", "y"]),
            grammar=rng.choice([None, None, "a form", "another", "bad"]),
            arrival_time=self.now,
            resumable_as=rng.choice(["", f"name {rng.randint(0, 5)}"]),
            service=service,
        )

    def _open(self, client_id: str) -> list[Asked]:
        return [asked for (owner, _), asked in self.asked.items() if owner == client_id and not asked.ended]

    def abort(self, client_id: str) -> None:
        given_up = [asked for asked in self._open(client_id) if self.rng.random() < 0.3]
        for asked in given_up:
            asked.gone = True
        self.core.abort(client_id, [asked.request.key for asked in given_up])

    def stop(self, client_id: str) -> None:
        """A client stops a sequence because of the text of its tokens, so the sequence has some tokens."""
        chosen = [
            (asked, self.rng.choice(began))
            for asked in self._open(client_id)
            if (began := [index for index, tokens in asked.tokens.items() if tokens]) and self.rng.random() < 0.3
        ]
        for asked, index in chosen:
            asked.stopped.add(index)
        self.core.stop(client_id, [(asked.request.key, index) for asked, index in chosen])

    def load(self, client_id: str) -> None:
        self._call(self.core.load_adapter(self.rng.choice(ADAPTERS)))

    def unload(self, client_id: str) -> None:
        self._call(self.core.unload_adapter(self.rng.choice("xy")))

    def _call(self, call: Awaitable[None]) -> None:
        async def answered() -> None:
            with suppress(RayLMError):
                await call

        self.calls.append(asyncio.create_task(answered()))

    def watch(self, client_id: str) -> None:
        self.core.watch_blocks(client_id)
        self.core.pass_period(0.2)

    def take(self, client_id: str) -> None:
        self.core.take_parked(replace(request([1]), resumable_as=f"name {self.rng.randint(0, 5)}"))

    async def lose(self) -> None:
        """The engine ends. Another one continues the open requests with the tokens that their clients have."""
        if self.run.done():
            return
        await asyncio.gather(*self.calls)
        self.run.cancel()
        await self.core.shutdown()
        await asyncio.gather(*(client.reader for client in self.clients.values()))
        await self.begin()
        for adapter in ADAPTERS:
            await self.core.load_adapter(adapter)
        for client_id in list(self.clients):
            outbox = self.core.connect(client_id)
            self.clients[client_id] = Client(outbox, asyncio.create_task(self._read(client_id, outbox)))
            self.core.add(client_id, [asked.again() for asked in self._open(client_id)])

    async def _read(self, client_id: str, outbox: Outbox) -> None:
        with suppress(RayLMError):
            while True:
                self._take(client_id, await outbox.get())

    def _take(self, client_id: str, out: EngineCoreOutputs) -> None:
        start = 0
        for key, index, drawn, reason in zip(out.keys, out.indexes, out.token_counts, out.finish_reasons, strict=True):
            asked = self.asked[client_id, key]
            assert index not in asked.finished, "a token after the end"
            asked.tokens[index] += out.token_ids[start : start + drawn]
            start += drawn
            if reason is not None:
                asked.finished.add(index)
        for key, error in out.errors:
            asked = self.asked[client_id, key]
            assert asked.error is None, "two errors"
            asked.error = error

    # -------------------------------------------------------------- checks at the end

    async def _end(self) -> None:
        try:
            for _ in range(MOST_TURNS):
                if self.run.done() or not (self.core.has_work or self.core._in_flight):
                    break
                await asyncio.sleep(0)
            if self.run.done():
                self.run.result()
            assert not self.core.has_work, "the core still has work"
            await asyncio.gather(*self.calls)
            await turns(10)
            assert not self.core._in_flight
            check_kv(self.core.scheduler.kv)
            self.core.scheduler.kv.check_idle()
            assert not self.core.scheduler.parking._open, "parking still has open requests"
            assert len(self.core.scheduler._limits) == 0, "a time limit outlives its request"
            for client in self.clients.values():
                if client.reader.done():
                    client.reader.result()
            for asked in self.asked.values():
                asked.check()
        finally:
            tasks = [self.run, *self.calls, *(client.reader for client in self.clients.values())]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)
