"""GrammarCompiler: compiles the requested forms of answers in child processes, each form once, keys in turn."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from raylm.errors import InvalidRequestError, OverloadedError
from raylm.frontend.answers.grammar_bounds import Form, bounded_form
from raylm.frontend.answers.grammar_process import GrammarProcess
from raylm.frontend.timelines.record import current_key
from raylm.grammar_server import Verdict
from raylm.params import StructuredOutputs
from raylm.round_robin import RoundRobin

MAX_KEPT = 256
MAX_KEPT_CHARS = 2**17
_SMALL_CHARS = 2**14

Key = tuple[str, str]  # (field of StructuredOutputs, its value as JSON)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A waiting job: its key's name, its size and number, and the future that gives it its turn."""

    key: str
    size: int
    number: int
    turn: asyncio.Future[None]


class Lane:
    """Limits concurrent jobs. Keys get places in turn, and the smallest waiting job of a key starts next.

    At most ``max_waiting`` jobs wait. If the queue is full, a key with fewer jobs takes the place of the last job of
    the key with the most, so that one key does not turn others away.
    """

    def __init__(self, places: int, max_waiting: int, cpu_s: float, nice: int) -> None:
        self.cpu_s, self.nice = cpu_s, nice
        self._free, self._max_waiting = places, max_waiting
        self._waiting: list[_Waiting] = []
        self._turns = RoundRobin()
        self._numbers = count()

    @asynccontextmanager
    async def place(self, size: int) -> AsyncIterator[None]:
        """Wait for a free place. OverloadedError if too many jobs wait, now or once those of other keys come."""
        key = current_key()
        if self._free:
            self._free -= 1
            self._turns.choose([key])
        else:
            await self._wait(key, size)
        try:
            yield
        finally:
            self._give_back()

    async def _wait(self, key: str, size: int) -> None:
        self._waiting = [job for job in self._waiting if not job.turn.done()]
        if len(self._waiting) >= self._max_waiting:
            self._make_room(key)
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(key, size, next(self._numbers), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._give_back()
            raise

    def _make_room(self, key: str) -> None:
        counts = Counter(job.key for job in self._waiting)
        longest, most = counts.most_common(1)[0]
        if counts[key] + 1 >= most:
            raise self._full()
        last = max((job for job in self._waiting if job.key == longest), key=lambda job: (job.size, job.number))
        last.turn.set_exception(self._full())
        self._waiting.remove(last)

    def _full(self) -> OverloadedError:
        message = f"{self._max_waiting} structured outputs are waiting to be compiled. Please try again."
        return OverloadedError(message, retry_after_s=2)

    def _give_back(self) -> None:
        self._waiting = [job for job in self._waiting if not job.turn.done()]
        if not self._waiting:
            self._free += 1
            return
        key = self._turns.choose(job.key for job in self._waiting)
        following = min((job for job in self._waiting if job.key == key), key=lambda job: (job.size, job.number))
        self._waiting.remove(following)
        following.turn.set_result(None)


@dataclass(slots=True)
class _Job:
    """One form that is being compiled, and the number of callers that wait for it."""

    task: asyncio.Task[Verdict]
    waiting: int = 0


class GrammarCompiler:
    """Compiles StructuredOutputs to grammars for workers, in child processes that may crash.

    A small form first gets a short time limit, beside at most one other. If the limit ends the compilation, it is tried
    again in the lane of large forms, which runs one at a time with a longer limit. The last ``MAX_KEPT`` verdicts, good
    and bad, on forms of at most ``MAX_KEPT_CHARS`` characters are cached. Equal forms share one process, which ends
    when no caller waits for it.
    """

    def __init__(self, path: Path, eos_token_ids: tuple[int, ...]) -> None:
        self._eos_token_ids = eos_token_ids
        self._process = GrammarProcess(path, eos_token_ids)
        self._verdicts: OrderedDict[Key, Verdict] = OrderedDict()
        self._jobs: dict[Key, _Job] = {}
        self._small = Lane(places=2, max_waiting=256, cpu_s=0.06, nice=0)
        self._large = Lane(places=1, max_waiting=16, cpu_s=2.0, nice=10)

    async def compile(self, spec: StructuredOutputs) -> str:
        """Compile ``spec`` to a grammar.

        Raises:
            InvalidRequestError: the form is wrong, matches no answer, or is too complex.
            OverloadedError: too many forms wait.
        """
        if not self._eos_token_ids:
            raise _refused(spec, "this model has no token that ends an answer.")
        try:
            form = bounded_form(spec)
        except ValueError as error:
            raise _refused(spec, str(error)) from None
        key = form[0], json.dumps(form[1])
        verdict = self._verdicts.pop(key, None) or await self._shared(key, form)
        if len(key[1]) + len(verdict[0]) <= MAX_KEPT_CHARS:
            self._verdicts[key] = verdict
            if len(self._verdicts) > MAX_KEPT:
                self._verdicts.popitem(last=False)
        grammar, fault = verdict
        if fault is not None:
            raise _refused(spec, fault)
        return grammar

    def close(self) -> None:
        for job in self._jobs.values():
            job.task.cancel()
        self._process.close()

    async def _shared(self, key: Key, form: Form) -> Verdict:
        job = self._jobs.get(key)
        if job is None:
            job = self._jobs[key] = _Job(asyncio.create_task(self._prove(form, len(key[1]))))
        job.waiting += 1
        try:
            return await asyncio.shield(job.task)
        finally:
            job.waiting -= 1
            if not job.waiting or job.task.done():
                job.task.cancel()
                if self._jobs.get(key) is job:
                    del self._jobs[key]

    async def _prove(self, form: Form, size: int) -> Verdict:
        lanes = [self._small, self._large] if size <= _SMALL_CHARS else [self._large]
        for lane in lanes:
            async with lane.place(size):
                verdict = await self._process.prove(form, lane.cpu_s, lane.nice)
            if verdict is not None:
                return verdict
        return "", "it is too complex to compile."


def _refused(spec: StructuredOutputs, fault: str) -> InvalidRequestError:
    return InvalidRequestError(f"Invalid value for '{spec.param}': {fault}", param=spec.param)
