"""The engines of the comparison, and how to start each from the command line options."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks.compare.engines import AnsweringServer, Command, Engine, RunnerEngine, ServerEngine
from benchmarks.compare.report import OURS
from benchmarks.compare.workloads import OFFLINE

ROOT = Path(__file__).parents[2]
SERVED_NAME = "m"
VLLM_LIMITS = ("--max-model-len", "4096", "--max-num-seqs", "64")
LLAMA_SEQUENCE = 1152  # tokens of a slot: enough for W1 and W4
LONG_PROMPT_TOKENS = 4096


@dataclass(frozen=True)
class Stage:
    """Offline workloads that run with one engine."""

    workloads: Sequence[str]
    start: Callable[[], Engine]


@dataclass(frozen=True)
class Contender:
    """One engine in the comparison. ``serve`` is None if it has no server."""

    name: str
    stages: Sequence[Stage]
    serve: Callable[[], ServerEngine] | None = None


@dataclass
class Field:
    """The engines in the comparison. ``missing`` names the absent engines with the reason."""

    ours: Contender
    peers: list[Contender]
    missing: dict[str, str] = field(default_factory=dict)


class Starter:
    """Starts engines. Owns the folder of their logs and their ports."""

    def __init__(self, args: argparse.Namespace, model: Path, folder: Path) -> None:
        self._args, self._model, self._folder = args, model, folder
        self._cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[: args.threads]))

    def field(self) -> Field:
        """The engines selected by the options. A quick run uses only the first of several checkpoints."""
        args, missing = self._args, {}
        most = 1 if args.quick else None
        peers = [self._vllm(args.vllm_python)] if args.vllm_python else []
        if args.ray_serve_llm_python:
            peers += [self._ray_serve_llm(args.ray_serve_llm_python, direct) for direct in (False, True)]
        if args.llama_server and args.gguf:
            peers += [self._llama(path) for path in args.gguf[:most]]
        if args.openvino_python and args.openvino_model:
            peers += [self._openvino(path) for path in args.openvino_model[:most]]
        if not args.vllm_python:
            missing["vllm"] = "not given: --vllm-python"
        if not args.ray_serve_llm_python:
            missing["ray serve llm"] = "not given: --ray-serve-llm-python"
        if not (args.llama_server and args.gguf):
            missing["llama.cpp"] = "not given: --llama-server and --gguf"
        if not (args.openvino_python and args.openvino_model):
            missing["openvino"] = "not given: --openvino-python and --openvino-model"
        return Field(self._raylm(), peers, missing)

    # ---------------------------------------------------------------- RayLM

    def _raylm(self) -> Contender:
        options = {"model": str(self._model)} | raylm_options(self._args)
        return Contender(
            OURS, [Stage(list(OFFLINE), lambda: self._runner(OURS, sys.executable, options))], self._raylm_server
        )

    def _raylm_server(self) -> ServerEngine:
        """RayLM in its default topology, as in configs/llama.yaml."""
        port = self._args.port
        served = yaml.safe_load((ROOT / "configs" / "llama.yaml").read_text())
        served["http_options"]["port"] = port
        served["applications"][0]["args"] = {
            "model": str(self._model), "served_model_name": SERVED_NAME, **raylm_options(self._args)
        }  # fmt: skip
        path = self._folder / "raylm.yaml"
        path.write_text(yaml.safe_dump(served))
        return self._server(
            OURS, port, Command([sys.executable, "-m", "raylm.cli.main", "serve", str(path), "--no-dashboard"])
        )

    # ---------------------------------------------------------------- peers

    def _vllm(self, python: str) -> Contender:
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": str(self._args.kv_gib),
            "VLLM_CPU_OMP_THREADS_BIND": self._cores,
            "HF_HUB_OFFLINE": "1",
            "DO_NOT_TRACK": "1",
        }
        options, port = {"model": str(self._model)}, self._args.port + 1
        words = [
            python,
            "-m",
            "vllm.entrypoints.cli.main",
            "serve",
            str(self._model),
            "--dtype",
            "bfloat16",
            *VLLM_LIMITS,
        ]
        words += ["--served-model-name", SERVED_NAME, "--host", "127.0.0.1", "--port", str(port)]
        return Contender(
            "vllm",
            [Stage(list(OFFLINE), lambda: self._runner("vllm", python, options, environment))],
            lambda: self._server("vllm", port, Command(words, environment)),
        )

    def _ray_serve_llm(self, python: str, direct: bool) -> Contender:
        """Ray Serve LLM with its defaults or with direct streaming.

        RayLM runs beside it and uses Serve's usual ports and paths.
        """
        name, port = ("Ray Serve LLM, direct streaming" if direct else "Ray Serve LLM"), self._args.port + 3
        state = self._folder / f"serve-{port}"
        state.mkdir(exist_ok=True)
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": str(self._args.kv_gib),
            "HF_HUB_OFFLINE": "1",
            "DO_NOT_TRACK": "1",
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(port + 1),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(port + 2),
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(port + 3),
            "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": "31100",
            "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": "32000",
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(state / "haproxy.cfg"),
            "RAY_SERVE_HAPROXY_SOCKET_PATH": str(state / "admin.sock"),
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(state),
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(state / "server-state"),
        }
        if direct:
            environment |= {"RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING": "1", "RAY_SERVE_ENABLE_HA_PROXY": "1"}
        script = str(Path(__file__).with_name("ray_serve_llm.py"))
        command = Command([python, script, str(self._model), SERVED_NAME, str(port), self._cores], environment)
        return Contender(name, [], lambda: self._server(name, port, command, AnsweringServer))

    def _llama(self, gguf: Path) -> Contender:
        name, clients = f"llama.cpp {gguf.stem}", max(self._args.concurrency)
        short = [workload for workload in OFFLINE if workload != "W5"]
        return Contender(
            name,
            [
                Stage(short, lambda: self._llama_server(name, gguf, 32, 32 * LLAMA_SEQUENCE)),
                Stage(["W5"], lambda: self._llama_server(name, gguf, 1, LONG_PROMPT_TOKENS)),
            ],
            lambda: self._llama_server(name, gguf, clients, clients * 512),
        )

    def _llama_server(self, name: str, gguf: Path, slots: int, context: int) -> ServerEngine:
        binary, port = Path(self._args.llama_server).resolve(), self._args.port + 2
        words = [str(binary), "-m", str(gguf), "-t", str(self._args.threads), "-np", str(slots), "-c", str(context)]
        words += ["--host", "127.0.0.1", "--port", str(port)]
        return self._server(name, port, Command(words, {"LD_LIBRARY_PATH": str(binary.parent)}))

    def _openvino(self, model: Path) -> Contender:
        name = f"openvino {model.name}"
        options = {"model": str(model), "kv_gib": self._args.kv_gib, "threads": self._args.threads}
        python = self._args.openvino_python
        return Contender(name, [Stage(list(OFFLINE), lambda: self._runner(name, python, options))])

    # ---------------------------------------------------------------- engines

    def _runner(
        self, name: str, python: str, options: Mapping[str, Any], environment: Mapping[str, str] | None = None
    ) -> Engine:
        words = [python, str(Path(__file__).with_name("runner.py")), name.split()[0], json.dumps(options)]
        return RunnerEngine(name, Command(words, environment or {}), self._log(name, "offline"), self._args.timeout)

    def _server(self, name: str, port: int, command: Command, kind: type[ServerEngine] = ServerEngine) -> ServerEngine:
        url = f"http://127.0.0.1:{port}"
        return kind(name, command, self._log(name, "server"), self._args.timeout, url, SERVED_NAME)

    def _log(self, name: str, what: str) -> Path:
        return self._folder / f"{name.replace(' ', '-').replace(',', '')}-{what}.log"


def raylm_options(args: argparse.Namespace) -> dict[str, Any]:
    """RayLM's configuration: the values for a fair comparison, overridden by --raylm."""
    found: dict[str, Any] = {"dtype": "bfloat16", "cache": {"memory_gib": args.kv_gib}}
    for name, value in args.raylm:
        *path, last = name.split(".")
        node = found
        for key in path:
            node = node.setdefault(key, {})
        node[last] = value
    return found


def knob(text: str) -> tuple[str, Any]:
    """Parse ``name=value``. The value is JSON, or else a string."""
    name, _, value = text.partition("=")
    if not name or not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
