"""Validity of structured outputs: random schemas, expressions, choices and tools, at temperature 1.

    python -m benchmarks.engine.structured                      # 500 of each kind, the embedded model in this process
    python -m benchmarks.engine.structured --free --count 50    # the same prompts without the forms: must fail
    python -m benchmarks.engine.structured --base-url http://localhost:8000/v1 --model my-model

Every JSON answer and the arguments of every call are parsed and validated by jsonschema, expressions by Python's re.
The exit status is 1 if one answer is wrong. Answers that max_tokens cuts off are counted separately, because no
structured output can make them end in time.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from benchmarks.engine.structured_cases import KINDS, case, free
from benchmarks.rows import Report, parser
from raylm.config import Config
from raylm.engine import EngineCore, LocalExecutor
from raylm.frontend import AsyncLLM, LocalEngineClient
from raylm.ingress import build_asgi_app
from raylm.messages import EngineInfo


@asynccontextmanager
async def in_process(model: str, **config: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the whole server without Ray, on this event loop."""
    settings = Config.model_validate({"model": model, "engine": {"executor": "local"}, **config})
    core = EngineCore(settings, LocalExecutor(settings))
    llm = AsyncLLM(settings)
    info = await core.start()
    running = asyncio.create_task(core.run())
    llm.add_engine(LocalEngineClient(core, EngineInfo("local", info.max_model_len, info)))
    transport = httpx.ASGITransport(build_asgi_app(llm, settings))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://raylm/v1", timeout=600) as client:
            yield client
    finally:
        await llm.stop()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await core.shutdown()


async def grade(
    client: httpx.AsyncClient, model: str, kind: str, count: int, *, unbound: bool = False, at_once: int = 32
) -> tuple[Counter[str], list[str]]:
    """(counts of right, cut and wrong answers; descriptions of the errors) for ``count`` cases."""
    gate, found, faults = asyncio.Semaphore(at_once), Counter[str](), []

    async def one(seed: int) -> None:
        made = case(kind, seed)
        made = free(made) if unbound else made
        async with gate:
            answer = await client.post("/chat/completions", json={"model": model, **made.body})
        if answer.status_code != 200:
            found["wrong"] += 1
            faults.append(f"{kind} {seed}: {answer.text[:300]}")
            return
        (choice,) = answer.json()["choices"]
        if choice["finish_reason"] == "length":
            found["cut"] += 1
        elif fault := made.fault(choice):
            found["wrong"] += 1
            faults.append(f"{kind} {seed}: {fault}")
        else:
            found["right"] += 1

    await asyncio.gather(*(one(seed) for seed in range(count)))
    return found, faults


async def run(options: argparse.Namespace) -> int:
    """Print a line for each kind. Returns 1 if an answer is wrong."""
    if options.base_url:
        server: Any = httpx.AsyncClient(base_url=options.base_url, timeout=600)
    else:
        server = in_process(options.model, scheduler={"max_num_seqs": options.at_once})
    report = Report("structured", {"right": "", "cut": "", "wrong": "", "time": "s"}, options.out)
    wrong = 0
    async with server as client:
        for kind in options.kinds:
            began = time.perf_counter()
            found, faults = await grade(
                client, options.model, kind, options.count, unbound=options.free, at_once=options.at_once
            )
            seconds = time.perf_counter() - began
            report.add(kind, {name: found[name] for name in ("right", "cut", "wrong")} | {"time": seconds})
            for fault in faults[: options.show]:
                print(f"    {fault}")
            wrong += found["wrong"]
    return int(wrong > 0)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", default="embedded")
    options.add_argument("--base-url", help="an OpenAI server's, with /v1; by default one in this process")
    options.add_argument("--count", type=int, default=500)
    options.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    options.add_argument("--at-once", type=int, default=32)
    options.add_argument("--free", action="store_true", help="ask without the form")
    options.add_argument("--show", type=int, default=3, help="faults to print of each kind")
    sys.exit(asyncio.run(run(options.parse_args())))


if __name__ == "__main__":
    main()
