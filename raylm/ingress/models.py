"""/v1/models: the one model that this application serves."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from raylm.errors import EngineUnavailableError, ModelNotFoundError
from raylm.ingress.envelope import clip

if TYPE_CHECKING:
    from raylm.frontend import AsyncLLM


def check_model(name: str, llm: AsyncLLM) -> None:
    """Refuse a model that is not served here.

    Raises:
        ModelNotFoundError: ``name`` is not the served model.
    """
    if name != llm.model_name:
        shown = clip(name, 100)
        raise ModelNotFoundError(
            f"The model '{shown}' does not exist; this server serves '{llm.model_name}'.", param="model"
        )


def model_routes(llm: AsyncLLM) -> list[Route]:
    """GET /v1/models and GET /v1/models/{id}, where the id may hold slashes."""
    created = int(time.time())

    def card() -> dict[str, Any]:
        return {
            "id": llm.model_name,
            "object": "model",
            "created": created,
            "owned_by": "raylm",
            "max_model_len": _max_model_len(llm),
        }

    async def list_models(request: Request) -> Response:
        return _json({"object": "list", "data": [card()]})

    async def retrieve_model(request: Request) -> Response:
        check_model(request.path_params["model_id"], llm)
        return _json(card())

    return [Route("/v1/models", list_models), Route("/v1/models/{model_id:path}", retrieve_model)]


def _max_model_len(llm: AsyncLLM) -> int | None:
    """None before the first engine has said it, where neither the configuration nor the checkpoint does."""
    try:
        return llm.max_model_len
    except EngineUnavailableError:
        return None


def _json(value: dict[str, Any]) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
