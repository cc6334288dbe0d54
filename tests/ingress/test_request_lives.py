"""All counters of a replica are zero after any history of requests: a state machine over the whole app."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import orjson
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from raylm.config import Config
from raylm.errors import CancelledRequestError, DeadlineExceededError
from raylm.frontend import Admission, AsyncLLM, Filter, Record, Requests, StateClient
from raylm.ingress import build_asgi_app
from raylm.ingress.callers import Callers
from raylm.ingress.handle_calls import HandleCalls
from raylm.ingress.http.endpoint import JSONEndpoint
from raylm.ingress.responses import create
from raylm.ingress.responses.create import CreateResponse
from raylm.ingress.responses.store import LEASE_S
from raylm.ingress.routes import Surroundings
from raylm.params import SamplingParams
from tests.frontend.played_engine import PlayedEngine
from tests.ingress.writing_engine import TOKENIZER

T = TypeVar("T")

MODEL: dict[str, Any] = {"model": "embedded"}
TEXT = MODEL | {"prompt": [5, 6, 7], "max_tokens": 9}
HI = [{"role": "user", "content": "Hi"}]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "whole": ("/v1/completions", TEXT),
    "stream": ("/v1/completions", TEXT | {"stream": True, "n": 2}),
    "prompts": ("/v1/completions", TEXT | {"prompt": [[5, 6], [7, 8]], "stream": True}),
    "chat": ("/v1/chat/completions", MODEL | {"messages": HI, "max_tokens": 9, "stream": True}),
    "vectors": ("/v1/embeddings", MODEL | {"input": [[5, 6], [7]]}),
    "wrong": ("/v1/completions", TEXT | {"n": 0}),
    "job": ("/v1/responses", MODEL | {"input": "Hi", "background": True, "max_output_tokens": 9}),
    "followed job": (
        "/v1/responses", MODEL | {"input": "Hi", "background": True, "max_output_tokens": 9, "stream": True},
    ),
}  # fmt: skip
# States that a request leaves without waiting for anyone.
PASSING = {"admission", "parse", "template", "tokenize", "compile", "route"}
KEYS = "alice: sk-alice tokens_per_minute=100000 concurrency=5\nbob: sk-bob\n"


class Client:
    """An HTTP connection. The test decides when the body is sent and the answer is read."""

    def __init__(self, app: Any, number: int, kind: str, key: str) -> None:
        path, body = KINDS[kind]
        self.id, self.key, self.kind = f"r{number}", key, kind
        self._body = orjson.dumps(body)
        self._inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.reads = asyncio.Event()
        self.reads.set()
        self.is_whole = self.left = False
        headers = [
            (b"host", b"localhost"), (b"content-type", b"application/json"), (b"x-api-key", f"sk-{key}".encode()),
            (b"x-request-id", self.id.encode()),
        ]  # fmt: skip
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
                 "root_path": "", "headers": headers, "client": ("127.0.0.1", 9), "server": ("localhost", 80),
                 "scheme": "http", "http_version": "1.1"}  # fmt: skip
        self.task = asyncio.create_task(self._ask(app, scope))

    async def _ask(self, app: Any, scope: dict[str, Any]) -> None:
        async def send(_: Any) -> None:
            await self.reads.wait()

        with suppress(Exception):  # the answer had begun
            await app(scope, self._inbox.get, send)

    def write(self, *, rest: bool) -> None:
        """Send half of the remaining body, or all of it."""
        size = len(self._body) if rest else len(self._body) // 2
        part, self._body, self.is_whole = self._body[:size], self._body[size:], rest
        self._inbox.put_nowait({"type": "http.request", "body": part, "more_body": not rest})

    def leave(self) -> None:
        self.left = True
        self.reads.set()
        self._inbox.put_nowait({"type": "http.disconnect"})


class Lives(RuleBasedStateMachine):
    """Requests over HTTP, by handle and in the background, on one AsyncLLM with played engines."""

    run: ClassVar[Callable[[Coroutine[Any, Any, Any]], Any]]
    llm: ClassVar[AsyncLLM]
    config: ClassVar[Config]

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[Record] = []
        self.clients: list[Client] = []
        self.calls: list[asyncio.Task[None]] = []
        self.pace: list[asyncio.Event] = []
        self.num_opened = 0
        self.turns: int | None = None  # turns of the event loop until the next rule; None: until every request waits
        Lives.run(self._begin())

    async def _begin(self) -> None:
        self.state = StateClient()
        self.app = build_asgi_app(self.llm, self.config, None, Surroundings(state=self.state))
        self.llm.timelines.observers = (self,)  # type: ignore[assignment]
        self.requests: Requests = self.app.state.requests
        take_over, _ = self.app.state.jobs
        self.responses: CreateResponse = take_over.__self__
        self.alive: set[object] = {None, "caller"}
        self.callers = Callers(lambda ref: ref in self.alive, period_s=0.0)
        self.handles = HandleCalls(self.llm, self.config, self.requests, self.callers)
        self._add_engine()

    def _add_engine(self) -> None:
        vocab_size = TOKENIZER.get_vocab_size()
        self.engine = PlayedEngine(f"e{id(object())}", max_model_len=4096, vocab_size=vocab_size)
        self.llm.add_engine(self.engine)

    def __call__(self, raw: Any, record: Record) -> None:
        """Observe the end of a request."""
        self.ended.append(record)

    def close(self, timeout_s: float) -> None: ...

    async def _settle(self, condition: Callable[[], bool] = lambda: True) -> None:
        """Wait until each request waits for an event."""
        async with asyncio.timeout(60):
            for _ in range(3):
                while True:
                    for _ in range(20):
                        await asyncio.sleep(0)
                    await self.responses._store._do(lambda: None)
                    in_flight = self.llm.timelines.listed(Filter(None, "in_flight", limit=1000))
                    if condition() and not any(orjson.loads(line)["state"] in PASSING for _, line in in_flight):
                        break
                    await asyncio.sleep(0.001)

    def _do(self, work: Callable[[], object], condition: Callable[[], bool] = lambda: True) -> None:
        async def step() -> None:
            work()
            turns, self.turns = self.turns, None
            if turns is None:
                await self._settle(condition)
            for _ in range(turns or 0):
                await asyncio.sleep(0)

        Lives.run(step())

    def _say(self, number: int, reason: Any) -> None:
        if self.engine.added:
            request = self.engine.added[number % len(self.engine.added)]
            if request.pooling is not None:
                self.engine.say(pooled=[(request.key, b"\0" * 4)])
            else:
                self.engine.say(*((request.key, index, [300], reason) for index in range(request.params.n)))

    def _client(self, number: int) -> Client:
        return self.clients[number % len(self.clients)]

    @rule(kind=st.sampled_from(sorted(KINDS)), key=st.sampled_from(["alice", "alice", "bob", "mallory"]))
    def open(self, kind: str, key: str) -> None:
        self._do(lambda: self.clients.append(Client(self.app, len(self.clients), kind, key)))
        self.num_opened += key != "mallory"

    @rule(kind=st.sampled_from(sorted(KINDS)), key=st.sampled_from(["alice", "bob"]))
    def ask(self, kind: str, key: str) -> None:
        self.open(kind, key)
        self._do(lambda: self.clients[-1].write(rest=True))

    @rule(pick=st.integers(0, 9), rest=st.booleans())
    @precondition(lambda self: self.clients)
    def read(self, pick: int, rest: bool) -> None:
        client = self._client(pick)
        if not client.is_whole:
            self._do(lambda: client.write(rest=rest))

    @rule(pick=st.integers(0, 9))
    @precondition(lambda self: self.clients)
    def stop_or_go_on_reading(self, pick: int) -> None:
        reads = self._client(pick).reads
        self._do(reads.clear if reads.is_set() else reads.set)

    @rule(by=st.sampled_from([None, "caller", "gone"]), stream=st.booleans(), wrong=st.booleans())
    def call(self, by: Any, stream: bool, wrong: bool) -> None:
        self.alive.add(by)
        pace = asyncio.Event()
        self.pace.append(pace)
        fields: dict[str, Any] = {"logprobs": "no"} if wrong else {}

        async def work() -> None:
            if not stream:
                await self.handles.reply(by, HI, SamplingParams(max_tokens=9), **fields)
                return
            outputs: AsyncGenerator[Any, None] = self.handles.generate(by, [5, 6, 7], max_tokens=9, **fields)
            try:
                async for _ in outputs:
                    await pace.wait()
            finally:
                await outputs.aclose()

        self._do(lambda: self.calls.append(asyncio.create_task(work())))
        self.num_opened += 1

    @rule(pick=st.integers(0, 9))
    @precondition(lambda self: self.calls)
    def read_or_drop_call(self, pick: int) -> None:
        place = pick % len(self.calls)
        self._do(self.calls[place].cancel if self.pace[place].is_set() else self.pace[place].set)

    @rule()
    def lose_caller(self) -> None:
        gone = self.callers._requests.get("gone", set())
        self._do(lambda: self.alive.discard("gone"), lambda: all(one._work._reason is not None for one in gone))

    @rule(pick=st.integers(0, 99))
    def token(self, pick: int) -> None:
        self._do(lambda: self._say(pick, None))

    @rule(pick=st.integers(0, 99), reason=st.sampled_from(["stop", "length"]))
    def last_token(self, pick: int, reason: str) -> None:
        self._do(lambda: self._say(pick, reason))

    @rule(pick=st.integers(0, 9))
    @precondition(lambda self: self.clients)
    def disconnect(self, pick: int) -> None:
        self._do(self._client(pick).leave)

    @rule(pick=st.integers(0, 9))
    def deadline(self, pick: int) -> None:
        found = sorted(self.requests._connected, key=lambda request: request.id)
        if found:
            self._do(lambda: found[pick % len(found)].hang_up(DeadlineExceededError("late")))

    @rule(turns=st.integers(0, 40))
    def hurry(self, turns: int) -> None:
        """Run the next rule after ``turns`` turns of the event loop."""
        self.turns = turns

    @rule(pick=st.integers(0, 9))
    @precondition(lambda self: self.clients)
    def cancel(self, pick: int) -> None:
        self._do(lambda: self.llm.timelines.end(self._client(pick).id, None, lambda: CancelledRequestError("enough")))

    @rule()
    def lose_engine(self) -> None:
        def work() -> None:
            lost = self.engine
            self._add_engine()
            lost.die()

        self._do(work)

    @rule()
    def lose_makers(self) -> None:
        """Another maker takes over this replica's background responses, while the former maker continues."""

        async def work() -> None:
            database, store = self.responses._store._database, self.responses._store  # type: ignore[attr-defined]
            gone = "UPDATE responses SET lease = lease - ?, maker = 'gone'"
            await store._do(lambda: database.execute(gone, (2 * LEASE_S,)))
            await self.responses.take_over_once()
            await self._settle()

        Lives.run(work())

    @rule()
    @precondition(lambda self: len(self.clients) > 6)
    def drain(self) -> None:
        Lives.run(self.requests.drain(0.0))
        Lives.run(self._settle())

    def teardown(self) -> None:
        for client in self.clients:
            client.leave()
        for pace in self.pace:
            pace.set()
        Lives.run(self._end())

    async def _end(self) -> None:
        await self._settle()
        async with asyncio.timeout(60):
            while self.responses._background or not all(task.done() for task in self.calls):
                for place, request in enumerate(self.engine.added):
                    self._say(place, "stop")
                    del request
                await self._settle()
        await asyncio.gather(*self.calls, *(client.task for client in self.clients), return_exceptions=True)
        await self._check()
        self.engine.die()
        await self.state.close()
        self.responses._store._thread.shutdown()  # type: ignore[attr-defined]

    async def _check(self) -> None:
        llm, requests = self.llm, self.requests
        assert (llm.admission.requests, llm.admission.tokens) == (0, 0)
        assert not llm.admission._requests_of
        assert (requests.num_ongoing, requests._counted, requests._connected) == (0, set(), set())
        assert requests._idle.is_set()
        endpoints = [route.app for route in self.app.routes if isinstance(getattr(route, "app", None), JSONEndpoint)]
        assert endpoints
        assert {(len(one.bodies._sizes), one.bodies._size) for one in endpoints} == {(0, 0)}
        assert not llm._router.num_prompts
        assert not llm._router._recovery._waiting
        assert not self.callers._requests
        rows = self.state._rows._own
        assert all((row.open, row.reserved) == (0, 0) for row in rows.values())
        assert not llm.timelines.listed(Filter(None, "in_flight"))
        assert len({*map(id, self.ended)}) == len(self.ended), "a timeline ended twice"
        first = [record for record in self.ended if record.id.startswith(("r", "handle"))]
        by_id = {record.id: record for record in first}
        assert len(by_id) == self.num_opened, "each request needs a timeline"
        billed = sum(sum(part.charged()) for one in self.ended if one.key == "alice" for part in one.parts)
        counted = sum(rows["alice"].tokens.values()) if "alice" in rows else 0
        assert billed == counted


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(create, "_KEPT_EACH_S", 0.0)
    (tmp_path / "keys").write_text(KEYS)
    bounds = {"api_keys_file": str(tmp_path / "keys"), "max_ongoing_requests": 8}
    with asyncio.Runner() as runner:

        async def make() -> AsyncLLM:
            return AsyncLLM(Lives.config, Admission(12, 400), recovery_timeout_s=60.0)

        Lives.run = runner.run  # type: ignore[assignment]
        Lives.config = Config.model_validate({"model": "embedded", "ingress": bounds})
        Lives.llm = runner.run(make())
        yield
        runner.run(Lives.llm.stop())


@pytest.mark.usefixtures("world")
def test_every_account_is_at_zero_after_every_history() -> None:
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        Lives, settings=settings(max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=checks)
    )
