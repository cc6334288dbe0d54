"""Compare RayLM with any installed peers on one machine: ratios, shares of the machine's limits, parts of a step.

    python -m benchmarks.compare --model CHECKPOINT \\
        --vllm-python ENV/bin/python --llama-server BUILD/bin/llama-server --gguf BF16.gguf Q8_0.gguf \\
        --openvino-python ENV/bin/python --openvino-model FP16_DIR INT8_DIR --ray-serve-llm-python ENV/bin/python \\
        [--quick]

Each peer needs its options. Without any, RayLM runs alone. First come the offline loads W1, W2, W4, W5 (see
workloads.py), then streamed serving over HTTP (RayLM in its default topology). A peer and RayLM are loaded at the same
time and take turns, round by round: one works while the other waits. A ratio is RayLM's figure divided by the peer's
figure of the same round; its spread is the lowest and the highest round. The machine's limit is measured before each
offline round (with --quick once). --loads chat serves streamed chats instead of completions. --rows appends each sample
to a file immediately. Figures marked * were measured while other processes used more than 0.4 cores.
--quick: one round, fewer clients, the first of several checkpoints of a peer, at most 10 minutes.
The last line is one JSON object with the ratios. Logs, all samples, raw rows and the picture are in --out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.compare import report
from benchmarks.compare.engines import Engine, EngineError, ServerEngine, adopt_orphans, family, meter
from benchmarks.compare.limits import Limits, bounds, read_shape
from benchmarks.compare.peers import ROOT, Contender, Field, Starter, knob, raylm_options
from benchmarks.compare.report import OURS, OWN_OFFLINE, Sample, StepTimes
from benchmarks.compare.workloads import (
    OFFLINE,
    SERVED,
    ClosedLoop,
    Figures,
    Prompts,
    Words,
    requests,
    warm_up,
    waves,
)
from benchmarks.rows import append
from raylm.checkpoint import resolve

QUICK = {"repeats": 1, "concurrency": [1, 8, 32], "minutes": 7.0, "timeout": 100.0}
WHOLE = {"repeats": 3, "concurrency": [1, 8, 32, 64], "minutes": 240.0, "timeout": 900.0}
STEP_BATCHES = (1, 8, 32)
SETTLE_S = 1.0  # threads of the previous engine may spin for a while before they sleep
LOADS = ["steps", *OFFLINE, *SERVED]
BY_DEFAULT = [name for name in LOADS if name != "chat"]
IDLE_CORES, IDLE_S = 0.1, 2.0
OFFLINE_SHARE = 0.6


@dataclass(frozen=True)
class Place:
    workload: str
    engine: str
    peer: str
    repeat: int
    clients: int = 0

    @property
    def case(self) -> str:
        """The case of a row."""
        name = report.shown(self.engine)
        return f"{name}, {self.clients} client{'s' * (self.clients > 1)}" if self.clients else name

    def sample(self, figures: Figures, others: float, limits: Mapping[tuple[str, str], float]) -> Sample:
        named = {f"{name} at {self.clients}" if self.clients else name: value for name, value in figures.items()}
        allowed = {name: bound for (workload, name), bound in limits.items() if workload == self.workload}
        return Sample(self.workload, self.engine, self.peer, self.repeat, named, round(others, 2), allowed)


def in_turn(engines: list[Engine], repeat: int) -> list[Engine]:
    """Alternate which engine is first, because the second engine may be affected by the first."""
    return engines if repeat % 2 else engines[::-1]


class Comparison:
    """One run: owns the samples and the list of missing engines."""

    def __init__(self, args: argparse.Namespace, model: Path, contenders: Field) -> None:
        self.args, self.model, self.contenders = args, model, contenders
        self.samples: list[Sample] = []
        self.missing = dict(contenders.missing)
        self.limits: list[Limits] = []
        self._shape = read_shape(model)
        self._words = Words(resolve(str(model)).path)
        self._started = time.monotonic()
        self._ends = self._started

    def progress(self, text: str) -> None:
        print(f"{time.monotonic() - self._started:7.1f} s  {text}", flush=True)

    def measure_limits(self) -> None:
        """Measure the machine's limits now. On a shared machine they change within minutes."""
        with meter() as used:
            self.limits.append(machine_limits(self.args.threads))
        self.progress(f"limit: {self.limits[-1]} {report.MARK if used.others > report.QUIET_CORES else ''}")

    def limit_to(self, share: float) -> None:
        """From now on, start nothing new after this share of the run's time."""
        self._ends = self._started + 60 * self.args.minutes * share

    # ---------------------------------------------------------------- offline

    def offline(self) -> None:
        """Run every offline workload with each peer in turn. Then measure RayLM's own rate at the serving sizes."""
        wanted = [name for name in OFFLINE if name in self.args.loads]
        if not wanted and "HTTP" not in self.args.loads:
            return
        with ExitStack() as stack:
            ours = self._enter(stack, self.contenders.ours.stages[0].start)
            if ours is None:
                return
            self.progress(f"RayLM: {ours.about}")
            for peer in self.contenders.peers:
                self._beside(ours, peer, wanted)
            if not self.contenders.peers:
                self._rounds([ours], OURS, wanted)
            if "HTTP" in self.args.loads:
                self._own_rate(ours)

    def _beside(self, ours: Engine, peer: Contender, wanted: list[str]) -> None:
        for stage in peer.stages:
            workloads = [name for name in stage.workloads if name in wanted]
            if workloads:
                with ExitStack() as stack:
                    theirs = self._enter(stack, stage.start)
                    if theirs is not None:
                        self._rounds([theirs, ours], peer.name, workloads)

    def _rounds(self, engines: list[Engine], peer: str, workloads: list[str]) -> None:
        for name in workloads:
            for repeat in range(self.args.repeats):
                if not self.args.quick:
                    self.measure_limits()
                for engine in in_turn(engines, repeat):
                    run = partial(OFFLINE[name].run, engine.generate)
                    self._sample(engine, Place(name, engine.name, peer, repeat), run)

    def _own_rate(self, ours: Engine) -> None:
        for clients in self.args.concurrency:
            for repeat in range(self.args.repeats):
                place = Place("HTTP", OWN_OFFLINE, OWN_OFFLINE, repeat, clients)
                self._sample(ours, place, partial(waves, ours.generate, at_once=clients))

    # ---------------------------------------------------------------- serving

    def serving(self) -> None:
        """Streams over HTTP: RayLM and each peer with a server, in turn."""
        if not set(SERVED) & set(self.args.loads):
            return
        with ExitStack() as stack:
            assert self.contenders.ours.serve is not None
            ours = self._enter(stack, self.contenders.ours.serve)
            if ours is None:
                return
            peers = [peer for peer in self.contenders.peers if peer.serve is not None]
            for peer in peers:
                with ExitStack() as inner:
                    theirs = self._enter(inner, peer.serve)
                    if theirs is not None:
                        self._loads([theirs, ours], peer.name)
            if not peers:
                self._loads([ours], OURS)

    def _loads(self, engines: list[Engine], peer: str) -> None:
        served = [name for name in SERVED if name in self.args.loads]
        for workload, clients in itertools.product(served, self.args.concurrency):
            load = ClosedLoop(clients, requests(clients, self.args.quick), SERVED[workload])
            for repeat in range(self.args.repeats):
                for engine in in_turn(engines, repeat):
                    assert isinstance(engine, ServerEngine)
                    place = Place(workload, engine.name, peer, repeat, clients)
                    self._sample(engine, place, partial(load.run, engine))

    # ---------------------------------------------------------------- one measurement

    def _sample(self, engine: Engine, place: Place, run: Callable[[Prompts], Figures]) -> None:
        """Measure once. Repeat while the machine is not quiet and --retries allows it.

        A failure is recorded and does not end the run.
        """
        name = f"{place.workload} {place.engine}"
        if name in self.missing or not self._has_time(name):
            return
        for attempt in range(self.args.retries + 1):
            prompts = Prompts(self._words, f"{place.workload} {place.clients} {place.peer} {place.repeat} {attempt}")
            engine.begin()
            time.sleep(SETTLE_S)
            try:
                with meter() as used:
                    figures = run(prompts)
            except EngineError as error:
                self.missing[name] = str(error)
                self.progress(f"{name} failed: {error}")
                return
            limits = bounds(self.limits[-1], self._shape, self.args.concurrency)
            sample = place.sample(figures, used.others, limits)
            self.progress(f"{sample.line()}   round {place.repeat + 1} of {self.args.repeats}")
            if not sample.disturbed:
                break
        self.samples.append(sample)
        self.keep(place, figures, used.others)

    def keep(self, place: Place, figures: Figures, others: float) -> None:
        """Append a sample to the file of rows, if there is one."""
        if self.args.rows is not None:
            named = report.named(figures | {"others_cores": others})
            append(self.args.rows, f"compare_{place.workload}", place.case, *named)

    def _enter(self, stack: ExitStack, start: Callable[[], Engine] | None) -> Engine | None:
        """Start an engine, warm it up and check that it is idle. Returns None if that fails or no time is left."""
        assert start is not None
        engine = start()
        if not self._has_time(engine.name):
            return None
        self.progress(f"starting {engine.name}")
        try:
            stack.enter_context(engine)
            warm_up(engine.generate, Prompts(self._words, "warm-up"))
        except EngineError as error:
            self.missing[engine.name] = str(error)
            self.progress(f"{engine.name} failed: {error}")
            return None
        self._check_idle(engine)
        return engine

    def _check_idle(self, engine: Engine) -> None:
        time.sleep(IDLE_S)
        before = sum(family(engine.pid).values())
        time.sleep(IDLE_S)
        cores = (sum(family(engine.pid).values()) - before) / IDLE_S
        line = f"{engine.name} is up, idle at {cores:.2f} cores"
        self.progress(line + (", which the other engine will lack" if cores > IDLE_CORES else ""))

    def _has_time(self, what: str) -> bool:
        if time.monotonic() < self._ends:
            return True
        self.missing[what] = "no time left"
        return False


def machine_limits(threads: int) -> Limits:
    """Measure the limits in a separate process, which returns its memory to the system."""
    words = [sys.executable, "-m", "benchmarks.compare.limits", str(threads)]
    found = json.loads(subprocess.run(words, check=True, capture_output=True, text=True, cwd=ROOT).stdout)
    return Limits(found["read"], found["gemm"])


def time_steps(args: argparse.Namespace, model: Path) -> list[StepTimes]:
    """Measure the parts of a decode step, in a separate Ray instance."""
    words = [sys.executable, "-m", "benchmarks.compare.steps", "--model", str(model)]
    words += ["--batch", *map(str, STEP_BATCHES), "--options", json.dumps(raylm_options(args))]
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
    try:
        done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=args.timeout)
    except subprocess.TimeoutExpired:
        print(f"the step's parts took longer than {args.timeout:g} s", flush=True)
        return []
    if done.returncode:
        print(f"the step's parts could not be measured: {done.stderr.strip().splitlines()[-1:]}", flush=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [report.step_times(line["batch"], line, line.get("profile")) for line in lines]


def print_report(run: Comparison, steps: list[StepTimes], folder: Path) -> None:
    """Print the tables, write the files, and print the JSON line last."""
    found = report.rows(report.with_own_rate(run.samples))
    print("\n" + "\n".join(report.table(found)))
    if steps:
        print("\n" + "\n".join(report.step_table(steps)))
    for name, why in run.missing.items():
        print(f"missing: {name}: {why}")
    report.plot(folder / "compare.png", f"{run.model.name}, {run.args.threads} threads", steps, found)
    last = report.summary(found, run.missing, steps)
    every: dict[str, Any] = {
        "limits": [asdict(limits) for limits in run.limits],
        "samples": [asdict(sample) for sample in run.samples],
    }
    every |= {"steps": [asdict(step) for step in steps], "summary": last}
    (folder / "compare.json").write_text(json.dumps(every, indent=1) + "\n")
    for row in found:
        unit = "tok/s" if row.more_is_better else "ms"
        units = {"RayLM": unit, "peer": unit, "ratio": "x", "of the limit": "x"}
        append(folder / "compare.jsonl", "compare", f"{row.key}, {row.peer}", row.medians, units)
    print(f"{report.MARK}: other processes used over {report.QUIET_CORES} cores; logs and picture: {folder}")
    print(json.dumps(last), flush=True)


def parse() -> argparse.Namespace:
    """--quick only changes defaults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="embedded", help="a checkpoint's directory or a GGUF file, the same that the peers serve"
    )
    parser.add_argument("--vllm-python", help="interpreter of an environment with vLLM's CPU build")
    parser.add_argument("--llama-server", help="llama.cpp's server binary")
    parser.add_argument("--gguf", type=Path, nargs="+", default=[], help="the model for llama.cpp, one peer each")
    parser.add_argument(
        "--ray-serve-llm-python", help="interpreter of an environment with ray[llm] and vLLM's CPU build"
    )
    parser.add_argument("--openvino-python", help="interpreter of an environment with openvino-genai")
    parser.add_argument("--openvino-model", type=Path, nargs="+", default=[], help="exported models, one peer each")
    parser.add_argument(
        "--raylm", type=knob, nargs="+", default=[], metavar="KNOB=VALUE", help="knobs of RayLM's Config"
    )
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=BY_DEFAULT)
    parser.add_argument("--quick", action="store_true", help="ends within 10 minutes")
    parser.add_argument("--repeats", type=int, help="rounds")
    parser.add_argument("--retries", type=int, default=0, help="times to measure again what was disturbed")
    parser.add_argument("--concurrency", type=int, nargs="+", help="clients of the serving loads")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of the peers")
    parser.add_argument("--kv-gib", type=int, default=4, help="KV cache of every engine that has such a limit")
    parser.add_argument("--minutes", type=float, help="begin nothing new after so long")
    parser.add_argument("--timeout", type=float, help="seconds for an engine to start, or for a sample")
    parser.add_argument("--port", type=int, default=18811, help="the first of seven")
    parser.add_argument("--out", type=Path, help="folder of logs, samples and picture; by default a new temporary one")
    parser.add_argument("--rows", type=Path, metavar="FILE.jsonl", help="append the figures of each sample as rows")
    args = parser.parse_args()
    for name, value in (QUICK if args.quick else WHOLE).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def main() -> int:
    """Run everything. The exit status is 1 if a measurement failed or did not fit into the time."""
    args = parse()
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the engines are stopped in this case too
    model = Path(str(resolve(args.model)))
    folder = args.out or Path(tempfile.mkdtemp(prefix="raylm-compare-"))
    folder.mkdir(parents=True, exist_ok=True)
    run = Comparison(args, model, Starter(args, model, folder).field())
    absent = dict(run.missing)
    run.progress(f"logs in {folder}; with {', '.join(peer.name for peer in run.contenders.peers) or 'no peers'}")
    run.measure_limits()
    steps: list[StepTimes] = []
    if "steps" in args.loads:
        run.progress(f"timing steps at batch {', '.join(map(str, STEP_BATCHES))}")
        steps = time_steps(args, model)
    try:
        run.limit_to(OFFLINE_SHARE if "HTTP" in args.loads else 1.0)
        run.offline()
        run.limit_to(1.0)
        run.serving()
    except KeyboardInterrupt:
        run.missing["the rest"] = "interrupted"
    print_report(run, steps, folder)
    return int(run.missing != absent)


if __name__ == "__main__":
    sys.exit(main())
