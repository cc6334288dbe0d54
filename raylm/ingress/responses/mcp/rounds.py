"""Rounds: the sequences that the model generates for one response, and the calls of MCP servers between them."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raylm.errors import OverloadedError
from raylm.frontend import Request, offload
from raylm.ingress.http.body import JSONObject
from raylm.ingress.http.errors import clip
from raylm.ingress.http.stream_ids import NOTHING, OPEN, UNRESUMABLE, StreamId
from raylm.ingress.openai.chat import ChatCompletions
from raylm.ingress.openai.fields import renamed, wrong
from raylm.ingress.responses.body import PARAM_NAMES, ResponsesRequest
from raylm.ingress.responses.history import Given
from raylm.ingress.responses.input import chat_messages
from raylm.ingress.responses.mcp.servers import CallResult, McpServers
from raylm.ingress.responses.mcp.tools import McpTool
from raylm.ingress.responses.store import ResponseStore
from raylm.ingress.responses.tools import CallableTool, callables, chosen, paths_of_tools

if TYPE_CHECKING:
    from raylm.ingress.openai.chat import ChatCompletionRequest
    from raylm.ingress.openai.outputs import Outputs
    from raylm.params import SamplingParams

MOST_CALLS = 64  # of MCP servers, for one response
_TRIES, _TRY_S = 60, 0.5  # of a round while the queue is full
_LOST = "The server ended while this call was made. Whether it had an effect is not known; it is not made again."
_REPEATED = "The client has approved this call before. It is made once."


@dataclass(frozen=True)
class Surrounding:
    """What all responses of a replica use."""

    conversations: ChatCompletions
    servers: McpServers
    store: ResponseStore


class Rounds:
    """Starts the sequences of one response, and makes its calls, each at most once.

    ``lists`` are the tools of servers that the conversation does not list yet, with the servers' labels. ``approved``
    are requests for approval that the input approves.
    """

    def __init__(
        self, around: Surrounding, request: Request, response_id: str, body: ResponsesRequest, given: Given, owner: str
    ) -> None:
        self.lists: list[tuple[str, list[JSONObject]]] = []
        self.approved: list[JSONObject] = []
        self._around = around
        self._request = request
        self._id = response_id
        self._body = body
        self._given = given
        self._owner = owner
        self._servers: dict[str, McpTool] = {}
        self._tools: list[CallableTool] = []

    @property
    def by_name(self) -> dict[str, CallableTool]:
        """The tools that the model may call, by the names of their functions."""
        return {tool.function_name: tool for tool in self._tools}

    async def open(self, lists: list[tuple[str, list[JSONObject]]] | None = None) -> None:
        """Check the servers and ask for their tools, unless they are known: from the conversation, or ``lists``.

        Raises:
            UnsupportedFieldError: a server may not be called.
            McpServerError: a server does not list its tools.
            InvalidRequestError: the input approves what was not asked, or two tools have one name.
        """
        listed = {item["server_label"]: item["tools"] for item in self._given.all if item["type"] == "mcp_list_tools"}
        listed |= dict(lists or ())
        self.lists = list(lists or ())
        for path, server in self._body.servers():
            self._around.servers.check(server, path)
            label = server["server_label"]
            self._servers[label] = server
            if label not in listed:
                listed[label] = await self._around.servers.list_tools(server, path)
                self.lists.append((label, listed[label]))
        self._tools = callables(self._body.tools, listed)
        self.approved = list(self._approved())

    def _approved(self) -> list[JSONObject]:
        """The requests for approval that the input approves, and that no call answers yet."""
        items = self._given.all
        asked = {item["id"]: item for item in items if item["type"] == "mcp_approval_request"}
        made = {item["approval_request_id"] for item in items if item["type"] == "mcp_call"}
        first, found = len(self._given.before), []
        for place, item in enumerate(items[first:]):
            if item["type"] != "mcp_approval_response" or (wanted := item["approval_request_id"]) in made:
                continue
            if wanted not in asked:
                path = f"input[{place}].approval_request_id"
                raise wrong(path, f"the conversation has no request for approval '{clip(wanted, 100)}'")
            label = asked[wanted]["server_label"]
            if item["approve"] and label not in self._servers:
                raise wrong(
                    "tools", f"the input approves a call of the MCP server '{clip(label, 64)}', which is missing"
                )
            if item["approve"]:
                found.append(asked[wanted])
        return found

    async def chat(self, made: list[JSONObject], number: int, calls: int, spent: int) -> ChatCompletionRequest:
        """The chat completion of round ``number``, after the items ``made`` so far.

        A choice that forces a call holds for the first round. After the last of the calls that are allowed no tool is
        offered. ``spent`` is the number of tokens generated so far.
        """
        body, items = self._body, self._given.all + made
        tools, choice = chosen(body.tool_choice, self._tools)
        if number and choice not in (None, "none"):
            choice = "auto"
        if calls and calls >= self._most_calls:
            choice = "none"
        left = None if body.max_output_tokens is None else body.max_output_tokens - spent
        head = [{"role": "system", "content": body.instructions}] if body.instructions else []
        with renamed(PARAM_NAMES), paths_of_tools(tools):
            chat = await offload(lambda: body.as_chat(head + chat_messages(items), tools, choice, left), len(items))
            if body.truncation == "auto":
                chat = await self._around.conversations.fit(chat, left or 1, self._owner)
        return chat

    async def start(
        self, made: list[JSONObject], number: int, calls: int, spent: int, told: int | None = None
    ) -> tuple[SamplingParams, Outputs]:
        """Start the sequence of round ``number``; an earlier maker sent ``told`` of its tokens."""
        chat = await self.chat(made, number, calls, spent)
        name = self._id if number == 0 else f"{self._id}.{number}"
        stream = UNRESUMABLE
        if self._body.background:
            stream = StreamId(b"-", name.encode(), [NOTHING if told is None else OPEN + told])
        if number:
            self._request.expect_another()
        tools, _ = chosen(self._body.tool_choice, self._tools)
        for left in reversed(range(_TRIES if number else 1)):
            try:
                with renamed(PARAM_NAMES), paths_of_tools(tools):
                    return await self._around.conversations.start(
                        chat, self._request, name, time.time(), stream_id=stream
                    )
            except OverloadedError:  # calls were made already, so the response is not refused
                if not left:
                    raise
            await asyncio.sleep(_TRY_S)
        raise AssertionError

    async def call(self, item: JSONObject, number: int) -> CallResult:
        """Make call ``number`` of the response, unless it was begun before. The store knows of it before it is made."""
        if number > self._most_calls:
            most = self._most_calls
            return _not_made(f"The call was not made: a response may have {most} calls (max_tool_calls).")
        server = self._servers.get(item["server_label"])
        if server is None:
            return _not_made("The call was not made: its server is not among the tools.")
        approval = item["approval_request_id"]
        if not await self._around.store.begin_call(self._owner, approval or item["id"]):
            return _not_made(_REPEATED if approval else _LOST)
        return await self._around.servers.call(server, item["name"], item["arguments"])

    @property
    def _most_calls(self) -> int:
        return min(self._body.max_tool_calls or MOST_CALLS, MOST_CALLS)


def _not_made(message: str) -> CallResult:
    return CallResult(None, {"type": "mcp_protocol_error", "code": 0, "message": message})
