"""Front door of this room: the OpenAI-compatible HTTP side over an AsyncLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raylm.lazy import front_door

if TYPE_CHECKING:
    from raylm.ingress.http.api_keys import read_keys, read_named_keys
    from raylm.ingress.http.serve_errors import serve_middlewares
    from raylm.ingress.ingress import Ingress
    from raylm.ingress.responses.store import ResponseStore
    from raylm.ingress.routes import build_asgi_app

__all__ = ["Ingress", "ResponseStore", "build_asgi_app", "read_keys", "read_named_keys", "serve_middlewares"]

_HOMES = {
    "Ingress": "raylm.ingress.ingress",
    "ResponseStore": "raylm.ingress.responses.store",
    "build_asgi_app": "raylm.ingress.routes",
    "read_keys": "raylm.ingress.http.api_keys",
    "read_named_keys": "raylm.ingress.http.api_keys",
    "serve_middlewares": "raylm.ingress.http.serve_errors",
}

__getattr__ = front_door(__name__, _HOMES)
