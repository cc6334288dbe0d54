"""Kill and stop processes at random under a mixed load, and compare every answer with one of an undisturbed run.

    python -m benchmarks.chaos --minutes 20 [--engines 2] [--ingresses 2] [--clients 8] [--seed 1] [--ingress-deaths]

Each question is asked twice of the undisturbed server; these are the right answers. Then clients ask at random, while
every few seconds a worker, an EngineCore or an Engine replica is killed (SIGKILL) or stopped (SIGSTOP). With
--ingress-deaths ingress replicas are killed too: a client whose ingress is gone asks again, as its library would, up to
three times, which is counted. Printed are the deaths, the answers, what was wrong with them, and the longest silence
in streams that were open at a death or stop. The seed makes the same load and the same faults, at the same times.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import tempfile
import time
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.rows import Report, parser, quantile
from tests.serving import Server, free_port, serve_file

UNITS = {"deaths": "", "stops": "", "answers": "", "different": "", "errors": "", "asked again": ""}
UNITS |= {f"silence {q} after a {fault}": "s" for fault in ("death", "stop") for q in ("p50", "p99")}
FAULTS = [
    ("WorkerActor", signal.SIGKILL),
    ("WorkerActor", signal.SIGSTOP),
    ("EngineCoreActor", signal.SIGKILL),
    ("EngineCoreActor", signal.SIGSTOP),
    ("ServeReplica:default:Engine", signal.SIGKILL),
]
INGRESS_DEATH = ("ServeReplica:default:Ingress", signal.SIGKILL)
BETWEEN_S = (8.0, 16.0)
AFTER_S = 10.0  # in which a silence may come of a fault
TRIES = 3
# What differs between two answers that say the same.
_VOLATILE = {
    "id", "created", "created_at", "completed_at", "item_id", "call_id", "sequence_number", "response_id",
    "prompt_tokens_details", "input_tokens_details", "cache_read_input_tokens", "cache_creation_input_tokens",
    "input_tokens",
}  # fmt: skip
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "sizes": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name", "sizes"],
}
_TOOL = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}


@dataclass(frozen=True)
class Question:
    name: str
    path: str
    body: dict[str, Any]


def questions() -> list[Question]:
    """Of all kinds, each with a seed or greedy, so that there is one right answer."""
    chats: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0},
        "sampled": {"seed": 1, "temperature": 0.9},
        "sampled, streamed": {"seed": 2, "temperature": 0.9, "stream": True},
        "long, streamed": {"seed": 3, "stream": True, "max_tokens": 1500},
        "n=4, streamed": {"seed": 4, "n": 4, "stream": True},
        "logprobs": {"seed": 5, "logprobs": True, "top_logprobs": 2, "max_tokens": 60},
        "penalties": {"seed": 6, "frequency_penalty": 0.7, "presence_penalty": 0.3, "stream": True},
        "stop strings": {"seed": 7, "stop": ["the", "9"], "ignore_eos": False, "stream": True},
        "json_schema": {
            "seed": 8,
            "ignore_eos": False,
            "response_format": {"type": "json_schema", "json_schema": {"name": "thing", "schema": _SCHEMA}},
        },
        "tools": {"seed": 9, "ignore_eos": False, "tools": [{"type": "function", "function": _TOOL}]},
    }
    asked = [{"role": "user", "content": "What is a KV cache? Then count from 1 to 100."}]
    usual = {"model": "embedded", "max_tokens": 300, "ignore_eos": True, "messages": asked}
    made = [Question(name, "/v1/chat/completions", usual | fields) for name, fields in chats.items()]
    text = {"model": "embedded", "prompt": "Count: 1, 2, 3,", "max_tokens": 300, "seed": 10, "ignore_eos": True}
    made += [
        Question("completion", "/v1/completions", text),
        Question("echo", "/v1/completions", text | {"echo": True}),
    ]
    answer = {"model": "embedded", "input": "Count from 1 to 60.", "max_output_tokens": 200, "temperature": 0}
    made += [Question("response", "/v1/responses", answer | {"stream": stream}) for stream in (False, True)]
    said = {"model": "embedded", "messages": asked, "max_tokens": 200, "temperature": 0}
    made += [Question("message", "/v1/messages", said | {"stream": stream}) for stream in (False, True)]
    return made


class WrongError(Exception):
    """An answer that is an error, or none; ``lost`` if a client's library would ask again."""

    def __init__(self, text: str, lost: bool = False) -> None:
        super().__init__(text)
        self.lost = lost


@dataclass
class Asked:
    """What came, and when its parts did."""

    answer: Any = None
    times: list[float] = field(default_factory=list)


async def ask(url: str, question: Question) -> Asked:
    """Raises WrongError."""
    found = Asked(times=[time.monotonic()])
    try:
        async with (
            httpx.AsyncClient(timeout=120) as client,
            client.stream("POST", url + question.path, json=question.body) as response,
        ):
            if response.status_code != 200:
                raise WrongError(
                    f"{response.status_code} {(await response.aread()).decode()}", response.status_code >= 500
                )
            lines = []
            async for line in response.aiter_lines():
                if line.startswith("data: ") or not question.body.get("stream"):
                    found.times.append(time.monotonic())
                    lines.append(line.removeprefix("data: "))
    except httpx.HTTPError as error:
        raise WrongError(repr(error), lost=True) from error
    if not question.body.get("stream"):
        found.answer = stable(json.loads("\n".join(lines)))
        return found
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    if errors := [event for event in events if event.get("error")]:
        raise WrongError(json.dumps(errors[0]))
    found.answer = joined(events)
    return found


def stable(value: Any) -> Any:
    """An answer without what differs each time."""
    if isinstance(value, dict):
        return {name: stable(part) for name, part in value.items() if name not in _VOLATILE}
    return [stable(part) for part in value] if isinstance(value, list) else value


def joined(events: list[dict[str, Any]]) -> Any:
    """What the events of a stream say together, however they were cut."""
    texts: defaultdict[str, str] = defaultdict(str)
    last: dict[str, Any] = {}
    for event in events:
        if event.get("type") == "response.completed":
            return stable(event["response"])
        parts = event.get("choices") or ([event] if isinstance(event.get("delta"), dict) else [])
        for part in parts:
            place = part.get("index", 0)
            for name, text in _texts(part.get("delta") or {}):
                texts[f"{place} {name}"] += text
            for name in ("finish_reason", "stop_reason"):
                if reason := part.get(name) or (part.get("delta") or {}).get(name):
                    last[f"{place} {name}"] = reason
    return {"texts": dict(texts), "ends": last}


def _texts(delta: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in delta.items():
        if isinstance(value, str) and name not in ("role", "type", "stop_reason"):
            yield name, value


class Chaos:
    def __init__(self, server: Server, options: Namespace) -> None:
        self._server = server
        self._options = options
        self._questions = questions()
        self._right: dict[str, Any] = {}
        self._ends_at = 0.0
        self.faults: list[tuple[float, str]] = []  # when, "death" or "stop"
        self.of_kind: Counter[str] = Counter()
        self.streams: list[Asked] = []
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def run(self) -> None:
        for number, question in enumerate(self._questions):
            self._right[f"{number}"] = (await ask(self._server.url, question)).answer
        for number, question in enumerate(self._questions):
            again = (await ask(self._server.url, question)).answer
            assert again == self._right[f"{number}"], f"{question.name} has two answers on an undisturbed server"
        self._ends_at = time.monotonic() + 60 * self._options.minutes
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._disturb())
            for client in range(self._options.clients):
                tasks.create_task(self._ask(random.Random(f"{self._options.seed} {client}")))

    async def _disturb(self) -> None:
        dice = random.Random(self._options.seed)
        kinds = FAULTS + [INGRESS_DEATH] * self._options.ingress_deaths
        while True:
            await asyncio.sleep(dice.uniform(*BETWEEN_S))
            if time.monotonic() > self._ends_at - AFTER_S:
                return
            (name, number), at_random = dice.choice(kinds), dice.random()
            victims = sorted(self._server.processes(name))
            if not victims:
                continue
            self.faults.append((time.monotonic(), "death" if number == signal.SIGKILL else "stop"))
            self.of_kind[f"{signal.Signals(number).name} {name.rpartition(':')[2]}"] += 1
            os.kill(victims[int(at_random * len(victims))], number)

    async def _ask(self, dice: random.Random) -> None:
        while time.monotonic() < self._ends_at:
            number = dice.randrange(len(self._questions))
            question = self._questions[number]
            for again in range(TRIES):
                try:
                    found = await ask(self._server.url, question)
                except WrongError as error:
                    if error.lost and self._options.ingress_deaths and again < TRIES - 1:
                        self.counts["asked again"] += 1
                        continue
                    self._note("errors", f"{question.name}: {error}")
                else:
                    if found.answer != self._right[f"{number}"]:
                        self._note("different", f"{question.name}: {found.answer} for {self._right[f'{number}']}")
                    if question.body.get("stream"):
                        self.streams.append(found)
                break
            self.counts["answers"] += 1

    def _note(self, kind: str, text: str) -> None:
        self.counts[kind] += 1
        self.wrong.append(f"{kind}: {text[:600]}")
        print(self.wrong[-1], flush=True)

    def figures(self) -> dict[str, float]:
        found: dict[str, float] = {
            name: self.counts[name] for name in ("answers", "different", "errors", "asked again")
        }
        for kind, named in (("death", "deaths"), ("stop", "stops")):
            found[named] = sum(fault == kind for _, fault in self.faults)
            silences = [longest for at, fault in self.faults if fault == kind for longest in self._silences(at)]
            if silences:
                found |= {f"silence p{q} after a {kind}": quantile(silences, q / 100) for q in (50, 99)}
        return found

    def _silences(self, at: float) -> Iterator[float]:
        """The longest of each stream that was open ``at`` a time, soon after it."""
        for stream in self.streams:
            if stream.times[0] < at < stream.times[-1]:
                pairs = zip(stream.times, stream.times[1:], strict=False)
                yield max(end - begin for begin, end in pairs if end > at and begin < at + AFTER_S)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--minutes", type=float, default=20)
    options.add_argument("--engines", type=int, default=2)
    options.add_argument("--ingresses", type=int, default=2)
    options.add_argument("--clients", type=int, default=8)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--ingress-deaths", action="store_true")
    given = options.parse_args()
    port = free_port()
    args = {
        "engine": {"replicas": given.engines, "threads": 1},
        "ingress": {"replicas": given.ingresses, "recovery_timeout_s": 120},
        "cache": {"num_blocks": 2048},
        "scheduler": {"speculative_tokens": 3},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = serve_file(Path(folder) / "serve.yaml", port, args)
        with Server(path, port) as server:
            chaos = Chaos(server, given)
            asyncio.run(chaos.run())
            said = re.sub(r"(?m)^(?!.* lost ).*\n", "", server.log.read_text())
            server.stop(signal.SIGTERM)
    print(said)
    print(", ".join(f"{count} × {kind}" for kind, count in sorted(chaos.of_kind.items())))
    case = f"{given.minutes:g} min, {given.engines} engines, {given.ingresses} ingresses, seed {given.seed}"
    Report("chaos", UNITS, given.out).add(case, chaos.figures())


if __name__ == "__main__":
    main()
