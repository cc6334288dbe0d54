"""StepChannel: steps and results between an EngineCore and a worker on its node, as frames on a Unix socket.

A Ray call wakes six threads of two processes, and on the cores that a model computes on each stops it. A frame wakes
one.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import pickle
import socket
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread
from typing import BinaryIO, cast

from raylm.engine.channels.frames import Frames, PrivateListener, frame, read
from raylm.errors import EngineCrashedError
from raylm.messages import ModelRunnerOutput, SchedulerOutput
from raylm.stages import about

Output = Callable[[], ModelRunnerOutput]  # waits for what a step drew

logger = logging.getLogger("raylm.engine")

_FATAL = b"Fatal Python error"  # faulthandler's first words


@dataclass(frozen=True, slots=True)
class StepFailure:
    cause: Exception
    traceback: str


Outcome = ModelRunnerOutput | StepFailure


class StepServer:
    """The worker's end: takes steps from one EngineCore in order, ``launch``es them, and sends back what they drew.

    Where outputs come later (``overlapped``, on a GPU), another thread waits for them while the next step is launched.
    """

    def __init__(self, launch: Callable[[SchedulerOutput], Output], *, overlapped: bool) -> None:
        self._launch = launch
        self._listener = PrivateListener("steps")
        self.path = self._listener.path
        serve = self._serve_overlapped if overlapped else self._serve
        Thread(target=self._accept, args=[serve], name="raylm-steps", daemon=True).start()

    def _accept(self, serve: Callable[[socket.socket, BinaryIO], None]) -> None:
        connection, _ = self._listener.socket.accept()
        self._listener.close()
        with connection, connection.makefile("rb") as steps, suppress(ConnectionError):  # the EngineCore may end first
            faulthandler.enable(connection.fileno(), all_threads=False)  # a fatal signal's traceback is the last word
            serve(connection, steps)

    def _serve(self, connection: socket.socket, steps: BinaryIO) -> None:
        while (plan := read(steps)) is not None:
            _send(connection, self._start(plan))

    def _serve_overlapped(self, connection: socket.socket, steps: BinaryIO) -> None:
        with ThreadPoolExecutor(1, thread_name_prefix="raylm-results") as sender:
            while (plan := read(steps)) is not None:
                sender.submit(_send, connection, self._start(plan))

    def _start(self, plan: SchedulerOutput) -> Output:
        try:
            return self._launch(plan)
        except Exception as error:
            failed: Future[ModelRunnerOutput] = Future()
            failed.set_exception(error)
            return failed.result


class StepClient(asyncio.Protocol):
    """The EngineCore's end, on its event loop."""

    _transport: asyncio.WriteTransport

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[Outcome]] = deque()
        self._received = Frames()

    @classmethod
    async def connect(cls, path: str) -> StepClient:
        """Connect to the worker that listens at ``path``; it takes one client, once."""
        _, client = await asyncio.get_running_loop().create_unix_connection(cls, path)
        return client

    def send(self, plan: SchedulerOutput) -> asyncio.Future[Outcome]:
        """Hand over a step at once; the future gives its outcome.

        It raises EngineCrashedError when a fatal signal (a segmentation fault) ends the worker, ConnectionError when it
        is gone for other reasons.
        """
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        if self._transport.is_closing():
            outcome.set_exception(ConnectionError("the worker has hung up"))
            return outcome
        self._waiting.append(outcome)
        self._transport.write(frame(plan))
        return outcome

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's has no class of asyncio's

    def data_received(self, data: bytes) -> None:
        outcome: Outcome
        for outcome in self._received.feed(data):  # in the order of their steps
            waiting = self._waiting.popleft()
            if not waiting.done():  # cancelled when the engine ends
                waiting.set_result(outcome)

    def connection_lost(self, exc: Exception | None) -> None:
        error: Exception = ConnectionError("the worker has hung up")
        if self._received.rest.startswith(_FATAL):
            told = self._received.rest.decode(errors="replace").strip()
            logger.error("the worker crashed\n%s", told, extra=about("worker.crashed", traceback=told))
            error = EngineCrashedError(f"The worker crashed: {told.splitlines()[0]}")
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_exception(error)


def _send(connection: socket.socket, output: Output) -> None:
    connection.sendall(frame(_outcome(output)))


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
