"""How long a client waits for the first byte of its answer, by the headers that clients send of their own accord."""

from __future__ import annotations

import asyncio
import math

from starlette.datastructures import Headers

from raylm.errors import DeadlineExceededError, InvalidRequestError
from raylm.frontend import OngoingRequest

# Seconds, as OpenAI's and Anthropic's clients tell their own time limits. They may hold what is no number.
_TOLD = ("x-stainless-read-timeout", "x-stainless-timeout")
# Milliseconds, from whoever wants it: proxies, or a client that says more than its library does.
_ASKED = "request-timeout-ms"


def patience_s(headers: Headers) -> float | None:
    """Seconds until the client hangs up if nothing has come by then, None if it does not say.

    Raises:
        InvalidRequestError: ``request-timeout-ms`` is no positive number.
    """
    found = [limit for name in _TOLD if (limit := _positive(headers.get(name, ""))) is not None]
    asked = headers.get(_ASKED)
    if asked is not None:
        limit = _positive(asked)
        if limit is None:
            raise InvalidRequestError(f"The header '{_ASKED}' must be a positive number.", param=_ASKED)
        found.append(limit / 1000)
    return min(found, default=None)


class Deadline:
    """Ends a request that has not begun to answer when its client loses patience; ``keep`` it, and nothing happens."""

    def __init__(self, headers: Headers, ongoing: OngoingRequest) -> None:
        self._patience_s = patience_s(headers)
        self._ongoing = ongoing
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Deadline:
        if self._patience_s is not None:
            self._timer = asyncio.get_running_loop().call_later(self._patience_s, self._pass)
        return self

    def __exit__(self, *_: object) -> None:
        self.keep()

    def keep(self) -> None:
        """The answer begins."""
        if self._timer is not None:
            self._timer.cancel()

    def _pass(self) -> None:
        message = f"The request was given up: nothing could be answered within {self._patience_s:g} s."
        self._ongoing.interrupt(DeadlineExceededError(message))


def _positive(text: str) -> float | None:
    try:
        number = float(text) if len(text) < 20 else math.nan
    except ValueError:
        return None
    return number if math.isfinite(number) and number > 0 else None
