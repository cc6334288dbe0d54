"""The request functions of `vllm bench serve` and of SGLang's bench_serving, from their wheels.

Both packages are installed without their dependencies for serving. Modules that are imported but not used by the
request functions, such as torch and transformers, are replaced by mocks.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

MODEL = "embedded"
QUESTION = "Why does a KV cache help?"
REQUESTS = 20
_UNUSED_BY_SGLANG = (
    "transformers", "sglang.srt", "sglang.srt.disaggregation", "sglang.srt.disaggregation.utils", "sglang.srt.utils",
    "sglang.srt.utils.network", "sglang.benchmark.datasets", "sglang.benchmark.datasets.mooncake",
)  # fmt: skip
_SGLANG_OPTIONS = {
    "disable_stream": False, "disable_ignore_eos": False, "return_logprob": False, "top_logprobs_num": 0,
}  # fmt: skip


def vllm_bench(url: str) -> None:
    """Every function of `vllm bench serve` for endpoints of RayLM: many parallel requests, all successful."""
    import aiohttp

    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations
    path = f"{spec.submodule_search_locations[0]}/benchmarks/lib/endpoint_request_func.py"
    module = _load("vllm_request_functions", path)
    backends: dict[str, tuple[str, dict[str, Any]]] = {
        "openai": ("completions", {}),
        "vllm": ("completions", {"logprobs": 2, "ignore_eos": True}),
        "openai-chat": ("chat/completions", {"ignore_eos": True}),
        "openai-responses": ("responses", {}),
    }

    async def ask() -> None:
        async with aiohttp.ClientSession() as session:
            for backend, (place, fields) in backends.items():
                asked = module.RequestFuncInput(
                    prompt=QUESTION, api_url=f"{url}/v1/{place}", prompt_len=9, output_len=32, model=MODEL, **fields
                )
                function = module.ASYNC_REQUEST_FUNCS[backend]
                _check(backend, await asyncio.gather(*(function(asked, session) for _ in range(REQUESTS))))

    asyncio.run(ask())


def sglang_bench(url: str) -> None:
    """SGLang's functions for completions and chats: many parallel requests, all successful."""
    with _stand_ins("sglang", _UNUSED_BY_SGLANG):
        module = importlib.import_module("sglang.benchmark.serving")
    module.args = argparse.Namespace(**_SGLANG_OPTIONS)

    async def ask() -> None:
        for backend, place in (("sglang-oai", "completions"), ("sglang-oai-chat", "chat/completions")):
            asked = module.RequestFuncInput(
                prompt=QUESTION, api_url=f"{url}/v1/{place}", prompt_len=9, output_len=32, model=MODEL,
                lora_name="", image_data=None, extra_request_body={},
            )  # fmt: skip
            function = module.ASYNC_REQUEST_FUNCS[backend]
            _check(backend, await asyncio.gather(*(function(asked) for _ in range(REQUESTS))))

    asyncio.run(ask())


def _check(backend: str, outputs: list[Any]) -> None:
    """Check that each output is successful and has a text and a time to first token."""
    for output in outputs:
        assert output.success, f"{backend}: {output.error[-300:]}"
        assert output.generated_text, backend
        assert output.ttft > 0, backend


def _load(name: str, path: str) -> Any:
    """Load a module from its file, without its package."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@contextmanager
def _stand_ins(package: str, names: tuple[str, ...]) -> Iterator[None]:
    """Find modules of ``package`` without running its __init__. The modules ``names`` are mocks."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    bare = ModuleType(package)
    bare.__path__ = list(spec.submodule_search_locations or ())
    before = dict(sys.modules)
    sys.modules |= {package: bare} | {name: MagicMock() for name in names}
    try:
        yield
    finally:
        for name in names:
            sys.modules.pop(name, None)
            if name in before:
                sys.modules[name] = before[name]
