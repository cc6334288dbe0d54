"""Recovery: what becomes of requests whose engine was lost; they go on on another one, from the tokens they have."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable

from raylm.errors import EngineDiedError, EngineUnavailableError, RayLMError
from raylm.messages import EngineCoreRequest

MOST_CRASHES = 3

Resume = Callable[[int], EngineCoreRequest | None]
Send = Callable[[EngineCoreRequest, str], None]
Fail = Callable[[Iterable[int], RayLMError], None]


class Recovery:
    """Requests between two engines, and those under suspicion of bringing engines down.

    ``resume`` gives a request with what it has drawn, None if its caller has gone; ``send`` hands it to an engine of
    the same fingerprint or raises EngineUnavailableError, and then it waits for one, at most ``timeout_s``.

    A request with which two engines crashed, one after the other, without a token in between is a suspect: suspects
    are sent one at a time, and one with which a third engine crashes is given up.
    """

    def __init__(self, resume: Resume, send: Send, fail: Fail, timeout_s: float) -> None:
        self._resume, self._send, self._fail, self._timeout_s = resume, send, fail, timeout_s
        self._waiting: dict[int, tuple[str, asyncio.TimerHandle]] = {}  # by key, in the order in which they came
        self._crashes: Counter[int] = Counter()  # of engines, since its last token
        self._on_trial: int | None = None

    def suspect(self, keys: Iterable[int]) -> None:
        """An engine crashed with these requests; called before they are taken."""
        self._crashes.update(keys)
        if (key := self._on_trial) is not None and self._crashes[key] >= MOST_CRASHES:
            self._fail([key], EngineDiedError(f"{MOST_CRASHES} engines crashed with this request; it is given up."))

    def take(self, keys: Iterable[int], fingerprint: str, error: RayLMError) -> None:
        """An engine of this ``fingerprint`` was lost with these; without another in time ``error`` ends them."""
        for key in keys:
            timer = asyncio.get_running_loop().call_later(self._timeout_s, self._give_up, key, error)
            self._waiting[key] = fingerprint, timer
        self.retry()

    def retry(self) -> None:
        """Send what waits: called when there is an engine more, or one has an adapter more."""
        for key in list(self._waiting):
            is_suspect = self._crashes[key] >= MOST_CRASHES - 1
            if is_suspect and self._on_trial not in (None, key):
                continue
            if self._resend(key) and is_suspect:
                self._on_trial = key

    def on_tokens(self, keys: Iterable[int]) -> None:
        """These requests have made progress; called only while ``watches``."""
        for key in keys:
            if self._crashes.pop(key, 0) and key == self._on_trial:
                self._end_trial()

    @property
    def watches(self) -> bool:
        return bool(self._crashes)

    def forget(self, key: int) -> None:
        """The request is over."""
        self._crashes.pop(key, None)
        if (waiting := self._waiting.pop(key, None)) is not None:
            waiting[1].cancel()
        if key == self._on_trial:
            self._end_trial()

    def close(self, error: RayLMError) -> None:
        """No engine will come any more."""
        for key in list(self._waiting):
            self._give_up(key, error)

    def _end_trial(self) -> None:
        self._on_trial = None
        self.retry()

    def _resend(self, key: int) -> bool:
        fingerprint, timer = self._waiting[key]
        request = self._resume(key)
        try:
            if request is not None:
                self._send(request, fingerprint)
        except EngineUnavailableError:
            return False
        except RayLMError as error:
            self._fail([key], error)
        timer.cancel()
        del self._waiting[key]
        return request is not None

    def _give_up(self, key: int, error: RayLMError) -> None:
        self._fail([key], error)
        self.forget(key)
