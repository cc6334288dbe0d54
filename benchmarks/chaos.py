"""Kill and stop processes at random under a mixed load, and compare every answer with that of an undisturbed run.

    python -m benchmarks.chaos --minutes 20 [--engines 2] [--ingresses 2] [--clients 8] [--seed 1] [--ingress-deaths]

Each question is asked twice on the undisturbed server, which gives the expected answers. Then clients ask at random.
Every few seconds a worker, an EngineCore or an Engine replica is killed (SIGKILL) or stopped (SIGSTOP). With
--ingress-deaths ingress replicas are killed too. A client of a dead ingress resumes its stream if the stream has ids
(examples/resuming_client.py). Otherwise it asks again, which is counted.

The output lists the deaths, the answers, the errors in the answers, and the longest silence of the streams that were
open at a death or stop. "Alone" marks silences during which no other engine (or ingress) was up. Each silence longer
than --tell seconds gets a line with the phases of its request's timeline. "Clients late" are seconds in which this
process itself did not run, for example because the machine stalled. The clients measure them as silence, so "less
lateness" gives the silences without them. The same seed gives the same load and the same faults at the same times.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.asking import GIVE_UP_S, Asked, Question, WrongError, ask, open_client
from benchmarks.rows import Report, parser, quantile
from benchmarks.silences import AFTER_S, Fault, Silence, silences, undisturbed
from tests.serving import Server, free_port, serve_file

UNITS = {"deaths": "", "stops": "", "answers": "", "different": "", "errors": "", "asked again": ""}
UNITS |= {
    f"silence {q} after a {fault}{alone}": "s"
    for fault in ("death", "stop")
    for alone in ("", ", alone")
    for q in ("p50", "p99")
}
UNITS |= {f"silence p99 after a {fault}, less lateness": "s" for fault in ("death", "stop")}
UNITS |= {"longest silence p99 without a fault": "s", "clients late": "s"}
FAULTS = [
    ("WorkerActor", signal.SIGKILL),
    ("WorkerActor", signal.SIGSTOP),
    ("EngineCoreActor", signal.SIGKILL),
    ("EngineCoreActor", signal.SIGSTOP),
    ("ServeReplica:default:Engine", signal.SIGKILL),
]
INGRESS_DEATH = ("ServeReplica:default:Ingress", signal.SIGKILL)
BETWEEN_S = (8.0, 16.0)
ASK_AGAIN_S = 0.2
TURN_S, LATE_S = 0.02, 0.1
NICENESS = -10
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "sizes": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name", "sizes"],
}
_TOOL = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}


def questions() -> list[Question]:
    """Questions of all kinds. Each has a seed or is greedy, so that there is one right answer."""
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


class Chaos:
    def __init__(self, server: Server, options: Namespace) -> None:
        self._server = server
        self._options = options
        self._questions = questions()
        self._right: list[Any] = []
        self._ends_at = 0.0
        self._late: list[tuple[float, float]] = []
        self.faults: list[Fault] = []
        self.streams: list[Asked] = []
        self.counts: Counter[str] = Counter()

    async def run(self) -> None:
        async with open_client() as self._client:
            await self._run()

    async def _run(self) -> None:
        self._right = [await self._undisturbed(question) for question in self._questions]
        for question, right in zip(self._questions, self._right, strict=True):
            again = await self._undisturbed(question)
            assert again == right, f"{question.name} has two answers on an undisturbed server"
        self._ends_at = time.monotonic() + 60 * self._options.minutes
        # In production, clients run on other machines. Here they would wait for the engines.
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
        watch = asyncio.create_task(self._watch_itself())
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._disturb())
            for client in range(self._options.clients):
                tasks.create_task(self._ask_on(random.Random(f"{self._options.seed} {client}")))
        watch.cancel()

    async def _watch_itself(self) -> None:
        """Record when this process's event loop was late, because clients measure that as silence of the server."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(TURN_S)
            if (now := time.monotonic()) - before > LATE_S:
                self._late.append((before, now))

    def _own_s(self, silence: Silence) -> float:
        """Seconds of a silence in which this process itself did not run."""
        end = silence.begin + silence.seconds
        return sum(max(0.0, min(end, until) - max(silence.begin, begin) - TURN_S) for begin, until in self._late)

    async def _undisturbed(self, question: Question) -> Any:
        asked = Asked(question, [time.monotonic()])
        await ask(self._client, self._server.url, asked)
        return asked.answer

    async def _disturb(self) -> None:
        dice = random.Random(self._options.seed)
        kinds = FAULTS + [INGRESS_DEATH] * self._options.ingress_deaths
        while True:
            await asyncio.sleep(dice.uniform(*BETWEEN_S))
            if time.monotonic() > self._ends_at - AFTER_S:
                return
            (name, number), at_random = dice.choice(kinds), dice.random()
            cluster = await self._cluster()
            victims = sorted(await asyncio.to_thread(self._server.processes, name))
            if not victims:
                continue
            pid = victims[int(at_random * len(victims))]
            sort = "death" if number == signal.SIGKILL else "stop"
            what = f"{signal.Signals(number).name} {name.rpartition(':')[2]}"
            fault = Fault(time.monotonic(), sort, what, *_roles(pid, cluster))
            with suppress(ProcessLookupError):  # it ended by itself because its engine had just died
                os.kill(pid, number)
                self.faults.append(fault)

    async def _cluster(self) -> dict[str, Any]:
        while True:
            with suppress(aiohttp.ClientError, TimeoutError):
                return await self._get("/v1/cluster")
            await asyncio.sleep(ASK_AGAIN_S)

    async def _get(self, path: str) -> dict[str, Any]:
        async with self._client.get(self._server.url + path, raise_for_status=True) as answer:
            return dict(await answer.json())

    async def _ask_on(self, dice: random.Random) -> None:
        while time.monotonic() < self._ends_at:
            number = dice.randrange(len(self._questions))
            question = self._questions[number]
            asked = Asked(question, [time.monotonic()])
            try:
                await self._ask(asked)
                answer = asked.answer
            except WrongError as error:
                self._note("errors", f"{question.name}: {error}")
            else:
                if answer != self._right[number]:
                    self._note("different", f"{question.name}: {answer} for {self._right[number]}")
                if question.body.get("stream"):
                    self.streams.append(asked)
                    if max(asked.gaps, default=0.0) > self._options.tell:
                        await self._follow(asked)
            self.counts["answers"] += 1

    async def _ask(self, asked: Asked) -> None:
        """Ask until the whole answer is there. An answer lost with an ingress is asked for again for a limited time."""
        while True:
            try:
                return await ask(self._client, self._server.url, asked)
            except WrongError as error:
                gives_up = time.monotonic() - asked.times[-1] > GIVE_UP_S
                if not error.lost or not self._options.ingress_deaths or gives_up:
                    raise
            self.counts["asked again"] += 1
            await asyncio.sleep(ASK_AGAIN_S)

    async def _follow(self, asked: Asked) -> None:
        """Get the phases of a request from the ingress that ended it."""
        epoch = time.time() - time.monotonic()
        try:
            found = await self._get(f"/v1/requests/{asked.ids[-1]}")
        except (aiohttp.ClientError, TimeoutError):
            return
        begun = found.get("received", 0.0) - epoch
        for phase in found.get("phases", ()):
            start = begun + phase["start_s"]
            asked.waits.append((start, start + phase["seconds"], phase["phase"]))
        for part in found.get("parts", ()):
            for route in part["routes"]:
                asked.waits.append((begun + route["at_s"], begun + route["at_s"], f"to {route['engine']}"))
            for one in part["events"]:
                name = f"{one['event']} {one['sequence']} step {one['step']} tokens {one['tokens']}"
                asked.waits.append((begun + one["at_s"], begun + one["at_s"], name))

    def _note(self, kind: str, text: str) -> None:
        self.counts[kind] += 1
        print(f"{kind}: {text[:600]}", flush=True)

    @property
    def _times(self) -> list[list[float]]:
        return [stream.times for stream in self.streams]

    def figures(self) -> dict[str, float]:
        found: dict[str, float] = {
            name: self.counts[name] for name in ("answers", "different", "errors", "asked again")
        }
        heard = list(silences(self.faults, self._times))
        for sort, named in (("death", "deaths"), ("stop", "stops")):
            found[named] = sum(fault.sort == sort for fault in self.faults)
            for covered, alone in ((True, ""), (False, ", alone")):
                lasted = [one.seconds for one in heard if _sort(one) == sort and one.covered == covered]
                if lasted:
                    found |= {f"silence p{q} after a {sort}{alone}": quantile(lasted, q / 100) for q in (50, 99)}
            heard_of = [one for one in heard if _sort(one) == sort and one.covered]
            if lasted := [one.seconds - self._own_s(one) for one in heard_of]:
                found[f"silence p99 after a {sort}, less lateness"] = quantile(lasted, 0.99)
        found["clients late"] = sum(now - before for before, now in self._late)
        if lasted := [one.seconds for one in undisturbed(self.faults, self._times)]:
            found["longest silence p99 without a fault"] = quantile(lasted, 0.99)
        return found

    def tell(self, started: float) -> Iterator[str]:
        """A line for each fault, followed by a line for each long silence. Times are seconds since ``started``."""
        heard = list(silences(self.faults, self._times))
        for fault in self.faults:
            others = ", ".join(sorted(fault.others)) or "no other"
            yield f"{fault.at - started:7.1f} s  {fault.what} of {fault.victim}; beside it {others}"
            yield from self._long_ones([one for one in heard if one.fault is fault], fault.at)
        yield "    none  without a fault"
        yield from self._long_ones(undisturbed(self.faults, self._times), started)

    def _long_ones(self, heard: Iterable[Silence], since: float) -> Iterator[str]:
        for one in sorted(heard, key=lambda one: -one.seconds):
            if one.seconds > self._options.tell:
                stream = self.streams[one.stream]
                alone = "" if one.covered else ", alone"
                waits = "; ".join(_waited(stream.waits, one)) or "nothing is known"
                after = f"{one.begin - since:+.2f} s, {self._own_s(one):.2f} s late itself"
                yield f"    {one.seconds:.2f} s from {after}{alone}, {stream.question.name}: {waits}"


def _sort(silence: Silence) -> str:
    return "" if silence.fault is None else silence.fault.sort


def _roles(pid: int, cluster: dict[str, Any]) -> tuple[str, frozenset[str]]:
    """The engine or ingress that a process belongs to, and the others of the same kind that serve."""
    if any(one["pid"] == pid for one in cluster["ingresses"]):
        ready = {str(one["pid"]) for one in cluster["ingresses"] if one["state"] == "ready" and one["engines"]}
        return f"{pid}", frozenset(ready - {f"{pid}"})
    engines = {one["id"].rpartition(".")[0] for one in cluster["engines"]}
    names = [one["name"] for one in cluster["actors"] if one["pid"] == pid]
    victim = re.split("[:#]", names[0])[-1].partition(".")[0] if names else f"{pid}"
    return victim, frozenset(engines - {victim})


def _waited(waits: list[tuple[float, float, str]], silence: Silence) -> Iterator[str]:
    """The phases that overlap a silence, with times since the start of the silence."""
    end = silence.begin + silence.seconds
    for begin, until, name in sorted(waits):
        if until >= silence.begin - 0.05 and begin <= end:
            yield f"{name} {begin - silence.begin:+.2f}" + (
                f" to {until - silence.begin:+.2f}" if until > begin else ""
            )


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--minutes", type=float, default=20)
    options.add_argument("--engines", type=int, default=2)
    options.add_argument("--ingresses", type=int, default=2)
    options.add_argument("--clients", type=int, default=8)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--ingress-deaths", action="store_true")
    options.add_argument("--tell", type=float, default=1.5, metavar="SECONDS", help="silences that have a line")
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
        started = time.monotonic()
        with Server(path, port) as server:
            chaos = Chaos(server, given)
            asyncio.run(chaos.run())
            said = re.sub(r"(?m)^(?!.* (lost|engine) ).*\n", "", server.log.read_text())
            server.stop(signal.SIGTERM)
    print(said)
    for line in chaos.tell(started):
        print(line)
    print(", ".join(f"{count} × {kind}" for kind, count in sorted(Counter(one.what for one in chaos.faults).items())))
    case = f"{given.minutes:g} min, {given.engines} engines, {given.ingresses} ingresses, seed {given.seed}"
    Report("chaos", UNITS, given.out).add(case, chaos.figures())


if __name__ == "__main__":
    main()
