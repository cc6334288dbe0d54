"""A Model Context Protocol server for tests, which records its calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.ingress.harness import served


@dataclass
class Notes:
    """The server's ``url``, the ``noted`` texts (the side effects of calls), and the headers of each request.

    A call of ``note`` with the text ``wait`` ends when ``gate`` is set.
    """

    url: str = ""
    noted: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)


def _server(notes: Notes) -> MCPServer:
    server = MCPServer("notes")

    @server.tool(description="Write a note.")
    async def note(text: str) -> str:
        notes.noted.append(text)
        if text == "wait":
            await notes.gate.wait()
        return f"noted {text}"

    @server.tool(description="Read the notes.", annotations=ToolAnnotations(read_only_hint=True))
    async def read() -> str:
        return ", ".join(notes.noted)

    @server.tool()
    async def fail(reason: str) -> str:
        raise ToolError(reason)

    @server.tool()
    async def long() -> str:
        return "x" * 2_000_000

    return server


class _Noting:
    def __init__(self, app: ASGIApp, notes: Notes) -> None:
        self._app = app
        self._notes = notes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._notes.headers.append({name.decode(): value.decode() for name, value in scope["headers"]})
        self._notes.paths.append(scope["path"])
        await self._app(scope, receive, send)


@asynccontextmanager
async def mcp_server() -> AsyncIterator[Notes]:
    """Serve the notes over streamable HTTP."""
    notes = Notes()
    server = _server(notes)
    app, ends = server.streamable_http_app(), asyncio.Event()
    begun: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def serve() -> None:  # a separate task, because a fixture may end in another task than it began in
        async with server.session_manager.run(), served(_Noting(app, notes)) as url:
            begun.set_result(f"{url}/mcp")
            await ends.wait()

    task = asyncio.create_task(serve())
    try:
        notes.url = await begun
        yield notes
    finally:
        notes.gate.set()
        ends.set()
        await task
