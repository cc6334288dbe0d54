"""Public names of the front end, imported on first use, because Discovery needs Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raylm.lazy import front_door

if TYPE_CHECKING:
    from raylm.frontend.admission import Admission as Admission
    from raylm.frontend.admission import FairShares as FairShares
    from raylm.frontend.admission import Reservation as Reservation
    from raylm.frontend.admission import Throttle as Throttle
    from raylm.frontend.answers.chat_processor import ChatPrompt as ChatPrompt
    from raylm.frontend.answers.chat_processor import check_parsers as check_parsers
    from raylm.frontend.async_llm import AsyncLLM as AsyncLLM
    from raylm.frontend.engines.discovery import Discovery as Discovery
    from raylm.frontend.engines.engine_client import LocalEngineClient as LocalEngineClient
    from raylm.frontend.engines.routed_engine import Route as Route
    from raylm.frontend.engines.routed_engine import RoutedEngine as RoutedEngine
    from raylm.frontend.engines.routed_engine import RoutedPrompt as RoutedPrompt
    from raylm.frontend.engines.router import Router as Router
    from raylm.frontend.input_processor import RequestHead as RequestHead
    from raylm.frontend.outputs import CompletionDelta as CompletionDelta
    from raylm.frontend.outputs import RequestOutput as RequestOutput
    from raylm.frontend.outputs import TokenLogprob as TokenLogprob
    from raylm.frontend.outputs import ToolCallDelta as ToolCallDelta
    from raylm.frontend.request import ApiKey as ApiKey
    from raylm.frontend.request import Arrival as Arrival
    from raylm.frontend.request import ClientDisconnectedError as ClientDisconnectedError
    from raylm.frontend.request import Request as Request
    from raylm.frontend.request import Requests as Requests
    from raylm.frontend.state.actor import RemoteState as RemoteState
    from raylm.frontend.state.actor import end_state as end_state
    from raylm.frontend.state.client import Hold as Hold
    from raylm.frontend.state.client import StateClient as StateClient
    from raylm.frontend.state.messages import KeyLimits as KeyLimits
    from raylm.frontend.text.chat_template import ChatRequest as ChatRequest
    from raylm.frontend.text.chat_template import RequiredTool as RequiredTool
    from raylm.frontend.text.chat_template import ToolChoice as ToolChoice
    from raylm.frontend.text.chat_template import read_arguments as read_arguments
    from raylm.frontend.threads import LARGE as LARGE
    from raylm.frontend.threads import offload as offload
    from raylm.frontend.timelines.describe import timeline as timeline
    from raylm.frontend.timelines.describe import trace as trace
    from raylm.frontend.timelines.observers import check_observers as check_observers
    from raylm.frontend.timelines.observers import open_observers as open_observers
    from raylm.frontend.timelines.record import Record as Record
    from raylm.frontend.timelines.record import current_id as current_id
    from raylm.frontend.timelines.record import trace_of as trace_of
    from raylm.frontend.timelines.ring import Filter as Filter
    from raylm.frontend.timelines.ring import Timelines as Timelines

_MODULES = {
    "admission": (
        "Admission",
        "FairShares",
        "Reservation",
        "Throttle",
    ),
    "answers.chat_processor": (
        "ChatPrompt",
        "check_parsers",
    ),
    "async_llm": ("AsyncLLM",),
    "engines.discovery": ("Discovery",),
    "engines.engine_client": ("LocalEngineClient",),
    "engines.routed_engine": ("Route", "RoutedEngine", "RoutedPrompt"),
    "engines.router": ("Router",),
    "input_processor": ("RequestHead",),
    "outputs": ("CompletionDelta", "RequestOutput", "TokenLogprob", "ToolCallDelta"),
    "request": ("ApiKey", "Arrival", "ClientDisconnectedError", "Request", "Requests"),
    "state.actor": ("RemoteState", "end_state"),
    "state.client": ("Hold", "StateClient"),
    "state.messages": ("KeyLimits",),
    "text.chat_template": ("ChatRequest", "RequiredTool", "ToolChoice", "read_arguments"),
    "threads": ("LARGE", "offload"),
    "timelines.describe": ("timeline", "trace"),
    "timelines.observers": ("check_observers", "open_observers"),
    "timelines.record": ("Record", "current_id", "trace_of"),
    "timelines.ring": ("Filter", "Timelines"),
}

__getattr__ = front_door(__name__, _MODULES)
