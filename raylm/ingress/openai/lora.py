"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: adapters come and go while the server runs, as in vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

import orjson
from pydantic import Field

from raylm.errors import InvalidRequestError
from raylm.ingress.http.body import JSONObject
from raylm.ingress.openai.fields import Body
from raylm.messages import LoRAAdapter

if TYPE_CHECKING:
    from raylm.frontend import AsyncLLM

AdapterName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:/@+\-]{1,128}$")]


class LoadAdapterRequest(Body):
    """``lora_path`` is a directory below lora.root, absolute or from there."""

    unserved: ClassVar[frozenset[str]] = frozenset({"load_inplace", "is_3d_lora_weight"})

    lora_name: AdapterName
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]


class UnloadAdapterRequest(Body):
    """Which adapter to unload."""

    unserved: ClassVar[frozenset[str]] = frozenset({"lora_int_id"})

    lora_name: AdapterName


class LoadAdapter:
    """The handler of /v1/load_lora_adapter."""

    body = LoadAdapterRequest

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    async def __call__(self, data: JSONObject, request_id: str) -> bytes:
        """Load it into every engine; the answer comes when requests may name it.

        Raises:
            RayLMError: it cannot be served; nothing has changed.
        """
        body = self.body.parse(data)
        if body.lora_name == self._llm.model_name:
            raise InvalidRequestError("'lora_name' is the name of the base model.", param="lora_name")
        await self._llm.adapters.load(LoRAAdapter(body.lora_name, body.lora_path))
        return orjson.dumps({"lora_name": body.lora_name, "lora_path": body.lora_path, "loaded": True})


class UnloadAdapter:
    """The handler of /v1/unload_lora_adapter."""

    body = UnloadAdapterRequest

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    async def __call__(self, data: JSONObject, request_id: str) -> bytes:
        """Take it out of every engine; requests that still use it end with an error that names it.

        Raises:
            RayLMError: it is not there, or an engine is lost.
        """
        body = self.body.parse(data)
        await self._llm.adapters.unload(body.lora_name)
        return orjson.dumps({"lora_name": body.lora_name, "loaded": False})
