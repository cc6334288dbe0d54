"""Front door of this room: AsyncLLM and the lines to the engines, imported when first used (Discovery needs Ray)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raylm.lazy import front_door

if TYPE_CHECKING:
    from raylm.frontend.admission.lifecycle import ClientDisconnectedError, Lifecycle, OngoingRequest, Throttle
    from raylm.frontend.admission.queue import Admission, Reservation
    from raylm.frontend.answers.answer_format import AnswerFormat
    from raylm.frontend.answers.chat_request import ChatPrompt, ChatRequest, NamedTool, ToolChoice
    from raylm.frontend.async_llm import AsyncLLM
    from raylm.frontend.engines.adapters import AdapterDirectory
    from raylm.frontend.engines.discovery import Discovery
    from raylm.frontend.engines.engine_client import EngineClient
    from raylm.frontend.engines.local_engine_client import LocalEngineClient
    from raylm.frontend.engines.ray_engine_client import RayEngineClient
    from raylm.frontend.engines.router import Router
    from raylm.frontend.outputs import CompletionDelta, RequestOutput, TokenLogprob, ToolCallDelta, join_calls
    from raylm.frontend.request_head import RequestHead
    from raylm.frontend.threads import LARGE, offload

__all__ = [
    "LARGE",
    "AdapterDirectory",
    "Admission",
    "AnswerFormat",
    "AsyncLLM",
    "ChatPrompt",
    "ChatRequest",
    "ClientDisconnectedError",
    "CompletionDelta",
    "Discovery",
    "EngineClient",
    "Lifecycle",
    "LocalEngineClient",
    "NamedTool",
    "OngoingRequest",
    "RayEngineClient",
    "RequestHead",
    "RequestOutput",
    "Reservation",
    "Router",
    "Throttle",
    "TokenLogprob",
    "ToolCallDelta",
    "ToolChoice",
    "join_calls",
    "offload",
]

_HOMES = {
    "LARGE": "raylm.frontend.threads",
    "AdapterDirectory": "raylm.frontend.engines.adapters",
    "Admission": "raylm.frontend.admission.queue",
    "AnswerFormat": "raylm.frontend.answers.answer_format",
    "AsyncLLM": "raylm.frontend.async_llm",
    "offload": "raylm.frontend.threads",
    "Discovery": "raylm.frontend.engines.discovery",
    "EngineClient": "raylm.frontend.engines.engine_client",
    "Reservation": "raylm.frontend.admission.queue",
    "LocalEngineClient": "raylm.frontend.engines.local_engine_client",
    "RayEngineClient": "raylm.frontend.engines.ray_engine_client",
    "Throttle": "raylm.frontend.admission.lifecycle",
    "RequestHead": "raylm.frontend.request_head",
    "Router": "raylm.frontend.engines.router",
} | dict.fromkeys(("ChatPrompt", "ChatRequest", "NamedTool", "ToolChoice"), "raylm.frontend.answers.chat_request")
_HOMES |= dict.fromkeys(
    ("ClientDisconnectedError", "Lifecycle", "OngoingRequest"), "raylm.frontend.admission.lifecycle"
)
_HOMES |= dict.fromkeys(
    ("CompletionDelta", "RequestOutput", "TokenLogprob", "ToolCallDelta", "join_calls"), "raylm.frontend.outputs"
)

__getattr__ = front_door(__name__, _HOMES)
