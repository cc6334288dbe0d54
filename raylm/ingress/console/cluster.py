"""GET /v1/cluster: current ingresses, engines and actors, the last ten minutes, and the owners of KV blocks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from raylm.errors import RayLMError
from raylm.frontend import Filter, offload
from raylm.ingress.console.access import owner_of
from raylm.ingress.console.peers import ANSWER_S, Peers
from raylm.ingress.http.answer import json_response
from raylm.messages import EngineSnapshot, EngineStats
from raylm.version import VERSION

if TYPE_CHECKING:
    from raylm.frontend import AsyncLLM

ListActors = Callable[[], list[dict[str, Any]]]


def cluster_routes(
    llm: AsyncLLM, peers: Peers, actors: ListActors, dashboard: Callable[[], str | None] = str
) -> list[Route]:
    """Routes of the cluster. ``dashboard`` returns the URL of Ray's dashboard, or None."""

    async def cluster(request: Request) -> Response:
        owner = owner_of(request)
        asked = peers.ask("about"), asyncio.to_thread(actors), asyncio.to_thread(dashboard)
        answers, found, url = await asyncio.gather(*asked)
        return json_response({
            "now": time.time(),
            "model": llm.model_name,
            "version": VERSION,
            "fingerprint": llm.fingerprint,
            "sees": "all" if owner is None else owner,
            "ingresses": sorted(answers.found, key=lambda one: str(one["name"])),
            "missing": answers.missing,
            "engines": [_engine(client.info, llm.engine_stats) for client in llm.engines],
            "actors": found if owner is None else [],
            "dashboard": url or None if owner is None else None,
        })  # fmt: skip

    async def pools(request: Request) -> Response:
        owner = owner_of(request)
        own = None if owner is None else await _own_ids(peers, owner)
        engines = llm.engines
        snapshots = await asyncio.gather(*(_snapshot(client) for client in engines))
        held = [
            (client.info.engine_id, snapshot)
            for client, snapshot in zip(engines, snapshots, strict=True)
            if snapshot is not None
        ]

        def answer() -> Response:
            return json_response({"now": time.time(), "pools": [_pool(*engine, own) for engine in held]})

        return await offload(answer, sum(snapshot.num_blocks for _, snapshot in held))

    async def history(request: Request) -> Response:
        owner_of(request)
        answers = await peers.ask("history")
        longest = max(answers.found, key=len)
        return json_response({"now": time.time(), "samples": longest, "missing": answers.missing})

    return [
        Route("/v1/cluster", cluster),
        Route("/v1/cluster/history", history),
        Route("/v1/cluster/kv", pools),
    ]


async def _own_ids(peers: Peers, owner: str) -> set[str]:
    """The engines' ids of a key's requests."""
    answers = await peers.ask("part_ids", Filter(owner=owner, state="in_flight", limit=10_000))
    return {request_id for answer in answers.found for request_id in answer}


def _engine(info: Any, stats: dict[str, EngineStats]) -> dict[str, Any]:
    worker, now = info.worker, stats.get(info.engine_id, EngineStats())
    counted = now.counters
    return {
        "id": info.engine_id,
        "restarts": int(info.engine_id.rpartition(".")[2]) if info.engine_id.rpartition(".")[2].isdecimal() else 0,
        "max_model_len": info.max_model_len,
        "device": worker.device,
        "dtype": worker.dtype,
        "quantization": worker.quantization,
        "attention": worker.attention_backend,
        "threads": worker.threads,
        "workers": worker.tensor_parallel_size * max(1, len(worker.pipeline)),
        "stages": [asdict(stage) for stage in worker.pipeline],
        "blocks": worker.num_blocks,
        "block_size": worker.block_size,
        "running": now.running,
        "waiting": now.waiting,
        "kv_usage": now.kv_usage,
        "steps": now.steps,
        "step_s": now.step_s,
        "token_s": now.token_s,
        "preemptions": counted.preemptions,
        "prompt_tokens": counted.prompt_tokens,
        "generation_tokens": counted.generation_tokens,
        "prefix_queries": counted.prefix_queries,
        "prefix_hits": counted.prefix_hits,
        "drafted_tokens": counted.drafted_tokens,
        "accepted_tokens": counted.accepted_tokens,
    }


async def _snapshot(client: Any) -> EngineSnapshot | None:
    try:
        async with asyncio.timeout(ANSWER_S):
            snapshot: EngineSnapshot = await client.snapshot()
    except (RayLMError, TimeoutError):
        return None
    return snapshot


def _pool(engine_id: str, held: EngineSnapshot, own: set[str] | None) -> dict[str, Any]:
    """The blocks of one engine. ``cached`` is in the order of eviction. Runs are [first block, count].

    ``left_out`` entries of ``sequences`` and ``cached`` are not listed.
    """
    columns = zip(
        held.request_ids, held.indexes, held.statuses, held.num_tokens, held.num_computed, held.block_ids, strict=True
    )
    return {
        "engine": engine_id,
        "blocks": held.num_blocks,
        "block_size": held.block_size,
        "sequences": [
            {
                "request_id": request_id if own is None or request_id in own else "",
                "sequence": index,
                "status": status,
                "tokens": tokens,
                "computed": computed,
                "runs": runs(blocks),
            }
            for request_id, index, status, tokens, computed, blocks in columns
        ],
        "cached": runs(held.cached),
        "left_out": held.left_out,
    }


def runs(blocks: Sequence[int]) -> list[list[int]]:
    """Group consecutive numbers as [first, count], in the given order."""
    if not blocks:
        return []
    numbers = np.array(blocks)
    starts = np.flatnonzero(np.diff(numbers, prepend=numbers[0] - 2) != 1)
    counts = np.diff(starts, append=len(numbers))
    return list(map(list, zip(numbers[starts].tolist(), counts.tolist(), strict=True)))
