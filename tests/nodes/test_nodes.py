"""Three machines of one cluster: whatever ends or silences one of them, no text changes and no stream waits long."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from raylm.config import SERVE_VARIABLES
from tests.nodes.machines import Machine, Network, lacking, until

pytestmark = [
    pytest.mark.ray,
    pytest.mark.long,
    pytest.mark.skipif(lacking() is not None, reason=f"machines: {lacking()}"),
]

STREAMS, TOKENS = 12, 2000
FREEZE_S = 20
# Ray's own limits let a stream of a lost engine wait for 63 s; without keep-alives of HAProxy's a stream of an ingress
# without power has no limit. What is asserted tells the two apart on a slow machine too; the figures are printed.
LONGEST_GAP_S = 45
HEALTH_CHECKS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}


class Cluster:
    """Ray and one server on three machines, the first of which is the head."""

    def __init__(self, network: Network) -> None:
        self.network, self.head = network, network.machines[0]
        for home in (network.home, *(machine.home for machine in network.machines)):
            token = home / ".ray" / "auth_token"
            token.parent.mkdir()
            token.write_text("0123456789abcdef" * 4)
            token.chmod(0o600)
        address = self.head.address
        here = ("--node-ip-address", address, "--dashboard-host", address)
        self.head.run("ray", "start", "--head", "--num-cpus", "2", *here, **HEALTH_CHECKS)
        for machine in network.machines[1:]:
            self.join(machine)

    def join(self, machine: Machine) -> None:
        """Let a machine be a node."""
        head = f"{self.head.address}:6379"
        machine.run("ray", "start", "--address", head, "--num-cpus", "2", "--node-ip-address", machine.address)

    def deploy(self, folder: Path) -> None:
        args = {"model": "embedded", "engine": {"threads": 1, "replicas": 3}, "ingress": {"replicas": 3}}
        application = {"name": "default", "import_path": "raylm:build_app", "route_prefix": "/", "args": args}
        tree = {
            "applications": [application],
            "proxy_location": "EveryNode",
            "http_options": {"host": "0.0.0.0", "port": 8000},
            "controller_options": {"runtime_env": {"env_vars": SERVE_VARIABLES}},
        }
        (folder / "serve.yaml").write_text(yaml.safe_dump(tree))
        self.network.operator("serve", "deploy", "-a", f"http://{self.head.address}:8265", str(folder / "serve.yaml"))
        self.wait_until_whole()

    def seen(self) -> dict[str, Any]:
        """What the head's proxy says of the cluster, to a client on the head."""
        found: dict[str, Any] = json.loads(self.head.run("curl", "-sf", "-m", "10", "http://localhost:8000/v1/cluster"))
        return found

    def nodes_of(self, kind: str) -> list[str]:
        return sorted(one["node"] for one in self.seen()["actors"] if (one["kind"], one["state"]) == (kind, "alive"))

    def wait_until_whole(self) -> None:
        """Three ingresses know three engines."""

        def whole() -> bool:
            seen = self.seen()
            counts = [len(self.nodes_of(kind)) for kind in ("Ingress", "EngineCore", "Worker")]
            return [*counts, len(seen["engines"]), len(seen["ingresses"])] == [3] * 5

        until(whole, "the cluster is not whole", 400)

    def most_used(self) -> Machine:
        """Of the machines beside the head."""
        places = self.nodes_of("EngineCore") + self.nodes_of("Ingress")
        return max(self.network.machines[1:], key=lambda machine: places.count(machine.address))

    def begin_streams(self, machines: list[Machine]) -> subprocess.Popen[str]:
        urls = [f"http://{machine.address}:8000" for machine in machines]
        return self.network.begin("python", "-m", "tests.nodes.streams", str(STREAMS), str(TOKENS), *urls)


def results(streams: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """Of each stream, in order."""
    said, _ = streams.communicate(timeout=500)
    assert streams.returncode == 0, said[-3000:]
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("machines")
    with Network(3, folder) as network:
        cluster = Cluster(network)
        cluster.deploy(folder)
        yield cluster


@pytest.fixture(scope="module")
def texts(cluster: Cluster) -> list[str]:
    """Of an undisturbed run."""
    return [found["text"] for found in results(cluster.begin_streams(cluster.network.machines))]


def kill(machine: Machine) -> None:
    machine.kill()


def power_off(machine: Machine) -> None:
    machine.power_off()


def freeze(machine: Machine) -> None:
    with machine.frozen():
        time.sleep(FREEZE_S)


def partition(machine: Machine) -> None:
    machine.plug(in_=False)


def test_replicas_are_spread(cluster: Cluster) -> None:
    """Comes first: what a lost machine had is on the others afterwards."""
    every = [machine.address for machine in cluster.network.machines]
    assert [cluster.nodes_of(kind) for kind in ("Ingress", "EngineCore", "Worker")] == [every] * 3
    assert sorted(one["node"] for one in cluster.seen()["ingresses"]) == every


def test_a_client_on_any_machine_sees_the_cluster_and_others_do_not(cluster: Cluster) -> None:
    cluster.wait_until_whole()
    ask = ("curl", "-s", "-o", os.devnull, "-w", "%{http_code}")
    for machine in cluster.network.machines:
        for _ in range(9):  # whichever ingress HAProxy takes
            assert machine.run(*ask, "http://localhost:8000/v1/cluster") == "200"
        assert cluster.network.operator(*ask, f"http://{machine.address}:8000/v1/cluster") == "403"


@pytest.mark.parametrize("fault", [kill, power_off, freeze, partition])
def test_a_machine_that_goes_takes_no_text_with_it(
    cluster: Cluster, texts: list[str], fault: Callable[[Machine], None], capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.wait_until_whole()
    lost = cluster.most_used()
    assert lost.address in cluster.nodes_of("EngineCore")
    assert lost.address in cluster.nodes_of("Ingress")
    stay = [machine for machine in cluster.network.machines if machine is not lost]
    streams = cluster.begin_streams(stay)
    time.sleep(4)  # for all of them to have begun, on whichever machine
    with ThreadPoolExecutor(1) as pool:
        over = pool.submit(fault, lost)
        found = results(streams)
        over.result()
    gaps = sorted(one["gap"][0] for one in found)
    with capsys.disabled():
        cuts, total_s = sum(len(one["cuts"]) for one in found), max(one["s"] for one in found)
        shown = ", ".join(f"{gap:.1f}" for gap in gaps[-3:])
        print(f"\n{fault.__name__}: longest gaps {shown} s, {cuts} cuts, {total_s:.0f} s in all")
    assert [one["text"] for one in found] == texts
    assert gaps[-1] < LONGEST_GAP_S
    if fault not in (kill, power_off):
        lost.kill()
    until(lambda: lost.address not in cluster.nodes_of("Ingress"), "Ray has not noticed")
    lost.start()
    cluster.join(lost)
