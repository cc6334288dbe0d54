"""GET /docs: a page that shows /openapi.json and sends requests. The page loads nothing from other servers."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

_PAGE = Path(__file__).with_name("docs.html")
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def docs_route() -> Route:
    """The page itself needs no key, because it contains no data of the server. Its requests need a key."""
    page = HTMLResponse(_PAGE.read_bytes(), headers={"content-security-policy": _POLICY})

    async def docs(request: Request) -> Response:
        return page

    return Route("/docs", docs)
