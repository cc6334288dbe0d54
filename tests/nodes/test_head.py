"""The head of a cluster is lost, and its GCS: with Redis no stream of the server ends, with Postgres no response."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import postgres
from tests.nodes.cluster import TOKENS, Cluster, results
from tests.nodes.machines import OPERATOR, Machine, Network, lacking, until
from tests.postgres import Postgres

MISSING = lacking() or postgres.lacking() or (None if shutil.which("redis-server") else "redis-server is not installed")
pytestmark = [
    pytest.mark.ray,
    pytest.mark.long,
    pytest.mark.skipif(MISSING is not None, reason=f"machines, Postgres and Redis: {MISSING}"),
]
REDIS_PORT = 6400
AWAY_S = 10.0  # far below the 60 s that Ray's processes wait for a GCS


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes beside the head, which has no engine and no ingress. The operator has Redis and Postgres."""
    folder = tmp_path_factory.mktemp("machines")
    with Network(3, folder) as network:
        options = ("--bind", OPERATOR, "--port", str(REDIS_PORT), "--protected-mode", "no", "--save", "")
        redis = network.begin("redis-server", *options)
        store = Postgres(OPERATOR, network.inside_operator)
        try:
            cluster = Cluster(network, folder, head_cpus=0, redis=f"{OPERATOR}:{REDIS_PORT}")
            cluster.ingress = {"store": store.url}
            cluster.deploy()
            yield cluster
        finally:
            store.remove()
            redis.terminate()
            redis.communicate()


def restart_gcs(cluster: Cluster) -> None:
    """End the head's GCS alone, and start it again as Ray started it."""
    (pid,) = [one for one in cluster.head.members() if _command(one)[0].endswith("/gcs_server")]
    command = _command(pid)
    environment = dict(one.split("=", 1) for one in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in one)
    os.kill(pid, signal.SIGKILL)
    time.sleep(AWAY_S)
    cluster.head.begin(*command, **environment)


def restart_head(cluster: Cluster) -> None:
    """End the head's whole machine, and start it again."""
    cluster.head.kill()
    time.sleep(AWAY_S)
    cluster.head.start()
    cluster.start_head()


def _command(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")


def test_an_update_on_two_nodes_waits_for_no_third(cluster: Cluster) -> None:
    every = [machine.address for machine in cluster.served]
    kinds = ("Ingress", "EngineCore", "Worker")
    assert [cluster.nodes_of(kind) for kind in kinds] == [every] * 3
    old = {one["id"] for one in cluster.seen()["engines"]}
    cluster.deploy(step_timeout_s=77)
    until(lambda: not old & {one["id"] for one in cluster.seen()["engines"]}, "the old engines are still there")
    cluster.wait_until_whole()
    assert [cluster.nodes_of(kind) for kind in kinds] == [every] * 3


@pytest.mark.parametrize("fault", [restart_gcs, restart_head])
def test_no_stream_is_cut_when_the_gcs_starts_again(
    cluster: Cluster, fault: Callable[[Cluster], None], capsys: pytest.CaptureFixture[str]
) -> None:
    undisturbed = [one["text"] for one in results(cluster.begin_streams(cluster.served))]
    streams = cluster.begin_streams(cluster.served)
    time.sleep(4)  # for all of them to have begun
    with ThreadPoolExecutor(1) as pool:
        over = pool.submit(fault, cluster)
        found = results(streams)
        over.result()
    with capsys.disabled():
        gap, cuts, total_s = max(one["gap"][0] for one in found), sum(len(one["cuts"]) for one in found), found[0]["s"]
        print(f"\n{fault.__name__}: longest gap {gap:.1f} s, {cuts} cuts, {total_s:.0f} s")
    assert [one["cuts"] for one in found] == [[]] * len(found)
    assert [one["text"] for one in found] == undisturbed
    cluster.wait_until_whole()  # it knows the actors again


@pytest.mark.parametrize("place", [2, 1, 0])
def test_stored_responses_outlive_any_machine(cluster: Cluster, place: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Each in turn loses its power: a node with the maker of a response, the other node, and the head."""
    cluster.wait_until_whole()
    lost = cluster.network.machines[place]
    stays = next(machine for machine in cluster.served if machine is not lost)
    cluster.asked = stays

    def ask(machine: Machine, path: str, **body: Any) -> dict[str, Any]:
        sent = ["-H", "content-type: application/json", "-d", json.dumps(body)] if body else []
        url = f"http://{machine.address}:8000/v1/responses{path}"
        found: dict[str, Any] = json.loads(cluster.network.operator("curl", "-sf", "-m", "30", *sent, url))
        return found

    asked = {
        "model": "embedded",
        "input": "Tell me a story.",
        "background": True,
        "max_output_tokens": TOKENS,
        "seed": 1,
    }
    stored = ask(stays, "", **asked | {"background": False, "max_output_tokens": 20})
    running = [ask(machine, "", **asked) for machine in cluster.served for _ in range(2)]
    lost.power_off()
    began = time.monotonic()
    until(lambda: ask(stays, f"/{stored['id']}") == stored, "a stored response cannot be read")
    with capsys.disabled():
        print(f"\n{lost.name} lost its power: a stored response is read after {time.monotonic() - began:.1f} s")
    lost.start()
    if lost is cluster.head:
        cluster.start_head()
    else:
        cluster.join(lost)
    ended = ("completed", "incomplete")
    for one in running:
        has_ended = partial(lambda path: ask(stays, path)["status"] in ended, f"/{one['id']}")
        until(has_ended, "a response in the background has not ended", 400)
    cluster.wait_until_whole()
