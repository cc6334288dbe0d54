"""Tools of the Responses API: their types, and their conversion to functions of a chat completion and back.

A custom tool takes a text. For the model it is a function with the single argument ``input``. A function of a namespace
is for the model a function with the name ``namespace__name``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, NotRequired, TypeAlias

import orjson
from pydantic import AfterValidator, Field, ValidationInfo
from typing_extensions import TypedDict

from raylm.errors import InvalidRequestError
from raylm.frontend import read_arguments
from raylm.ingress.http.body import JSONObject
from raylm.ingress.http.errors import clip
from raylm.ingress.openai.fields import OneOf, closed, note_left_out, refuse, wrong
from raylm.ingress.openai.messages import MAX_TOOLS
from raylm.ingress.responses.lark_regex import regex_of
from raylm.ingress.responses.mcp.tools import McpChoice, McpTool, needs_approval, shown_server
from raylm.params import MAX_GRAMMAR_CHARS

_INPUT = "input"  # the argument of a custom tool's function
_FUNCTION_PATH = re.compile(r"tools\[([0-9]+)\]\.function(.*)", re.DOTALL)


@closed
class FunctionTool(TypedDict):
    type: Literal["function"]
    name: str
    description: NotRequired[str | None]
    parameters: NotRequired[dict[str, Any] | None]
    strict: NotRequired[bool | None]


@closed
class TextFormat(TypedDict):
    type: Literal["text"]


@closed
class GrammarFormat(TypedDict):
    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Field(max_length=MAX_GRAMMAR_CHARS)]


def _regular(form: GrammarFormat) -> GrammarFormat:
    if form["syntax"] == "lark":
        try:
            regex_of(form["definition"])
        except ValueError as error:
            raise refuse(f"this grammar in Lark is not supported: {error}", at="definition") from None
    return form


@closed
class CustomTool(TypedDict):
    type: Literal["custom"]
    name: str
    description: NotRequired[str | None]
    format: NotRequired[
        Annotated[
            TextFormat | Annotated[GrammarFormat, AfterValidator(_regular)],
            OneOf("expected text or grammar, but got {got}", key="type"),
        ]
        | None
    ]


@closed
class NamespaceTool(TypedDict):
    type: Literal["namespace"]
    name: str
    description: NotRequired[str | None]
    tools: Annotated[
        list[Annotated[FunctionTool | CustomTool, OneOf("only function and custom are supported here.", key="type")]],
        Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True),
    ]


class HostedTool(TypedDict):
    """A tool that OpenAI's servers run. It is not available here: the model does not see it, and cannot call it."""

    type: Literal[
        "code_interpreter",
        "file_search",
        "image_generation",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    ]


def _unavailable(tool: HostedTool, info: ValidationInfo) -> HostedTool:
    note_left_out(f"tools[].{tool['type']}", info)
    return tool


Tool = Annotated[
    FunctionTool | CustomTool | NamespaceTool | McpTool | Annotated[HostedTool, AfterValidator(_unavailable)],
    OneOf("{got} is not supported; function, custom, namespace and mcp are.", key="type", served=False),
]
Tools: TypeAlias = Sequence[FunctionTool | CustomTool | NamespaceTool | McpTool | HostedTool]
Listed: TypeAlias = Mapping[str, list[JSONObject]]
"""The tools of MCP servers, by the label of the server."""


@closed
class NamedTool(TypedDict):
    type: Literal["function", "custom"]
    name: str


@closed
class AllowedTools(TypedDict):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[
        list[
            Annotated[
                NamedTool | McpChoice, OneOf("only function, custom and mcp are supported.", key="type", served=False)
            ]
        ],
        Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True),
    ]


ToolChoice = Annotated[
    str
    | Annotated[
        NamedTool | McpChoice | AllowedTools,
        OneOf("only function, custom, mcp and allowed_tools are supported.", key="type", served=False),
    ],
    OneOf("expected a string or an object, but got {got}"),
]


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool that the model may call, at the path ``path`` of the body."""

    path: str
    tool: FunctionTool | CustomTool
    namespace: str | None = None
    purpose: str | None = None  # the namespace's description
    server: McpTool | None = None  # which has the tool; then ``namespace`` is its label
    needs_approval: bool = False

    @property
    def is_custom(self) -> bool:
        return self.tool["type"] == "custom"

    @property
    def function_name(self) -> str:
        return function_name(self.tool["name"], self.namespace)

    def as_function(self) -> JSONObject:
        """The tool of a chat completion that stands for this tool."""
        tool = self.tool
        function: JSONObject = {"name": self.function_name}
        described = [text for text in (self.purpose, tool.get("description")) if text]
        if tool["type"] == "custom":
            function |= _function_of_text(tool)
        else:
            function |= {name: value for name in ("parameters", "strict") if (value := tool.get(name)) is not None}
        return {"type": "function", "function": function | ({"description": "\n".join(described)} if described else {})}


def _function_of_text(tool: CustomTool) -> JSONObject:
    text: JSONObject = {"type": "string"}
    strict = {}
    if (form := tool.get("format")) is not None and form["type"] == "grammar":
        regex = regex_of(form["definition"]) if form["syntax"] == "lark" else form["definition"]
        text["pattern"] = f"^(?:{regex})$"  # a pattern of a schema may be anywhere in the text
        strict = {"strict": True}
    parameters = {"type": "object", "properties": {_INPUT: text}, "required": [_INPUT], "additionalProperties": False}
    return {"parameters": parameters} | strict


def function_name(name: str, namespace: str | None) -> str:
    """The name by which the model knows a tool."""
    return name if namespace is None else f"{namespace}__{name}"


def arguments_of(text: str) -> str:
    """The arguments of a custom tool's function, as JSON."""
    return orjson.dumps({_INPUT: text}).decode()


def text_of(arguments: str) -> str:
    """The text in the arguments of a custom tool's function, which may be cut. Other arguments are the text."""
    text = read_arguments(arguments).get(_INPUT, arguments if arguments.strip() else "")
    return text if isinstance(text, str) else arguments


def callables(tools: Tools | None, listed: Listed = MappingProxyType({})) -> list[CallableTool]:
    """The tools that the model may call, in the order of the body. ``listed`` are those of MCP servers.

    Raises:
        InvalidRequestError: a custom tool, or one of a namespace, has the name of another tool.
    """
    found = [
        entry for place, tool in enumerate(tools or ()) for entry in _callables_of(tool, f"tools[{place}]", listed)
    ]
    plain = {entry.function_name for entry in found if entry.namespace is None and not entry.is_custom}
    names: set[str] = set()
    for entry in found:
        name = entry.function_name
        if name in names or (name in plain and (entry.is_custom or entry.namespace is not None)):
            raise wrong(f"{entry.path}.name", f"there is another tool '{clip(name, 64)}'")
        if entry.is_custom or entry.namespace is not None:
            names.add(name)
    return found


def _callables_of(
    tool: FunctionTool | CustomTool | NamespaceTool | McpTool | HostedTool, path: str, listed: Listed
) -> Iterator[CallableTool]:
    if tool["type"] == "namespace":
        for place, inner in enumerate(tool["tools"]):
            yield CallableTool(f"{path}.tools[{place}]", inner, tool["name"], tool.get("description"))
    elif tool["type"] == "mcp":
        for entry in listed.get(tool["server_label"], ()):
            function: FunctionTool = {
                "type": "function",
                "name": entry["name"],
                "description": entry.get("description"),
                "parameters": entry["input_schema"],
            }
            approved = needs_approval(tool, entry)
            purpose = tool.get("server_description")
            yield CallableTool(path, function, tool["server_label"], purpose, tool, approved)
    elif tool["type"] == "function" or tool["type"] == "custom":
        yield CallableTool(path, tool)


def chosen(
    choice: str | NamedTool | McpChoice | AllowedTools | None, found: list[CallableTool]
) -> tuple[list[CallableTool], JSONObject | str | None]:
    """The tools that may be called, and the chat completion's ``tool_choice``, for the choice of a body.

    Raises:
        InvalidRequestError: a chosen tool is not among the tools.
    """
    if choice is None or isinstance(choice, str):
        return found, choice
    if choice["type"] == "function" or choice["type"] == "custom":
        return found, {"type": "function", "function": {"name": _name_in(choice["name"], found)}}
    wanted = choice["tools"] if choice["type"] == "allowed_tools" else [choice]
    allowed: set[str] = set()
    for place, tool in enumerate(wanted):
        names = _names_in(tool, found)
        if not names:
            path = f"tool_choice.tools[{place}]" if choice["type"] == "allowed_tools" else "tool_choice"
            raise _no_such_tool(tool, path)
        allowed |= names
    mode = choice["mode"] if choice["type"] == "allowed_tools" else "required"
    return [entry for entry in found if entry.function_name in allowed], mode


def _names_in(tool: NamedTool | McpChoice, found: list[CallableTool]) -> set[str]:
    """The names of the functions that a choice names."""
    if tool["type"] != "mcp":
        return {_name_in(tool["name"], found)} & {entry.function_name for entry in found}
    return {
        entry.function_name
        for entry in found
        if entry.server is not None
        and entry.namespace == tool["server_label"]
        and tool.get("name") in (None, entry.tool["name"])
    }


def _no_such_tool(tool: NamedTool | McpChoice, path: str) -> InvalidRequestError:
    if tool["type"] == "mcp" and tool.get("name") is None:
        return wrong(f"{path}.server_label", f"there is no server '{clip(tool['server_label'], 64)}' with tools")
    return wrong(f"{path}.name", f"there is no tool '{clip(str(tool.get('name')), 64)}'")


def _name_in(name: str, found: list[CallableTool]) -> str:
    """The function's name for a tool's name. A tool of a namespace may have either, if its own name is unique."""
    own = [entry.function_name for entry in found if entry.tool["name"] == name]
    return own[0] if len(own) == 1 and name not in {entry.function_name for entry in found} else name


@contextmanager
def paths_of_tools(found: list[CallableTool]) -> Iterator[None]:
    """Convert paths of a chat completion's tools, in errors, to those of the body's tools."""
    try:
        yield
    except InvalidRequestError as error:
        asked = _FUNCTION_PATH.fullmatch(error.param or "")
        if asked is None or int(asked[1]) >= len(found):
            raise
        entry = found[int(asked[1])]
        rest = ".format.definition" if entry.is_custom and asked[2].startswith(".parameters") else asked[2]
        message = error.message.replace(asked[0], entry.path + rest)
        raise type(error)(message, param=entry.path + rest) from None


def shown(tools: Tools | None) -> list[JSONObject]:
    """The available tools in the form of a response."""
    return [_shown(tool) for tool in tools or () if tool["type"] in ("function", "custom", "namespace", "mcp")]


def _shown(tool: Any) -> JSONObject:
    if tool["type"] == "mcp":
        return shown_server(tool)
    if tool["type"] == "function":
        return {"strict": None, "parameters": None, "description": None, **tool}
    if tool["type"] == "custom":
        return {name: value for name, value in tool.items() if value is not None}
    return {"description": "", **tool, "tools": [_shown(inner) for inner in tool["tools"]]}
