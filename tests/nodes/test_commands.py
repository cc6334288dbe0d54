"""The three commands of docs/deploying.md that serve on a cluster, each on three machines."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nodes.cluster import Cluster
from tests.nodes.machines import Machine, Network, lacking, until

pytestmark = [
    pytest.mark.ray,
    pytest.mark.long,
    pytest.mark.skipif(lacking() is not None, reason=f"machines: {lacking()}"),
]
SERVE = ("raylm", "serve", "embedded", "--host", "0.0.0.0", "--threads", "1")
REPLICAS = ("--engine.replicas", "3", "--ingress.replicas", "3")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster without a server.

    The machines have the file that the page's first command prints, with more replicas.
    """
    folder = tmp_path_factory.mktemp("machines")
    with Network(3, folder) as network:
        cluster = Cluster(network, folder)
        written = network.operator(*SERVE, *REPLICAS, "--print-config")
        for home in (network.home, *(machine.home for machine in network.machines)):
            (home / "serve.yaml").write_text(written)
        yield cluster


def all_answer(cluster: Cluster) -> None:
    """Wait until each machine has an ingress and an engine, and each proxy answers."""
    every = [machine.address for machine in cluster.network.machines]

    def whole() -> bool:
        return [cluster.nodes_of(kind) for kind in ("Ingress", "EngineCore", "Worker")] == [every] * 3

    until(whole, "it does not serve", 400)
    for address in every:
        body = '{"model": "embedded", "prompt": "Hi", "max_tokens": 4}'
        options = ("-sf", "-m", "60", "-H", "content-type: application/json", "-d", body)
        assert '"text"' in cluster.network.operator("curl", *options, f"http://{address}:8000/v1/completions")


def interrupt(machine: Machine, command: str) -> None:
    """Interrupt a command on a machine with SIGINT, and wait until it has ended."""

    def running() -> list[int]:
        return [pid for pid in machine.members() if command in _words(pid)]

    for pid in running():
        os.kill(pid, signal.SIGINT)
    until(lambda: not running(), f"{command} goes on")


def _words(pid: int) -> str:
    return (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode()


def nothing_is_left(cluster: Cluster) -> None:
    until(lambda: not any(machine.runs("EngineCore") for machine in cluster.network.machines), "engines are left")


def test_serve_deploy(cluster: Cluster) -> None:
    to = ("-a", f"http://{cluster.head.address}:8265")
    cluster.network.operator("serve", "deploy", str(cluster.network.home / "serve.yaml"), *to)
    all_answer(cluster)
    cluster.network.operator("serve", "shutdown", "-y", *to)
    nothing_is_left(cluster)


def test_serve_run(cluster: Cluster) -> None:
    cluster.head.begin("serve", "run", "/tmp/home/serve.yaml", RAY_ADDRESS=f"{cluster.head.address}:6379")
    all_answer(cluster)
    interrupt(cluster.head, "serve run")
    nothing_is_left(cluster)


def test_raylm_serve(cluster: Cluster) -> None:
    """The command runs on a machine that is not the head."""
    machine = cluster.network.machines[1]
    machine.begin(*SERVE, *REPLICAS, RAY_ADDRESS=f"{cluster.head.address}:6379")
    all_answer(cluster)
    interrupt(machine, "raylm serve")
    nothing_is_left(cluster)
