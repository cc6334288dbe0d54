"""/v1/models: the model that this application serves, and its LoRA adapters."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from raylm.errors import EngineUnavailableError, ModelNotFoundError
from raylm.ingress.http.errors import clip

if TYPE_CHECKING:
    from raylm.frontend import AsyncLLM


def check_model(name: str, llm: AsyncLLM) -> str | None:
    """The LoRA adapter that ``name`` means, None for the base model.

    Raises:
        ModelNotFoundError: ``name`` is neither.
    """
    if name == llm.model_name:
        return None
    if name not in llm.adapters.known:
        shown = clip(name, 100)
        lost = llm.adapters.lost.get(name)
        why = f"was lost: {lost}" if lost else f"does not exist; this server serves '{llm.model_name}'."
        raise ModelNotFoundError(f"The model '{shown}' {why}", param="model")
    return name


def model_routes(llm: AsyncLLM) -> list[Route]:
    """GET /v1/models and GET /v1/models/{id}, where the id may hold slashes."""
    created = int(time.time())

    def card(name: str) -> dict[str, Any]:
        shown = {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "raylm",
            "max_model_len": _max_model_len(llm),
        }
        if name in llm.adapters.known:
            shown |= {"root": llm.adapters.known[name].path, "parent": llm.model_name}
        return shown

    async def list_models(request: Request) -> Response:
        return _json({"object": "list", "data": [card(name) for name in (llm.model_name, *llm.adapters.known)]})

    async def retrieve_model(request: Request) -> Response:
        check_model(name := request.path_params["model_id"], llm)
        return _json(card(name))

    return [Route("/v1/models", list_models), Route("/v1/models/{model_id:path}", retrieve_model)]


def _max_model_len(llm: AsyncLLM) -> int | None:
    """None before the first engine has said it, where neither the configuration nor the checkpoint does."""
    try:
        return llm.max_model_len
    except EngineUnavailableError:
        return None


def _json(value: dict[str, Any]) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
