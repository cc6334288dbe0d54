"""Front door of the ingress: the HTTP side over an AsyncLLM, and the Serve deployment that it runs in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raylm.lazy import front_door

if TYPE_CHECKING:
    from raylm.ingress.http.api_keys import read_keys as read_keys
    from raylm.ingress.http.middleware import serve_middlewares as serve_middlewares
    from raylm.ingress.ingress import SHARED_ACTORS as SHARED_ACTORS
    from raylm.ingress.ingress import Ingress as Ingress
    from raylm.ingress.routes import build_asgi_app as build_asgi_app

_MODULES = {
    "http.api_keys": ("read_keys",),
    "http.middleware": ("serve_middlewares",),
    "ingress": ("SHARED_ACTORS", "Ingress"),
    "routes": ("build_asgi_app",),
}

__getattr__ = front_door(__name__, _MODULES)
