"""The HTTP side over an AsyncLLM: OpenAI's API, Anthropic's, and what operators ask."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raylm.lazy import front_door

if TYPE_CHECKING:
    from raylm.ingress.http.api_keys import read_keys
    from raylm.ingress.http.middleware import serve_middlewares
    from raylm.ingress.ingress import SHARED_ACTORS, Ingress
    from raylm.ingress.routes import build_asgi_app

__all__ = ["SHARED_ACTORS", "Ingress", "build_asgi_app", "read_keys", "serve_middlewares"]

_HOMES = {
    "SHARED_ACTORS": "raylm.ingress.ingress",
    "Ingress": "raylm.ingress.ingress",
    "build_asgi_app": "raylm.ingress.routes",
    "read_keys": "raylm.ingress.http.api_keys",
    "serve_middlewares": "raylm.ingress.http.middleware",
}

__getattr__ = front_door(__name__, _HOMES)
