"""The cost of engines in an ingress: the time to choose one, hash a prompt and read a report, and memory.

    python -m benchmarks.fleet.choice --engines 8 64 1024 10000 --tokens 8192

Other ingresses have requests on each engine. Each engine has a part of the prompt in its cache, each of another length
(with ``--same`` all the same part), and ``--blocks`` other blocks. A report has the load, and ``--changed`` new blocks
that replace old ones. Times are the least of several rounds, because other processes share the machine.
"""

from __future__ import annotations

import asyncio
import random
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path

from benchmarks.rows import Report, parser
from raylm.engine import ChainedHasher, pack_keys
from raylm.frontend import RoutedEngine, Router
from raylm.frontend.prompt_state import PromptState, process
from raylm.messages import BlockChanges, EngineCoreOutputs, EngineCoreRequest, EngineStats, OtherClients
from raylm.params import SamplingParams
from tests.frontend.played_engine import PlayedEngine
from tests.frontend.prompts import prompt_of

BLOCK = 16
_STATS = EngineStats(places=64, step_s=0.006, token_s=0.00006, others=OtherClients(1000, 8))


async def measure(engines: int, tokens: int, blocks: int, changed: int, same: bool, rounds: int) -> dict[str, float]:
    """Measure the whole choice, hashing alone, sending to the chosen engine, reports, and the memory of an engine."""
    prompt, rng = list(range(tokens)), random.Random(1)
    hashes, before = hashed(prompt), memory()
    router: Router[PromptState] = Router(process)
    routed = []
    for number in range(engines):
        engine = router.add(PlayedEngine(f"engine-{number}", max_model_len=1 << 20))
        held = hashes[: len(hashes) // 2 if same else len(hashes) * number // engines]
        send_report(engine, 0, [*held, *(rng.randbytes(32) for _ in range(blocks))])
        routed.append(engine)
    of_each = (memory() - before) / engines
    request, keys = EngineCoreRequest(0, "", prompt, SamplingParams(max_tokens=1, seed=0)), count()
    hashing = least(lambda: hashed(prompt), rounds)
    choosing = least(lambda: router.pick(request), rounds)
    route = router.pick(request)

    def begin_and_end() -> None:
        sent = prompt_of(EngineCoreRequest(next(keys), "", prompt, request.params))
        router.send(sent, route)
        router.leave(sent, abort=True)

    sending = least(begin_and_end, rounds)
    reports = changes(rng, changed)
    reading = least(lambda: send_report(routed[0], *next(reports)), rounds)
    await router.close()
    return {
        "choice": choosing, "hashing": hashing, "beyond hashing": choosing - hashing, "send and end": sending,
        "report": reading, "memory": of_each / 1024,
    }  # fmt: skip


def changes(rng: random.Random, changed: int) -> Iterator[tuple[int, list[bytes], list[bytes]]]:
    """The reports after the first one: (number, stored blocks, removed blocks)."""
    old: list[bytes] = []
    for number in count(1):
        new = [rng.randbytes(32) for _ in range(changed)]
        yield number, new, old
        old = new


def send_report(engine: RoutedEngine, number: int, stored: Sequence[bytes], removed: Sequence[bytes] = ()) -> None:
    empty: tuple[list[int], ...] = ([], [], [], [], [], [], [])
    blocks = BlockChanges(number, pack_keys(stored), pack_keys(removed))
    engine.on_outputs(EngineCoreOutputs(*empty, _STATS, blocks=blocks, created=time.time()), time.time())


def memory() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


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
    options.add_argument("--blocks", type=int, default=1000)
    options.add_argument("--changed", type=int, default=4)
    options.add_argument("--same", action="store_true")
    options.add_argument("--rounds", type=int, default=200)
    args = options.parse_args()
    names = ("choice", "hashing", "beyond hashing", "send and end", "report")
    report = Report("choice", dict.fromkeys(names, "us") | {"memory": "KiB"}, args.out)
    for engines in args.engines:
        for tokens in args.tokens:
            figures = asyncio.run(measure(engines, tokens, args.blocks, args.changed, args.same, args.rounds))
            report.add(f"{engines} engines, {tokens} tokens{', same part' if args.same else ''}", figures)


if __name__ == "__main__":
    main()
