"""Memory of an ingress before, during and after its largest answers, many of each kind, eight at a time.

    python -m benchmarks.http.answer_memory                    # 200 of each kind; /tokenize takes ten minutes
    python -m benchmarks.http.answer_memory --only kv --answers 16
    python -m benchmarks.http.answer_memory --check            # the exit status is 1 above 1.3 times
    python -m benchmarks.http.answer_memory --url http://127.0.0.1:8000 --pid PID --only embeddings

With ``--url`` and ``--pid`` the server is a ``raylm serve embedded`` that has just started, and PID is the id of its
ingress, ray::ServeReplica:default:Ingress in the list of processes. Use a new server for each kind. Otherwise the HTTP
app and AsyncLLM are the real ones, as in benchmarks.http.event_loop, in this process. curl reads the answers.

"before" is measured after one small answer of the kind. "warm" is measured three seconds after the first eight large
answers. "after" is measured three seconds after the last answer, with full caches (16 MiB of ended requests' timelines,
texts of tokens).
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.http.event_loop import CONTEXT, VOCAB_SIZE, InstantEngine, front_end
from benchmarks.rows import Report, parser
from raylm.engine.snapshot import MOST_LISTED
from raylm.messages import EngineSnapshot, EngineStats

AT_ONCE = 8
MOST = 1.3  # maximum memory relative to the memory before
SETTLE_S = 3.0


@dataclass(frozen=True)
class Kind:
    """A kind of answer. ``make`` returns a body of a given size (None for a GET). ``size`` is the largest size."""

    name: str
    path: str
    make: Callable[[int], dict[str, Any] | None]
    size: int


def _chat(size: int) -> dict[str, Any]:
    many = {"n": 16, "logprobs": True, "top_logprobs": 20, "max_tokens": size}
    return {"model": "embedded", "messages": [{"role": "user", "content": "Hi"}], "ignore_eos": True} | many


def _completion(size: int, **fields: Any) -> dict[str, Any]:
    return {"model": "embedded", "prompt": "Hi", "max_tokens": size, "ignore_eos": True, "logprobs": 20} | fields


def _prompt(size: int) -> dict[str, Any]:
    many = {"echo": True, "logprobs": 20, "prompt_logprobs": 20, "return_token_ids": True}
    return {"model": "embedded", "prompt": [300] * size, "max_tokens": 1} | many


KINDS = (
    Kind("/tokenize", "/tokenize", lambda size: {"model": "embedded", "prompt": "a" * size}, 4_194_304),
    Kind("/detokenize", "/detokenize", lambda size: {"model": "embedded", "tokens": [300] * size}, 520_000),
    Kind("chat, 16 choices, logprobs", "/v1/chat/completions", _chat, 500),
    Kind("the same as a stream", "/v1/chat/completions", lambda size: _chat(size) | {"stream": True}, 500),
    Kind("completion, logprobs", "/v1/completions", _completion, 8_000),
    Kind("prompt_logprobs, echo", "/v1/completions", _prompt, 16_000),
    Kind("embeddings", "/v1/embeddings", lambda size: {"model": "embedded", "input": ["text"] * size}, 2_048),
    Kind("embeddings, base64", "/v1/embeddings",
         lambda size: {"model": "embedded", "input": ["text"] * size, "encoding_format": "base64"}, 2_048),
    Kind("rerank", "/rerank",
         lambda size: {"model": "embedded", "query": "q", "documents": ["text " * 800] * size}, 1_024),
    Kind("/v1/cluster/kv", "/v1/cluster/kv", lambda size: None, 1),
)  # fmt: skip


class FullEngine(InstantEngine):
    """An engine that lists the maximum of blocks, each in a separate run."""

    async def snapshot(self) -> EngineSnapshot:
        blocks = list(range(0, 2 * MOST_LISTED, 2))
        columns = ["r"], [0], ["running"], [CONTEXT], [CONTEXT], [blocks]
        return EngineSnapshot(EngineStats(), 1_000_000, 16, *columns, cached=[], left_out=0)


class Memory:
    """The resident memory of a process in MiB, now and at its peak since ``reset``, as the kernel counts it."""

    def __init__(self, pid: str) -> None:
        self._process = Path("/proc") / pid

    def reset(self) -> None:
        (self._process / "clear_refs").write_text("5")

    def now_mib(self) -> float:
        return self._kib("VmRSS") / 2**10

    def peak_mib(self) -> float:
        return self._kib("VmHWM") / 2**10

    def _kib(self, name: str) -> int:
        (line,) = re.findall(rf"^{name}:\s+(\d+) kB$", (self._process / "status").read_text(), re.MULTILINE)
        return int(line)


async def ask(url: str, body: Path | None) -> int:
    """The size of an answer in bytes. The answer is discarded. A request that is refused with 429 is sent again."""
    command = [
        "curl",
        "-sf",
        "--retry",
        "1000",
        "--retry-delay",
        "1",
        "-o",
        "/dev/null",
        "-w",
        "%{size_download}",
        "-H",
        "Expect:",
    ]
    if body is not None:
        command += ["-H", "Content-Type: application/json", "--data-binary", f"@{body}"]
    process = await asyncio.create_subprocess_exec(*command, url, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"{url} was not answered.")
    return int(out)


async def measure(url: str, kind: Kind, answers: int, memory: Memory, folder: Path) -> dict[str, float]:
    """Memory in MiB around ``answers`` answers of a kind."""
    bodies = {}
    for size in (1, kind.size):
        made = kind.make(size)
        bodies[size] = None if made is None else folder / f"body-{size}"
        if made is not None:
            (folder / f"body-{size}").write_text(json.dumps(made))
    await ask(url + kind.path, bodies[1])
    await asyncio.sleep(SETTLE_S)
    before = memory.now_mib()
    memory.reset()
    room = asyncio.Semaphore(AT_ONCE)
    largest = 0  # a list of all sizes would keep memory of the answers from the system

    async def one() -> None:
        nonlocal largest
        async with room:
            size = await ask(url + kind.path, bodies[kind.size])
            if size > largest:
                largest = size

    settled = []
    for count in (AT_ONCE, answers):
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(one())
        await asyncio.sleep(SETTLE_S)
        settled.append(memory.now_mib())
    warm, after = settled
    figures = {"answer": largest / 2**20, "before": before, "peak": memory.peak_mib(), "warm": warm, "after": after}
    return figures | {"after over warm": after / warm, "after over before": after / before}


@asynccontextmanager
async def running(url: str) -> AsyncIterator[str]:
    """The URL of a server that another process runs."""
    yield url


async def run(only: str, answers: int, out: Path | None, url: str, pid: str) -> float:
    """The largest memory after a kind, relative to the memory before."""
    units = dict.fromkeys(("answer", "before", "peak", "warm", "after"), "MiB")
    units |= {"after over warm": "", "after over before": ""}
    report, worst, memory = Report("answer_memory", units, out), 0.0, Memory(pid)
    async with running(url) if url else front_end(FullEngine(VOCAB_SIZE)) as url:
        with tempfile.TemporaryDirectory() as folder:
            for kind in KINDS:
                if only in kind.name:
                    figures = await measure(url, kind, answers, memory, Path(folder))
                    report.add(kind.name, figures, f"{answers} answers")
                    worst = max(worst, figures["after over before"])
    return worst


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--only", default="", help="kinds whose name holds this")
    options.add_argument("--answers", type=int, default=200, help="of each kind")
    options.add_argument("--check", action="store_true", help=f"fail above {MOST} times the memory before")
    options.add_argument("--url", default="", help="of a server that runs, with the id of its ingress as --pid")
    options.add_argument("--pid", default="self")
    args = options.parse_args()
    if bool(args.url) != (args.pid != "self"):
        options.error("give --url and --pid together")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # the ingress's event loop
        worst = runner.run(run(args.only, args.answers, args.out, args.url, args.pid))
    print(f"the most that is left: {worst:.2f} times")
    return int(args.check and worst > MOST)


if __name__ == "__main__":
    sys.exit(main())
