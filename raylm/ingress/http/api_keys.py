"""API keys: read from a file or an environment variable, compared in constant time, and logged only by name."""

from __future__ import annotations

import hashlib
import hmac
import math
import os
import platform
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from raylm.config import API_KEY_VARIABLE, IngressConfig
from raylm.errors import AuthenticationError, ConfigError
from raylm.frontend import ApiKey, KeyLimits, StateClient
from raylm.ingress.http.errors import logger, route_path
from raylm.ingress.http.exchange import exchange_of
from raylm.stages import about

CHECK_S = 1.0  # between checks of the file
_MAX_NAME = 64
_MAX_WEIGHT = 1000.0
_NO_KEY = "No API key was given: send it as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'."
_BOUNDS = ("requests_per_minute", "tokens_per_minute", "concurrency", "max_output")
_TARGETS = ("ttft_ms", "itl_ms")
_OPTIONS = "weight=NUMBER, " + ", ".join(f"{name}=NUMBER" for name in _BOUNDS + _TARGETS) + ", admin"

_Named = list[tuple[ApiKey, str]]


class APIKeys:
    """The valid keys. Only their SHA-256 is kept, so that a memory dump shows no key.

    The file is read again after a change. If it has an error, the error is logged and the old keys stay valid.
    """

    def __init__(self, config: IngressConfig, policy: str = "fair", share_prefixes: bool = False) -> None:
        """Read the keys.

        Args:
            share_prefixes: Whether several keys may share the prefix cache.

        Raises:
            ConfigError: As for ``read_keys``, or there is no key.
        """
        self._config = config
        self._policy = policy
        self._share_prefixes = share_prefixes
        self._seen = self._file_state()
        self._looked = time.monotonic()
        self._digests = self._read()

    def __len__(self) -> int:
        return len({key.name for key, _ in self._digests})

    def find(self, presented: Iterable[bytes]) -> ApiKey | None:
        """Return the first known key among ``presented``.

        The time does not depend on which key is known, or whether any is.
        """
        self._look_again()
        found = None
        for key in presented:
            digest = hashlib.sha256(key).digest()
            for known, known_digest in self._digests:
                if hmac.compare_digest(digest, known_digest) and found is None:
                    found = known
        return found

    def _look_again(self) -> None:
        if time.monotonic() - self._looked < CHECK_S:
            return
        self._looked = time.monotonic()
        if (state := self._file_state()) == self._seen:
            return
        self._seen = state
        try:
            self._digests = self._read()
            logger.info("reloaded the API keys: %d keys", len(self._digests), extra=about("api_keys"))
        except ConfigError as error:
            logger.error(
                "the API keys were not reloaded, old keys stay valid: %s", error.message, extra=about("api_keys")
            )

    def _read(self) -> list[tuple[ApiKey, bytes]]:
        named = read_keys(self._config, self._policy) or []
        apart = not self._share_prefixes and _num_names(named) > 1
        return [(replace(key, own_prefixes=apart), hashlib.sha256(text.encode()).digest()) for key, text in named]

    def _file_state(self) -> tuple[int, int, int] | None:
        if self._config.api_keys_file is None:
            return None
        try:
            found = os.stat(self._config.api_keys_file)
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size


def _num_names(named: _Named) -> int:
    return len({key.name for key, _ in named})


def read_keys(config: IngressConfig, policy: str = "fair") -> _Named | None:
    """Read the configured keys. Returns None if no source of keys is configured.

    Both sources hold ``name: key`` pairs: one in each line, and in the variable also separated by commas. The variable
    API_KEY_VARIABLE holds one key. For example:

        alice: sk-abc weight=2 requests_per_minute=60 tokens_per_minute=100000
        bob: sk-def concurrency=8 max_output=1000 ttft_ms=500 itl_ms=50 admin

    A key without a name gets its number as its name. Options follow the key in any order. A line that begins with # is
    a comment. Several keys with the same name share the limits of that name, which must be equal. If there is only one
    key, it is an admin key.

    Raises:
        ConfigError: A source is missing, empty, or has a bad line, or the scheduler's ``policy`` ignores a target of a
            key. The error names the line and never shows a key.
    """
    if config.api_keys_file is None and config.api_keys_env is None:
        return None
    keys: _Named = []
    if (path := config.api_keys_file) is not None:
        try:
            text = Path(path).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"ingress.api_keys_file: {path} cannot be read on {platform.node()} ({type(error).__name__}); on a "
                "cluster every node needs it."
            ) from None
        keys += _parse(text, "ingress.api_keys_file", keys)
    if (name := config.api_keys_env) is not None:
        if name not in os.environ:
            raise ConfigError(f"ingress.api_keys_env: the environment has no variable {name}.")
        if name == API_KEY_VARIABLE:
            keys += _only(os.environ[name].strip(), keys)
        else:
            keys += _parse(os.environ[name].replace(",", "\n"), "ingress.api_keys_env", keys)
    if policy != "fair" and (of := next((key.name for key, _ in keys if key.ttft_s is not None), None)) is not None:
        raise ConfigError(f"ttft_ms of the key '{of}': needs scheduler.policy: fair, not {policy}.")
    if _num_names(keys) == 1:
        keys = [(replace(key, admin=True), text) for key, text in keys]
    return keys


def _only(key: str, before: _Named) -> _Named:
    if not key.isascii() or key.split() != [key] or not key.isprintable():
        raise ConfigError(f"{API_KEY_VARIABLE}: it must be one key, of plain ASCII without white space.")
    return [(ApiKey(f"key-{len(before) + 1}"), key)]


def _parse(text: str, source: str, before: _Named) -> _Named:
    keys: _Named = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, colon, rest = line.partition(":")
        name, rest = (name.strip(), rest) if colon else (f"key-{len(before) + len(keys) + 1}", line)
        key, *options = rest.split() or [""]
        if not (key.isascii() and key.isprintable() and key):
            raise ConfigError(f"{source}: the key in line {number} is empty or not plain ASCII.")
        if not (name.isprintable() and 1 <= len(name) <= _MAX_NAME):
            raise ConfigError(f"{source}: the name in line {number} must have 1 to {_MAX_NAME} printable characters.")
        described = _described(name, options, f"{source}: line {number}: ")
        if any(other.name == name and other != described for other, _ in (*before, *keys)):
            raise ConfigError(f"{source}: line {number}: another key has this name and different options.")
        keys.append((described, key))
    if not keys:
        raise ConfigError(f"{source}: contains no key.")
    return keys


def _described(name: str, options: list[str], where: str) -> ApiKey:
    """Parse the options of a key. An error does not show them, because an option may be a part of the key."""
    given: dict[str, str] = {}
    for place, option in enumerate(options, 1):
        what, _, value = option.partition("=")
        known = ("weight", "admin", *_BOUNDS, *_TARGETS)
        if what in given or what not in known or (what == "admin") != (option == "admin"):
            raise ConfigError(f"{where}option {place} is unknown or repeated. Options: {_OPTIONS}.")
        given[what] = value
    for what in _BOUNDS:
        if not given.get(what, "1").isascii() or not given.get(what, "1").isdecimal() or int(given.get(what, "1")) < 1:
            raise ConfigError(f"{where}{what} must be a whole number, 1 or more.")
    weight = _number(given.get("weight", "1"))
    if not 1 / _MAX_WEIGHT <= weight <= _MAX_WEIGHT:
        raise ConfigError(f"{where}weight must be a number between {1 / _MAX_WEIGHT:g} and {_MAX_WEIGHT:g}.")
    ttft_s, itl_s = (_number(given[what]) / 1000 if what in given else None for what in _TARGETS)
    for what, target_s in zip(_TARGETS, (ttft_s, itl_s), strict=True):
        if target_s is not None and not 0 < target_s < math.inf:
            raise ConfigError(f"{where}{what} must be a positive number of milliseconds.")
    bounds = {what: int(given[what]) for what in _BOUNDS if what in given}
    max_output = bounds.pop("max_output", None)
    return ApiKey(name, weight, KeyLimits(**bounds), max_output, "admin" in given, ttft_s, itl_s)


def _number(text: str) -> float:
    """Parse a number. Returns 0 if ``text`` is not a number."""
    try:
        return float(text)
    except ValueError:
        return 0.0


class APIKeyMiddleware:
    """Refuses every request without a valid key, except requests to the open paths.

    The Exchange gets the ApiKey, and for a limited key the function that makes the rate limit headers of the answer.

    The middleware checks the path that the router uses. It never uses the Host header or a URL made from it.
    """

    def __init__(self, app: ASGIApp, keys: APIKeys, open_paths: frozenset[str], state: StateClient) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and route_path(scope) not in self._open_paths:
            presented = list(_presented(scope["headers"]))
            key = self._keys.find(presented)
            if key is None:
                raise AuthenticationError("The API key is not valid." if presented else _NO_KEY)
            exchange = exchange_of(scope)
            exchange.key = key
            if key.limits != KeyLimits():
                exchange.answer_headers = partial(rate_limit_headers, key, self._state)
        await self._app(scope, receive, send)


def rate_limit_headers(key: ApiKey, state: StateClient) -> list[tuple[bytes, bytes]]:
    """OpenAI's ``x-ratelimit-…`` headers: limit, remaining amount and time to the full limit.

    The numbers are from the key's newest request in this replica. Without such a request they are the key's limits.
    """
    found, headers = state.standing(key.name), []
    for kind, limit in (("requests", key.limits.requests_per_minute), ("tokens", key.limits.tokens_per_minute)):
        if limit is None:
            continue
        remaining = getattr(found, f"remaining_{kind}", None)
        reset_s = getattr(found, f"reset_{kind}_s", None) or 0.0
        told = {"limit": limit, "remaining": limit if remaining is None else remaining, "reset": _duration(reset_s)}
        headers += [(f"x-ratelimit-{what}-{kind}".encode(), str(value).encode()) for what, value in told.items()]
    return headers


def _duration(seconds: float) -> str:
    """Format a duration as OpenAI does: 250ms, 12.5s."""
    return f"{math.ceil(seconds * 1000)}ms" if seconds < 1 else f"{seconds:.3f}".rstrip("0").rstrip(".") + "s"


def _presented(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
    for name, value in headers:
        scheme, _, key = value.strip().partition(b" ")
        if name == b"x-api-key":
            yield value.strip()
        elif name == b"authorization" and scheme.lower() == b"bearer":
            yield key.strip()
