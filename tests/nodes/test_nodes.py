"""Three machines of one cluster: whichever of them dies or goes silent, no text changes and no stream waits long.

The environment variable TIMES sets how often each fault happens.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.nodes.cluster import Cluster, results
from tests.nodes.machines import Machine, Network, lacking, until

pytestmark = [
    pytest.mark.ray,
    pytest.mark.long,
    pytest.mark.skipif(lacking() is not None, reason=f"machines: {lacking()}"),
]

TIMES = int(os.environ.get("TIMES", "1"))
FREEZE_S = 20
# With Ray's own limits, a stream of a lost engine waits for 63 s. Without HAProxy's keep-alives, a stream of an ingress
# without power waits forever. The bound is less, also on a slow machine. The figures are printed.
LONGEST_GAP_S = 45


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("machines")
    with Network(3, folder) as network:
        cluster = Cluster(network, folder)
        cluster.deploy()
        yield cluster


@pytest.fixture(scope="module")
def texts(cluster: Cluster) -> list[str]:
    """The texts of an undisturbed run."""
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
    """Runs first, because later tests move replicas to other machines."""
    every = [machine.address for machine in cluster.network.machines]
    assert [cluster.nodes_of(kind) for kind in ("Ingress", "EngineCore", "Worker")] == [every] * 3
    assert sorted(one["node"] for one in cluster.seen()["ingresses"]) == every


def test_a_client_on_any_machine_sees_the_cluster_and_others_do_not(cluster: Cluster) -> None:
    cluster.wait_until_whole()
    ask = ("curl", "-s", "-o", os.devnull, "-w", "%{http_code}")
    for machine in cluster.network.machines:
        for _ in range(9):  # HAProxy may choose any ingress
            assert machine.run(*ask, "http://localhost:8000/v1/cluster") == "200"
        assert cluster.network.operator(*ask, f"http://{machine.address}:8000/v1/cluster") == "403"


@pytest.mark.parametrize("fault", [kill, power_off, freeze, partition] * TIMES)
def test_a_machine_that_goes_takes_no_text_with_it(
    cluster: Cluster, texts: list[str], fault: Callable[[Machine], None], capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.wait_until_whole()
    lost = cluster.most_used()
    assert lost.address in cluster.nodes_of("EngineCore")
    assert lost.address in cluster.nodes_of("Ingress")
    stay = [machine for machine in cluster.network.machines if machine is not lost]
    streams = cluster.begin_streams(stay)
    time.sleep(4)  # so that all streams have begun, on any machine
    try:
        with ThreadPoolExecutor(1) as pool:
            over = pool.submit(fault, lost)
            found = results(streams)
            over.result()
    finally:  # the next fault needs it again
        if fault not in (kill, power_off):
            lost.kill()
        until(lambda: lost.address not in cluster.nodes_of("Ingress"), "Ray has not noticed")
        lost.start()
        cluster.join(lost)
    gaps = sorted(one["gap"][0] for one in found)
    with capsys.disabled():
        cuts, total_s = sum(len(one["cuts"]) for one in found), max(one["s"] for one in found)
        alone = max((one["gap"][0] for one in found if not one["cuts"]), default=0.0)  # only the engine was lost
        shown = ", ".join(f"{gap:.1f}" for gap in gaps[-3:]) + f" s, {alone:.1f} without a cut"
        ends = {cut[-1] for one in found for cut in one["cuts"]}
        errors = ", ".join(sorted(str(end) for end in ends - {200, "ConnectError"}))
        print(f"\n{fault.__name__}: longest gaps {shown}, {cuts} cuts, {total_s:.0f} s in all, {errors}")
    assert [one["text"] for one in found] == texts
    assert gaps[-1] < LONGEST_GAP_S
