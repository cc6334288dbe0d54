"""/v1/models: the model and its LoRA adapters, and vLLM's endpoints to load and unload adapters."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import orjson
from pydantic import Field
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route

from raylm.config import Config
from raylm.errors import InvalidRequestError
from raylm.ingress.http.answer import json_response
from raylm.ingress.http.ops import check_ready
from raylm.ingress.openai.fields import Body
from raylm.ingress.openai.generation import check_model
from raylm.messages import LoRAAdapter

if TYPE_CHECKING:
    from raylm.frontend import AsyncLLM, Request, Requests

AdapterName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:/@+\-]{1,128}$")]


def model_routes(llm: AsyncLLM, config: Config, requests: Requests) -> list[Route]:
    """GET /v1/models and GET /v1/models/{id}, whose id may contain slashes. 503 if /health is.

    ``root`` is the path that a model or adapter was loaded from, ``parent`` an adapter's base model.
    """
    created = int(time.time())

    def card(name: str) -> dict[str, Any]:
        shown = {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "raylm",
            "root": config.model,
            "parent": None,
            "max_model_len": llm.max_model_len,
        }
        if name in llm.adapters.known:
            shown |= {"root": llm.adapters.known[name].path, "parent": llm.model_name}
        return shown

    async def list_models(request: HTTPRequest) -> Response:
        check_ready(llm, requests)
        return json_response({"object": "list", "data": [card(name) for name in (llm.model_name, *llm.adapters.known)]})

    async def retrieve_model(request: HTTPRequest) -> Response:
        check_ready(llm, requests)
        check_model(name := request.path_params["model_id"], llm)
        return json_response(card(name))

    return [Route("/v1/models", list_models), Route("/v1/models/{model_id:path}", retrieve_model)]


class LoadAdapterRequest(Body):
    """``lora_path`` is a directory in lora.root, absolute or relative to it."""

    unserved: ClassVar[frozenset[str]] = frozenset({"load_inplace", "is_3d_lora_weight"})

    lora_name: AdapterName
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]


class UnloadAdapterRequest(Body):
    unserved: ClassVar[frozenset[str]] = frozenset({"lora_int_id"})

    lora_name: AdapterName


class AdapterHandlers:
    """The handlers that load and unload LoRA adapters."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    async def load(self, body: LoadAdapterRequest, request: Request) -> bytes:
        """Load an adapter in every engine, then answer. If an engine fails, nothing changes."""
        if body.lora_name == self._llm.model_name:
            raise InvalidRequestError("'lora_name' is the name of the base model.", param="lora_name")
        await self._llm.adapters.load(LoRAAdapter(body.lora_name, body.lora_path))
        return orjson.dumps({"lora_name": body.lora_name, "lora_path": body.lora_path, "loaded": True})

    async def unload(self, body: UnloadAdapterRequest, request: Request) -> bytes:
        """Unload an adapter. Requests that still use it end with an error that names it."""
        await self._llm.adapters.unload(body.lora_name)
        return orjson.dumps({"lora_name": body.lora_name, "loaded": False})
