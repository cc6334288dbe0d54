"""The HTTP server over an AsyncLLM: OpenAI's API, Anthropic's API, and endpoints for operators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raylm.lazy import front_door

if TYPE_CHECKING:
    from raylm.ingress.http.api_keys import read_keys as read_keys
    from raylm.ingress.http.entrance import serve_middlewares as serve_middlewares
    from raylm.ingress.http.haproxy import configure_controller as configure_controller
    from raylm.ingress.http.haproxy_limits import check_open_files as check_open_files
    from raylm.ingress.ingress import SHARED_ACTORS as SHARED_ACTORS
    from raylm.ingress.ingress import Ingress as Ingress
    from raylm.ingress.responses.database import fault_of as fault_of
    from raylm.ingress.responses.postgres import examine as examine
    from raylm.ingress.responses.postgres import is_postgres as is_postgres
    from raylm.ingress.responses.storage import find_store as find_store
    from raylm.ingress.responses.storage import store_path as store_path
    from raylm.ingress.routes import Surroundings as Surroundings
    from raylm.ingress.routes import build_asgi_app as build_asgi_app

_MODULES = {
    "http.api_keys": ("read_keys",),
    "http.entrance": ("serve_middlewares",),
    "http.haproxy": ("configure_controller",),
    "http.haproxy_limits": ("check_open_files",),
    "ingress": ("SHARED_ACTORS", "Ingress"),
    "responses.database": ("fault_of",),
    "responses.postgres": ("examine", "is_postgres"),
    "responses.storage": ("find_store", "store_path"),
    "routes": ("Surroundings", "build_asgi_app"),
}

__getattr__ = front_door(__name__, _MODULES)
