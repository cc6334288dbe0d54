"""Recovery: sends the requests of a lost engine to another engine, with the tokens drawn so far."""

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
    """Sends the requests of a lost engine to another engine.

    ``resume`` returns a request together with its drawn tokens, or None if its caller has gone. ``send`` hands the
    request to an engine of the same fingerprint. If there is no such engine, ``send`` raises EngineUnavailableError,
    and the request waits for one for at most ``timeout_s`` seconds.

    A request is suspected of crashing engines if two engines crashed in a row while they ran it and neither produced a
    token. Recovery sends suspects one at a time. If a third engine crashes, the suspect fails with EngineDiedError.
    """

    def __init__(self, resume: Resume, send: Send, fail: Fail, timeout_s: float) -> None:
        self._resume, self._send, self._fail, self._timeout_s = resume, send, fail, timeout_s
        self._waiting: dict[int, tuple[str, asyncio.TimerHandle]] = {}  # by key, in the order in which they came
        self._crashes: Counter[int] = Counter()  # of engines, since its last token
        self._on_trial: int | None = None

    def suspect(self, keys: Iterable[int]) -> None:
        """Note that an engine crashed while it ran these requests. Call it before ``take``."""
        self._crashes.update(keys)
        if (key := self._on_trial) is not None and self._crashes[key] >= MOST_CRASHES:
            self._fail(
                [key],
                EngineDiedError(f"This request was stopped because {MOST_CRASHES} engines crashed while running it."),
            )

    def take(self, keys: Iterable[int], fingerprint: str, error: RayLMError) -> None:
        """Send the requests of a lost engine to another of this ``fingerprint``; ``error`` ends them if none comes."""
        for key in keys:
            timer = asyncio.get_running_loop().call_later(self._timeout_s, self._give_up, key, error)
            self._waiting[key] = fingerprint, timer
        self.retry()

    def retry(self) -> None:
        """Send the waiting requests. Call it when an engine has started or has loaded an adapter."""
        for key in list(self._waiting):
            is_suspect = self._crashes[key] >= MOST_CRASHES - 1
            if is_suspect and self._on_trial not in (None, key):
                continue
            if self._resend(key) and is_suspect:
                self._on_trial = key

    def on_tokens(self, keys: Iterable[int]) -> None:
        """Clear the suspicion of requests that got tokens. Call it only while ``watches``."""
        for key in keys:
            if self._crashes.pop(key, 0) and key == self._on_trial:
                self._end_trial()

    @property
    def watches(self) -> bool:
        return bool(self._crashes)

    def forget(self, key: int) -> None:
        """Drop a request that has ended."""
        self._crashes.pop(key, None)
        if (waiting := self._waiting.pop(key, None)) is not None:
            waiting[1].cancel()
        if key == self._on_trial:
            self._end_trial()

    def close(self, error: RayLMError) -> None:
        """Fail all waiting requests with ``error``."""
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
