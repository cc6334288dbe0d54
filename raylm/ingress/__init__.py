"""Front door of this room: the OpenAI-compatible HTTP side over an AsyncLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raylm.lazy import front_door

if TYPE_CHECKING:
    from raylm.ingress.http_app import build_asgi_app
    from raylm.ingress.ingress import Ingress
    from raylm.ingress.keys import read_keys, read_named_keys
    from raylm.ingress.response_store import ResponseStore
    from raylm.ingress.serve_answers import serve_middlewares

__all__ = ["Ingress", "ResponseStore", "build_asgi_app", "read_keys", "read_named_keys", "serve_middlewares"]

_HOMES = {
    "Ingress": "raylm.ingress.ingress",
    "ResponseStore": "raylm.ingress.response_store",
    "build_asgi_app": "raylm.ingress.http_app",
    "read_keys": "raylm.ingress.keys",
    "read_named_keys": "raylm.ingress.keys",
    "serve_middlewares": "raylm.ingress.serve_answers",
}

__getattr__ = front_door(__name__, _HOMES)
