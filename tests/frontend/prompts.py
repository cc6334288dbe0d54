"""PromptStates without a tokenizer, for tests of engines and routers."""

from __future__ import annotations

from types import SimpleNamespace

from raylm.frontend.prompt_state import PromptState
from raylm.frontend.telemetry import Telemetry
from raylm.messages import EngineCoreRequest


def prompt_of(request: EngineCoreRequest) -> PromptState:
    """The state of a prompt whose text is never read."""
    backend = SimpleNamespace(decode=lambda token_ids, skip_special_tokens: "")
    tokenizer = SimpleNamespace(backend=backend, added_tokens={})
    return PromptState(request, tokenizer, Telemetry("m", dict))  # type: ignore[arg-type]
