"""Front door of the ingress: the OpenAI-compatible HTTP side over an AsyncLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raylm.lazy import front_door

if TYPE_CHECKING:
    from raylm.ingress.http.api_keys import read_keys as read_keys
    from raylm.ingress.http.api_keys import read_named_keys as read_named_keys
    from raylm.ingress.http.serve_errors import serve_middlewares as serve_middlewares
    from raylm.ingress.ingress import Ingress as Ingress
    from raylm.ingress.responses.store import ResponseStore as ResponseStore
    from raylm.ingress.routes import build_asgi_app as build_asgi_app

_MODULES = {
    "http.api_keys": ("read_keys", "read_named_keys"),
    "http.serve_errors": ("serve_middlewares",),
    "ingress": ("Ingress",),
    "responses.store": ("ResponseStore",),
    "routes": ("build_asgi_app",),
}

__getattr__ = front_door(__name__, _MODULES)
