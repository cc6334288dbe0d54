"""Steps over a Link: the EngineCore's end and the worker's, with the failures of steps and the end of the worker.

A Ray call wakes six threads of two processes, each of which interrupts the model on a core. A frame wakes one thread.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from threading import Thread

from raylm.engine.link import START_SILENCE_S, Link, Listener, ThreadLink
from raylm.errors import EngineCrashedError, EngineDiedError
from raylm.messages import ModelRunnerOutput, SchedulerOutput
from raylm.stages import about

Output = Callable[[], ModelRunnerOutput]  # waits for what a step drew

logger = logging.getLogger("raylm.engine")


@dataclass(frozen=True, slots=True)
class StepFailure:
    cause: Exception
    traceback: str


Outcome = ModelRunnerOutput | StepFailure


class StepServer:
    """The worker's end: takes steps from one EngineCore in order, ``launch``es them, and sends back what they drew.

    Where outputs come later (``is_overlapped``, on a GPU), another thread waits for them while the next step is
    launched. It is asked when the first step has come.
    """

    def __init__(self, launch: Callable[[SchedulerOutput], Output], is_overlapped: Callable[[], bool]) -> None:
        self._launch, self._is_overlapped = launch, is_overlapped
        self._listener = Listener("steps")
        self.path = self._listener.path
        Thread(target=self._accept, name="raylm-steps", daemon=True).start()

    def _accept(self) -> None:
        connection, _ = self._listener.socket.accept()
        self._listener.close()
        link = ThreadLink(connection)
        with closing(link), suppress(ConnectionError):  # the EngineCore may end first
            link.send_last_words()
            plan = link.read()
            with ThreadPoolExecutor(1, thread_name_prefix="raylm-results") as sender:
                while plan is not None:
                    output = self._start(plan)
                    if self._is_overlapped():
                        sender.submit(_send, link, output)
                    else:
                        _send(link, output)
                    plan = link.read()

    def _start(self, plan: SchedulerOutput) -> Output:
        try:
            return self._launch(plan)
        except Exception as error:
            failed: Future[ModelRunnerOutput] = Future()
            failed.set_exception(error)
            return failed.result


class StepLink:
    """The EngineCore's end, on its event loop: hands steps to one worker, and watches it.

    ``on_lost`` is called once when the worker is gone: with EngineCrashedError when a fatal signal (a segmentation
    fault) ended it. A worker that is silent is killed.
    """

    link: Link

    def __init__(self, name: str, on_lost: Callable[[EngineDiedError], None]) -> None:
        self._name, self._on_lost = name, on_lost
        self._waiting: deque[asyncio.Future[Outcome]] = deque()

    async def connect(self, path: str) -> None:
        """Connect to the worker that listens at ``path``; it takes one EngineCore, once."""
        self.link = await Link.connect(path, self._on_value, self._on_end, limit_s=START_SILENCE_S, kills=True)

    def send(self, plan: SchedulerOutput) -> asyncio.Future[Outcome]:
        """Hand over a step at once; the future gives its outcome, or raises ConnectionError if the worker is gone."""
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        if self.link.is_closed:
            outcome.set_exception(ConnectionError(f"The {self._name} is gone."))
        else:
            self._waiting.append(outcome)
            self.link.send(plan)
        return outcome

    def _on_value(self, outcome: Outcome) -> None:
        """In the order of the steps."""
        waiting = self._waiting.popleft()
        if not waiting.done():  # cancelled when the engine ends
            waiting.set_result(outcome)

    def _on_end(self, why: str) -> None:
        error = EngineDiedError(f"The {self._name} {why}.")
        if words := self.link.last_words:
            logger.error("the %s crashed\n%s", self._name, words, extra=about("worker.crashed", traceback=words))
            error = EngineCrashedError(f"The {self._name} {why}")
        error.__cause__ = ConnectionError(error.message)
        self._on_lost(error)
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_exception(error.__cause__)


def _send(link: ThreadLink, output: Output) -> None:
    link.send(_outcome(output))


def _outcome(output: Output) -> Outcome:
    try:
        return output()
    except Exception as error:
        return StepFailure(_sendable(error), traceback.format_exc())


def _sendable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
