"""SimulatedIngress: a Router and an Admission in virtual time. Records the results of its requests."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from itertools import compress, count
from math import log10

from raylm.config import IngressConfig
from raylm.engine import EngineCore
from raylm.errors import OverloadedError, RayLMError
from raylm.frontend import Admission, LocalEngineClient, Reservation, Route, RoutedEngine, RoutedPrompt, Router
from raylm.messages import EngineCoreOutputs, EngineCoreRequest, EngineInfo, EngineStats, ServiceLevel
from raylm.params import SamplingParams
from raylm.simulate.trace import SimulatedRequest

ITL_STEPS = 200  # intervals in a factor of 10: times are counted with an error of at most 0.6 %


@dataclass(slots=True, eq=False)
class Served:
    """A request that arrived ``at`` some time, the times of its first and last token (-1 before), or its ``error``.

    There may be a million of these objects, so they do not store tokens.
    """

    at: float
    key: str
    prompt_tokens: int
    output_tokens: int
    engine: str = ""
    first_s: float = -1.0
    last_s: float = -1.0
    cached_tokens: int = 0
    error: str = ""


@dataclass(slots=True, eq=False)
class SimulatedPrompt(RoutedPrompt):
    """A request at an engine. ``on_error`` is called if it fails. ``num_drawn`` counts tokens if engines may end.

    ``starting`` has the keys of the ingress's requests without a token.
    """

    simulated: SimulatedRequest
    served: Served
    reservation: Reservation
    on_error: Callable[[SimulatedPrompt, RayLMError], None]
    num_drawn: Callable[[int], int]
    starting: set[int]

    def on_sent(self, route: Route) -> None:
        self.served.engine = route.engine.client.info.engine_id
        if self.served.first_s < 0:
            self.starting.add(self.request.key)

    def resumed(self) -> EngineCoreRequest:
        answer, number = self.simulated.answer, self.num_drawn(self.request.key)
        drawn = (answer + answer[-1:] * (number - len(answer)))[:number]
        return replace(self.request, drawn=(tuple(drawn),))

    def fail(self, error: RayLMError) -> None:
        if not self.finished:
            self.finished = True
            self.on_error(self, error)


class StaleClient(LocalEngineClient):
    """A client whose tokens arrive at once, and whose reports on cache and load arrive ``staleness_s`` later."""

    def __init__(self, core: EngineCore, info: EngineInfo, staleness_s: float) -> None:
        super().__init__(core, info)
        self._staleness_s = staleness_s
        self.closed = False
        self._told = EngineStats(), 0.0
        self._news: deque[tuple[float, EngineCoreOutputs]] = deque()  # with the time of arrival

    async def outputs(self) -> AsyncIterator[EngineCoreOutputs]:
        clock = asyncio.get_running_loop().time
        async for fresh in super().outputs():
            news = EngineCoreOutputs(
                *([], [], [], [], [], [], []), fresh.stats, blocks=fresh.blocks, created=fresh.created
            )
            self._news.append((clock() + self._staleness_s, news))
            if fresh.keys or fresh.errors or fresh.draining:
                stats, created = self._told
                yield EngineCoreOutputs(
                    fresh.keys, fresh.indexes, fresh.token_counts, fresh.token_ids, fresh.finish_reasons,
                    fresh.stop_reasons, fresh.cached_tokens, stats, errors=fresh.errors, created=created,
                    draining=fresh.draining,
                )  # fmt: skip

    async def close(self) -> None:
        self.closed = True
        await super().close()

    def due(self, now: float) -> Iterator[EngineCoreOutputs]:
        """The reports that have arrived by now, each once. Called only when a request is routed."""
        news = self._news
        while news and news[0][0] <= now:
            _, told = news.popleft()
            self._told = told.stats, told.created
            yield told


def _only(keys: Set[int], outputs: EngineCoreOutputs) -> EngineCoreOutputs:
    """Without the tokens of requests that another engine has now."""
    kept = [key in keys for key in outputs.keys]
    return replace(
        outputs,
        keys=list(compress(outputs.keys, kept)),
        cached_tokens=list(compress(outputs.cached_tokens, kept)),
        finish_reasons=list(compress(outputs.finish_reasons, kept)),
    )


class SimulatedIngress:
    """Routes requests like an ingress replica of that ``rank``, and records results.

    ``on_end`` is called once with each request. ``intervals`` counts the times between two tokens of a request, by
    ``ITL_STEPS`` times their decimal logarithm in seconds, rounded. If the fleet ``scales``, engines may end, and other
    engines continue their requests.
    """

    def __init__(
        self,
        config: IngressConfig,
        on_end: Callable[[Served, SimulatedRequest], None],
        rng: random.Random,
        router: Callable[..., Router[SimulatedPrompt]] = Router,
        rank: int = 0,
        *,
        scales: bool = False,
    ) -> None:
        self.clock = asyncio.get_running_loop().time
        self.router = router(self._deliver, clock=self.clock, rng=rng, rank=rank, explains=False)
        self.intervals: Counter[int] = Counter()
        self._admission = Admission(config.max_queued_requests, config.max_queued_tokens, clock=self.clock)
        self._on_end = on_end
        self._starting: set[int] = set()
        self._newest: dict[int, float] = {}  # time of the newest token of a request that is decoded
        self._drawn: Counter[int] | None = Counter() if scales else None  # tokens of open requests
        self._keys = count()
        self._params: dict[int, SamplingParams] = {}
        self._stale: list[tuple[StaleClient, RoutedEngine]] = []

    def add(self, client: LocalEngineClient) -> None:
        engine = self.router.add(client)
        if isinstance(client, StaleClient):
            self._stale = [(known, its) for known, its in self._stale if not known.closed]
            self._stale.append((client, engine))

    def arrive(self, request: SimulatedRequest, seed: int) -> None:
        """Process the arrival of a request. ``seed`` identifies it in the executors."""
        key = next(self._keys)
        served = Served(request.at, request.key, len(request.prompt), request.output_tokens)
        try:
            reservation = self._admission.prompt(len(request.prompt), 1)
        except OverloadedError as error:
            self._refuse(request, served, error)
            return
        asked = EngineCoreRequest(
            key, str(key), request.prompt, self._sampling(request, seed), priority=request.priority,
            arrival_time=request.at, service=ServiceLevel(tenant=request.key),
        )  # fmt: skip
        for client, engine in self._stale:
            for news in client.due(self.clock()):
                engine.on_outputs(news, self.clock())
        route = self.router.pick(asked)
        sent = SimulatedPrompt(asked, request, served, reservation, self._fail, self._num_drawn, self._starting)
        self.router.send(sent, route)

    def _sampling(self, request: SimulatedRequest, seed: int) -> SamplingParams:
        """Checking parameters takes longer than a step. So requests with seed 0 and equal length share them."""
        params = self._params.get(request.output_tokens) if seed == 0 else None
        if params is None:
            params = SamplingParams(max_tokens=request.output_tokens, seed=seed, ignore_eos=True)
            if seed == 0:
                self._params[request.output_tokens] = params
        return params

    def _deliver(self, prompts: Mapping[int, SimulatedPrompt], outputs: EngineCoreOutputs) -> list[tuple[int, int]]:
        if self._drawn is not None and not prompts.keys() >= set(outputs.keys):
            outputs = _only(prompts.keys(), outputs)
        now, keys, newest = self.clock(), outputs.keys, self._newest
        for key in self._starting & set(keys) if self._starting else ():
            self._begin(prompts[key], outputs.cached_tokens[keys.index(key)], now)
        for before, number in Counter(map(newest.get, keys)).items():
            if before is not None and now > before:
                self.intervals[round(ITL_STEPS * log10(now - before))] += number
        newest.update(dict.fromkeys(keys, now))
        if self._drawn is not None:
            self._drawn.update(keys)
        if any(outputs.finish_reasons):
            for key, reason in zip(keys, outputs.finish_reasons, strict=True):
                if reason is not None:
                    self._end(prompts[key], now)
        for key, error in outputs.errors:
            prompts[key].fail(error)
        return []

    def _num_drawn(self, key: int) -> int:
        return 0 if self._drawn is None else self._drawn[key]

    def _begin(self, prompt: SimulatedPrompt, cached_tokens: int, now: float) -> None:
        self._starting.remove(prompt.request.key)
        prompt.served.first_s, prompt.served.cached_tokens = now, cached_tokens
        prompt.reservation.begin([0])

    def _end(self, prompt: SimulatedPrompt, now: float) -> None:
        del self._newest[prompt.request.key]
        prompt.finished, prompt.served.last_s = True, now
        self._leave(prompt)
        self._on_end(prompt.served, prompt.simulated)

    def _fail(self, prompt: SimulatedPrompt, error: RayLMError) -> None:
        self._starting.discard(prompt.request.key)
        self._newest.pop(prompt.request.key, None)
        self._leave(prompt)
        self._refuse(prompt.simulated, prompt.served, error)

    def _leave(self, prompt: SimulatedPrompt) -> None:
        prompt.reservation.release()
        if self._drawn is not None:
            self._drawn.pop(prompt.request.key, None)
        self.router.leave(prompt, abort=False)

    def _refuse(self, request: SimulatedRequest, served: Served, error: RayLMError) -> None:
        served.error = type(error).__name__
        self._on_end(served, request)
