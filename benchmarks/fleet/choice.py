"""The time an ingress needs to choose an engine, and to hash the prompt, in microseconds.

    python -m benchmarks.fleet.choice --engines 8 --tokens 8192

Other ingresses have requests on each engine. Each engine has a part of the prompt in its cache, each of another length,
or with ``--same`` all the same part. The result is the least of several rounds, because other processes share the
machine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from itertools import count

from benchmarks.rows import Report, parser
from raylm.config import Config
from raylm.engine import ChainedHasher, EngineCore, pack_keys
from raylm.frontend import LocalEngineClient, Router
from raylm.frontend.prompt_state import process
from raylm.messages import (
    BlockChanges,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineInfo,
    EngineStats,
    OtherClients,
    WorkerInfo,
)
from raylm.params import SamplingParams
from raylm.simulate.executor import SimulatedExecutor
from tests.frontend.prompts import prompt_of

BLOCK = 16


async def measure(engines: int, tokens: int, same: bool, rounds: int) -> dict[str, float]:
    """Measure the whole choice, hashing alone, and sending to the chosen engine."""
    prompt = list(range(tokens))
    router = Router(process)
    hashes = hashed(prompt)
    for number in range(engines):
        info = WorkerInfo(4096, BLOCK, 1 << 20, 1 << 31, "none", "none", "none", 1, 0, 0)
        core = EngineCore(Config(), SimulatedExecutor(info, lambda plan: 1.0, lambda new: [1]))
        await core.start()
        engine = router.add(LocalEngineClient(core, EngineInfo(str(number), 1 << 20, info)))
        held = hashes[: len(hashes) // 2 if same else len(hashes) * number // engines]
        stats = EngineStats(places=64, step_s=0.006, token_s=0.00006, others=OtherClients(1000, 8))
        empty: tuple[list[int], ...] = ([], [], [], [], [], [], [])
        blocks = BlockChanges(0, pack_keys(held), b"")
        engine.on_outputs(EngineCoreOutputs(*empty, stats, blocks=blocks, created=time.time()), time.time())
    request, keys = EngineCoreRequest(0, "", prompt, SamplingParams(max_tokens=1, seed=0)), count()
    hashing = least(lambda: hashed(prompt), rounds)
    choosing = least(lambda: router.pick(request), rounds)
    route = router.pick(request)

    def begin_and_end() -> None:
        key = next(keys)
        sent = prompt_of(EngineCoreRequest(key, "", prompt, request.params))
        router.send(sent, route)
        router.leave(sent, abort=True)

    sending = least(begin_and_end, rounds)
    await router.close()
    return {"choice": choosing, "hashing": hashing, "beyond hashing": choosing - hashing, "send and end": sending}


def hashed(prompt: list[int]) -> list[bytes]:
    """The block hashes of a prompt, as KVCacheManager computes them."""
    hasher, found = ChainedHasher(BLOCK), list[bytes]()
    hasher.extend(found, hasher.root("", None), prompt, len(prompt) // BLOCK)
    return found


def least(call: Callable[[], object], rounds: int) -> float:
    """The least time of a call in microseconds."""
    found = []
    for _ in range(rounds):
        begun = time.perf_counter()
        call()
        found.append(time.perf_counter() - begun)
    return 1e6 * min(found)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--engines", type=int, nargs="+", default=[8, 64])
    options.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192])
    options.add_argument("--same", action="store_true")
    options.add_argument("--rounds", type=int, default=500)
    args = options.parse_args()
    names = ("choice", "hashing", "beyond hashing", "send and end")
    report = Report("choice", dict.fromkeys(names, "us"), args.out)
    for engines in args.engines:
        for tokens in args.tokens:
            figures = asyncio.run(measure(engines, tokens, args.same, args.rounds))
            report.add(f"{engines} engines, {tokens} tokens{', same part' if args.same else ''}", figures)


if __name__ == "__main__":
    main()
