"""Front door of this room: AsyncLLM and the lines to the engines, imported when first used (Discovery needs Ray)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raylm.lazy import front_door

if TYPE_CHECKING:
    from raylm.frontend.adapters import AdapterDirectory
    from raylm.frontend.admission import Admission, Hold
    from raylm.frontend.answer_format import AnswerFormat
    from raylm.frontend.async_llm import AsyncLLM
    from raylm.frontend.chat_request import ChatPrompt, ChatRequest, NamedTool, ToolChoice
    from raylm.frontend.discovery import Discovery
    from raylm.frontend.engine_client import EngineClient
    from raylm.frontend.local_engine_client import LocalEngineClient
    from raylm.frontend.offload import LARGE, aside
    from raylm.frontend.outputs import CompletionDelta, RequestOutput, TokenLogprob, ToolCallDelta, join_calls
    from raylm.frontend.ray_engine_client import RayEngineClient
    from raylm.frontend.request_head import RequestHead
    from raylm.frontend.router import Router

__all__ = [
    "LARGE",
    "AdapterDirectory",
    "Admission",
    "AnswerFormat",
    "AsyncLLM",
    "ChatPrompt",
    "ChatRequest",
    "CompletionDelta",
    "Discovery",
    "EngineClient",
    "Hold",
    "LocalEngineClient",
    "NamedTool",
    "RayEngineClient",
    "RequestHead",
    "RequestOutput",
    "Router",
    "TokenLogprob",
    "ToolCallDelta",
    "ToolChoice",
    "aside",
    "join_calls",
]

_HOMES = {
    "LARGE": "raylm.frontend.offload",
    "AdapterDirectory": "raylm.frontend.adapters",
    "Admission": "raylm.frontend.admission",
    "AnswerFormat": "raylm.frontend.answer_format",
    "AsyncLLM": "raylm.frontend.async_llm",
    "aside": "raylm.frontend.offload",
    "Discovery": "raylm.frontend.discovery",
    "EngineClient": "raylm.frontend.engine_client",
    "Hold": "raylm.frontend.admission",
    "LocalEngineClient": "raylm.frontend.local_engine_client",
    "RayEngineClient": "raylm.frontend.ray_engine_client",
    "RequestHead": "raylm.frontend.request_head",
    "Router": "raylm.frontend.router",
} | dict.fromkeys(("ChatPrompt", "ChatRequest", "NamedTool", "ToolChoice"), "raylm.frontend.chat_request")
_HOMES |= dict.fromkeys(
    ("CompletionDelta", "RequestOutput", "TokenLogprob", "ToolCallDelta", "join_calls"), "raylm.frontend.outputs"
)

__getattr__ = front_door(__name__, _HOMES)
