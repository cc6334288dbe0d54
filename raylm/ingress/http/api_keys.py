"""API keys: read from a file or an environment variable, compared in constant time, shown by their names alone."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from raylm.config import IngressConfig
from raylm.errors import AuthenticationError, ConfigError
from raylm.ingress.http.middleware import route_path

_MAX_NAME = 64
_NO_KEY = "No API key was given: send it as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'."


class APIKeys:
    """The valid keys by name; what is kept is their SHA-256, so that no dump shows one."""

    def __init__(self, keys: Iterable[tuple[str, str]]) -> None:
        self._digests = [(name, hashlib.sha256(key.encode()).digest()) for name, key in keys]

    def name_of(self, presented: Iterable[bytes]) -> str | None:
        """The name of the first known key among ``presented``; takes as long whichever it is, and if none is known."""
        found = None
        for key in presented:
            digest = hashlib.sha256(key).digest()
            for name, known in self._digests:
                if hmac.compare_digest(digest, known) and found is None:
                    found = name
        return found


def read_keys(config: IngressConfig) -> list[tuple[str, str]] | None:
    """(name, key) of the configured keys, None where no source of keys is configured.

    Both sources hold ``name: key``, one a line, in the variable also separated by commas; a key without a name is
    called by its number. Lines that begin with # are comments.

    Raises:
        ConfigError: a source is missing, empty, or holds a bad line; it names the place and never shows a key.
    """
    if config.api_keys_file is None and config.api_keys_env is None:
        return None
    keys: list[tuple[str, str]] = []
    if (path := config.api_keys_file) is not None:
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"ingress.api_keys_file: {path} cannot be read ({type(error).__name__}).") from None
        keys += _parse(text, "ingress.api_keys_file", len(keys))
    if (name := config.api_keys_env) is not None:
        if name not in os.environ:
            raise ConfigError(f"ingress.api_keys_env: the environment has no variable {name}.")
        keys += _parse(os.environ[name].replace(",", "\n"), "ingress.api_keys_env", len(keys))
    return keys


def _parse(text: str, source: str, before: int) -> list[tuple[str, str]]:
    keys: list[tuple[str, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, colon, key = line.partition(":")
        name, key = (name.strip(), key.strip()) if colon else (f"key-{before + len(keys) + 1}", line.strip())
        if not (key.isascii() and key.isprintable() and key and " " not in key):
            raise ConfigError(f"{source}: the key in line {number} is empty or not plain ASCII without spaces.")
        if not (name.isprintable() and 1 <= len(name) <= _MAX_NAME):
            raise ConfigError(f"{source}: the name in line {number} must have 1 to {_MAX_NAME} printable characters.")
        keys.append((name, key))
    if not keys:
        raise ConfigError(f"{source}: it holds no key.")
    return keys


class APIKeyMiddleware:
    """Lets no request without a valid key pass, except to the open paths; the key's name is ``scope["raylm.key"]``.

    It looks at the path that the router sees, never at Host or a URL put together from it.
    """

    def __init__(self, app: ASGIApp, keys: APIKeys, open_paths: frozenset[str]) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and route_path(scope) not in self._open_paths:
            presented = list(_presented(scope["headers"]))
            name = self._keys.name_of(presented)
            if name is None:
                raise AuthenticationError("The API key is not valid." if presented else _NO_KEY)
            scope["raylm.key"] = name
        await self._app(scope, receive, send)


def _presented(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
    for name, value in headers:
        scheme, _, key = value.strip().partition(b" ")
        if name == b"x-api-key":
            yield value.strip()
        elif name == b"authorization" and scheme.lower() == b"bearer":
            yield key.strip()
