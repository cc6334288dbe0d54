"""McpServers: the servers of the Model Context Protocol that may be called, and the calls, over streamable HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from raylm.errors import ConfigError, McpServerError
from raylm.ingress.http.body import JSONObject
from raylm.ingress.http.errors import clip
from raylm.ingress.openai.fields import unsupported
from raylm.ingress.responses.mcp.tools import URL, McpTool, is_allowed

if TYPE_CHECKING:
    from mcp import Client

_PORTS = {"http": 80, "https": 443}
_MOST_TOOLS = 512
_MOST_OUTPUT = 1_048_576  # characters
_INVALID_PARAMS = -32602  # JSON-RPC


@dataclass(frozen=True, slots=True)
class CallResult:
    """What a call returned: ``output``, or an ``error`` in OpenAI's form."""

    output: str | None
    error: JSONObject | None = None


class McpServers:
    """Calls servers whose URL is one of ``allowed``, or below it. Keeps no connections: each call is a session.

    A redirect is followed only within the origin of the URL, and proxies of the environment are not used.

    Raises:
        ConfigError: servers are allowed, and the package mcp is not installed.
    """

    def __init__(self, allowed: Sequence[str], timeout_s: float) -> None:
        self._allowed = [_parts(url) for url in allowed]
        self._timeout_s = timeout_s
        if allowed:
            try:
                import mcp  # noqa: F401
            except ImportError as error:
                raise ConfigError("ingress.mcp_servers needs the package mcp; install raylm[mcp].") from error

    def check(self, server: McpTool, path: str) -> None:
        """Raise UnsupportedFieldError unless the server at the path ``path`` of the body may be called."""
        origin, wanted = _parts(server["server_url"])
        for allowed, prefix in self._allowed:
            if allowed == origin and (wanted == prefix or wanted.startswith(prefix.rstrip("/") + "/")):
                return
        message = "this URL is not among the servers that may be called (ingress.mcp_servers)."
        raise unsupported(f"{path}.server_url", message)

    async def list_tools(self, server: McpTool, path: str) -> list[JSONObject]:
        """The tools of a server that the model may call, in the form of OpenAI's item mcp_list_tools.

        Raises:
            McpServerError: the server cannot be reached, or does not list its tools.
        """
        found: list[JSONObject] = []
        try:
            async with asyncio.timeout(self._timeout_s), self._connected(server) as client:
                cursor = None
                while True:
                    page = await client.list_tools(cursor=cursor)
                    found += [_listed(tool) for tool in page.tools]
                    cursor = page.next_cursor
                    if cursor is None or len(found) > _MOST_TOOLS:
                        break
        except Exception as error:
            reason = self._error_of(error)["message"]
            message = f"The tools of the MCP server '{server['server_label']}' could not be listed: {reason}"
            raise McpServerError(message, param=f"{path}.server_url") from error
        allowed = [tool for tool in found if is_allowed(server, tool)]
        if len(allowed) > _MOST_TOOLS:
            message = f"The MCP server '{server['server_label']}' has more than {_MOST_TOOLS} tools; name some."
            raise McpServerError(message, param=f"{path}.allowed_tools")
        return allowed

    async def call(self, server: McpTool, name: str, arguments: str) -> CallResult:
        """Call a tool once. Never raises: what goes wrong is the outcome."""
        try:
            given = orjson.loads(arguments or "{}")
        except ValueError:
            given = None
        if not isinstance(given, dict):
            return CallResult(None, _protocol_error(_INVALID_PARAMS, "The arguments are not a JSON object."))
        try:
            async with asyncio.timeout(self._timeout_s), self._connected(server) as client:
                result = await client.call_tool(name, given)
        except Exception as error:
            return CallResult(None, self._error_of(error))
        text = _text(result)
        if len(text) > _MOST_OUTPUT:
            message = f"The output has {len(text):,} characters; at most {_MOST_OUTPUT:,} are passed on."
            return CallResult(None, _protocol_error(0, message))
        if result.is_error:
            return CallResult(None, {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": text}]})
        return CallResult(text)

    @asynccontextmanager
    async def _connected(self, server: McpTool) -> AsyncIterator[Client]:
        import httpx2
        from mcp import Client
        from mcp.client.streamable_http import streamable_http_client

        headers = dict(server.get("headers") or {})
        if (token := server.get("authorization")) is not None:
            headers["Authorization"] = f"Bearer {token}"
        timeout = httpx2.Timeout(self._timeout_s)
        async with (
            httpx2.AsyncClient(headers=headers, timeout=timeout, trust_env=False) as http,
            Client(streamable_http_client(server["server_url"], http_client=http)) as client,
        ):
            yield client

    def _error_of(self, error: Exception) -> JSONObject:
        import httpx2
        from mcp.shared.exceptions import MCPError

        for leaf in _leaves(error):
            if isinstance(leaf, TimeoutError | httpx2.TimeoutException):
                return _protocol_error(0, f"It did not answer within {self._timeout_s:g} s.")
            if isinstance(leaf, httpx2.HTTPStatusError):
                code = leaf.response.status_code
                return {"type": "http_error", "code": code, "message": f"It answered with the HTTP status {code}."}
            if isinstance(leaf, MCPError):
                return _protocol_error(leaf.error.code, clip(leaf.error.message, 300))
            if isinstance(leaf, httpx2.TransportError):
                return _protocol_error(0, "It could not be reached.")
        return _protocol_error(0, "Its answer was not understood.")


def _parts(url: str) -> tuple[tuple[str, str, int], str]:
    """(scheme, host, port) and the path of a URL."""
    found = URL.fullmatch(url)
    assert found is not None
    scheme, host, port, path, _ = found.groups()
    return (scheme, host.lower(), int(port or _PORTS[scheme])), path or "/"


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
        if error.__cause__ is not None:
            yield from _leaves(error.__cause__)


def _protocol_error(code: int, message: str) -> JSONObject:
    return {"type": "mcp_protocol_error", "code": code, "message": message}


def _listed(tool: Any) -> JSONObject:
    annotations = None if tool.annotations is None else tool.annotations.model_dump(by_alias=True, exclude_none=True)
    return {
        "name": tool.name,
        "description": tool.description,
        "input_schema": tool.input_schema,
        "annotations": annotations,
    }


def _text(result: Any) -> str:
    """The texts of a result, line by line. Other contents are named, and their data left out."""
    parts = [
        block.text if block.type == "text" else f"[{block.type}: not passed on, the model reads text only]"
        for block in result.content
    ]
    if not parts and result.structured_content is not None:
        return orjson.dumps(result.structured_content).decode()
    return "\n".join(parts)
