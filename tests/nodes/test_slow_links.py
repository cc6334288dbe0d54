"""Three machines of one cluster without losses: slow links and busy processors change no text and end no process.

The environment variable MINUTES sets the length of the test with busy processors.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.nodes.cluster import Cluster, results
from tests.nodes.machines import Network, lacking

pytestmark = [
    pytest.mark.ray,
    pytest.mark.long,
    pytest.mark.skipif(lacking() is not None, reason=f"machines: {lacking()}"),
]
MINUTES = float(os.environ.get("MINUTES", "3"))
DELAY_S, LOSS = 0.05, 0.01  # for each frame to and from one machine
STAGES_DELAY_S, STAGE_TOKENS = 0.005, 400
# Measures the median seconds of a TCP handshake with a machine's proxy.
ROUND_TRIP = """
import socket, statistics, sys, time

def handshake():
    begun = time.perf_counter()
    socket.create_connection((sys.argv[1], 8000)).close()
    return time.perf_counter() - begun

print(statistics.median(handshake() for _ in range(50)))
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("machines")
    with Network(3, folder, relayed=(1, 2, 3)) as network:
        cluster = Cluster(network, folder)
        cluster.deploy()
        yield cluster


@contextmanager
def busy_processors() -> Iterator[None]:
    """Run two processes that compute all the time."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def actors(cluster: Cluster) -> list[tuple[str, str, int, str]]:
    """The actors with their processes and states."""
    found = cluster.seen()["actors"]
    return sorted((one["kind"], one["node"], one["pid"], one["state"]) for one in found)


def test_a_slow_link_changes_no_text_and_cuts_no_stream(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    machines, last = cluster.network.machines, cluster.network.machines[-1]
    undisturbed = [one["text"] for one in results(cluster.begin_streams(machines))]
    before = actors(cluster)
    streams = cluster.begin_streams(machines)
    time.sleep(2)
    last.slow(DELAY_S, LOSS)
    found = results(streams)
    last.slow(0.0)
    with capsys.disabled():
        gap, total_s = max(one["gap"][0] for one in found), max(one["s"] for one in found)
        print(f"\n{DELAY_S * 1e3:.0f} ms and {LOSS:.0%} loss: longest gap {gap:.1f} s, {total_s:.0f} s in all")
    assert [one["cuts"] for one in found] == [[]] * len(found)
    assert [one["text"] for one in found] == undisturbed
    assert actors(cluster) == before


def test_busy_processors_end_nothing(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    before, gaps = actors(cluster), []
    end = time.monotonic() + 60 * MINUTES
    with busy_processors():
        while time.monotonic() < end:
            found = results(cluster.begin_streams(cluster.network.machines))
            gaps.append(max(one["gap"][0] for one in found))
            assert [one["cuts"] for one in found] == [[]] * len(found)
            time.sleep(min(30, max(0.0, end - time.monotonic())))  # an idle cluster must lose no actor either
    with capsys.disabled():
        print(f"\n{MINUTES:.0f} minutes beside two busy processes: {len(gaps)} times, longest gap {max(gaps):.1f} s")
    assert actors(cluster) == before


def test_a_delay_between_stages_costs_one_round_trip_a_step(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs last, because it serves the model with two stages."""
    cluster.deploy(pipeline_parallel_size=2, replicas=1)
    assert len(cluster.nodes_of("Worker")) == len(set(cluster.nodes_of("Worker"))) == 2
    assert set(cluster.nodes_of("EngineCore")) < set(cluster.nodes_of("Worker"))

    def token_s() -> float:
        """The seconds per token of a single stream."""
        every = [results(cluster.begin_streams(cluster.network.machines, 1, STAGE_TOKENS))[0]["s"] for _ in range(3)]
        return statistics.median(every) / STAGE_TOKENS

    token_s()  # warm-up
    without_s = token_s()
    for machine in cluster.network.machines:
        machine.slow(STAGES_DELAY_S / 2)  # a frame passes two links
    late_s = token_s()
    round_trip_s = float(cluster.head.run("python", "-c", ROUND_TRIP, cluster.network.machines[1].address))
    round_trips = (late_s - without_s) / round_trip_s
    with capsys.disabled():
        shown = f"{without_s * 1e3:.1f} ms a token without delay, {late_s * 1e3:.1f} ms with"
        print(f"\n{shown}: {round_trips:.2f} round trips of {round_trip_s * 1e3:.1f} ms")
    assert round_trips < 1.5  # 2 or more if a step waited for another message or for an acknowledgement
