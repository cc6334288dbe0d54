"""GET /console: a page from this package. It loads nothing from other hosts and runs no inline script."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FILES = Path(__file__).with_name("static")
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_TYPES = {".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".css": "text/css"}
PAGES = {
    "/console": "console.html",
    "/console/console.css": "console.css",
    "/console/console.js": "console.js",
    "/console/playground.js": "playground.js",
}


def console_routes() -> list[Route]:
    """Routes of the page. Its files are not secret, so they need no key. The page's own requests need one."""
    return [_route(path, _FILES / name) for path, name in PAGES.items()]


def _route(path: str, file: Path) -> Route:
    headers = {
        "content-security-policy": _POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
        "content-type": _TYPES[file.suffix],
    }
    answer = Response(file.read_bytes(), headers=headers)

    async def page(request: Request) -> Response:
        return answer

    return Route(path, page)
