"""GrammarCompiler: compiles the requested forms of answers in child processes, each form once, small forms first."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from pathlib import Path

from raylm.errors import InvalidRequestError, OverloadedError
from raylm.frontend.answers.grammar_bounds import Form, bounded_form
from raylm.frontend.answers.grammar_process import GrammarProcess
from raylm.grammar_server import Verdict
from raylm.params import StructuredOutputs

MAX_KEPT = 256
MAX_KEPT_CHARS = 2**17
_SMALL_CHARS = 2**14

Key = tuple[str, str]  # (field of StructuredOutputs, its value as JSON)


class Lane:
    """Limits concurrent jobs. Has a bounded queue, and starts the smallest waiting job next."""

    def __init__(self, places: int, max_waiting: int, cpu_s: float, nice: int) -> None:
        self.cpu_s, self.nice = cpu_s, nice
        self._free, self._max_waiting = places, max_waiting
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = count()

    @asynccontextmanager
    async def place(self, size: int) -> AsyncIterator[None]:
        """Wait for a free place. Raises OverloadedError if ``max_waiting`` jobs wait already."""
        if self._free:
            self._free -= 1
        else:
            await self._wait(size)
        try:
            yield
        finally:
            self._give_back()

    async def _wait(self, size: int) -> None:
        self._waiting = [entry for entry in self._waiting if not entry[2].done()]
        if len(self._waiting) >= self._max_waiting:
            message = f"{self._max_waiting} structured outputs are waiting to be compiled. Please try again."
            raise OverloadedError(message, retry_after_s=2)
        self._waiting.sort()
        turn = asyncio.get_running_loop().create_future()
        heappush(self._waiting, (size, next(self._order), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give_back()
            raise

    def _give_back(self) -> None:
        while self._waiting:
            turn = heappop(self._waiting)[2]
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


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
