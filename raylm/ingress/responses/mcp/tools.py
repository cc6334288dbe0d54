"""Tools of kind mcp: a server of the Model Context Protocol whose tools this server calls for the model."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, Field
from typing_extensions import TypedDict

from raylm.ingress.http.body import JSONObject
from raylm.ingress.openai.fields import MAX_FIELDS, OneOf, at_most, closed

# Only forms that all parsers of URLs read in the same way: no user, no fragment, no encoded or missing parts.
URL = re.compile(
    r"(https?)://([A-Za-z0-9](?:[A-Za-z0-9.\-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])(?::([0-9]{1,5}))?"
    r"((?:/[A-Za-z0-9._~!$&'()*+,;=:@\-]*)*)(\?[A-Za-z0-9._~!$&'()*+,;=:@/%\-]*)?"
)
_LABEL = r"^[A-Za-z][A-Za-z0-9_\-]{0,63}$"
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~\-]{1,128}")
_VALUE = re.compile(r"[\x20-\x7e\t]{0,8192}")
# Headers that the connection sets, or that choose another server behind the same address.
_OWN_HEADERS = frozenset({
    "accept", "connection", "content-length", "content-type", "host", "mcp-protocol-version", "mcp-session-id",
    "te", "trailer", "transfer-encoding", "upgrade",
})  # fmt: skip
_MOST_NAMES = 128


def _known_url(url: str) -> str:
    found = URL.fullmatch(url)
    if found is None or any(part in (".", "..") for part in found[4].split("/")) or int(found[3] or 1) > 65535:
        raise ValueError("expected a URL such as https://example.com/mcp, without a user, a fragment or encoded parts")
    return url


def _sendable(headers: dict[str, str]) -> dict[str, str]:
    for name, value in headers.items():
        if not _HEADER.fullmatch(name) or name.lower() in _OWN_HEADERS:
            raise ValueError("it has a name that is no header's, or that of a header which the connection sets")
        if not _VALUE.fullmatch(value):
            raise ValueError("it has a value with characters that a header cannot have, or one that is too long")
    return headers


Names = Annotated[list[str], Field(max_length=_MOST_NAMES, fail_fast=True)]


@closed
class ToolFilter(TypedDict):
    tool_names: NotRequired[Names]
    read_only: NotRequired[bool]


@closed
class ApprovalFilter(TypedDict):
    always: NotRequired[ToolFilter]
    never: NotRequired[ToolFilter]


@closed
class McpTool(TypedDict):
    type: Literal["mcp"]
    server_label: Annotated[str, Field(pattern=_LABEL)]
    server_url: Annotated[str, Field(max_length=2048), AfterValidator(_known_url)]
    server_description: NotRequired[str | None]
    authorization: NotRequired[Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,8192}$")] | None]
    headers: NotRequired[Annotated[dict[str, str], at_most(MAX_FIELDS), AfterValidator(_sendable)] | None]
    allowed_tools: NotRequired[
        Annotated[Names | ToolFilter, OneOf("expected an array or an object, but got {got}")] | None
    ]
    require_approval: NotRequired[
        Annotated[
            Literal["always", "never"] | ApprovalFilter, OneOf("expected always, never or an object, but got {got}")
        ]
        | None
    ]


@closed
class McpChoice(TypedDict):
    """The tools of a server, or one of them."""

    type: Literal["mcp"]
    server_label: str
    name: NotRequired[str | None]


def is_allowed(server: McpTool, listed: JSONObject) -> bool:
    """Whether the model may call a tool of the server, as ``listed`` by it."""
    allowed = server.get("allowed_tools")
    if allowed is None:
        return True
    return listed["name"] in allowed if isinstance(allowed, list) else _passes(allowed, listed)


def needs_approval(server: McpTool, listed: JSONObject) -> bool:
    """Whether the client approves each call. It does unless the tool says never, as OpenAI defines."""
    rule = server.get("require_approval")
    if rule is None or isinstance(rule, str):
        return rule != "never"
    if "always" in rule and _passes(rule["always"], listed):
        return True
    return not ("never" in rule and _passes(rule["never"], listed))


def _passes(wanted: ToolFilter, listed: JSONObject) -> bool:
    if "tool_names" in wanted and listed["name"] not in wanted["tool_names"]:
        return False
    reads = bool((listed.get("annotations") or {}).get("readOnlyHint"))
    return "read_only" not in wanted or wanted["read_only"] == reads


def shown_server(server: McpTool) -> JSONObject:
    """The tool in the form of a response, without what only the server may read."""
    hidden = ("authorization", "headers")
    kept: dict[str, Any] = {name: value for name, value in server.items() if name not in hidden and value is not None}
    return {"require_approval": "always"} | kept
