"""A Serve application that contains a model. The model is not an application of its own."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request

import raylm


@serve.deployment(ray_actor_options={"num_cpus": 0.1})
class Front:
    def __init__(self, model: DeploymentHandle) -> None:
        self._llm = raylm.handle(model)

    async def __call__(self, request: Request) -> dict[str, Any]:
        body = await request.json()
        outputs = [output async for output in self._llm.chat(**body)]
        whole = await self._llm.reply(**body)
        return {"streamed": "".join(output.deltas[0].text for output in outputs), "whole": whole.deltas[0].text}


app = Front.bind(raylm.build_app({"dtype": "float32", "cache": {"num_blocks": 512}, "engine": {"executor": "local"}}))
