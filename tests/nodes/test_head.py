"""The loss of a cluster's head, or of its GCS: Redis keeps all streams, and Postgres keeps responses readable."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests import postgres
from tests.nodes.cluster import Cluster, results
from tests.nodes.machines import OPERATOR, Network, lacking
from tests.postgres import Postgres

MISSING = lacking() or postgres.lacking() or (None if shutil.which("redis-server") else "redis-server is not installed")
pytestmark = [
    pytest.mark.ray,
    pytest.mark.long,
    pytest.mark.skipif(MISSING is not None, reason=f"machines, Postgres and Redis: {MISSING}"),
]
REDIS_PORT = 6400
AWAY_S = 10.0  # far less than the 60 s for which Ray's processes wait for a GCS


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A node and a head without an engine and an ingress. The operator runs Redis and Postgres."""
    folder = tmp_path_factory.mktemp("machines")
    with Network(2, folder) as network:
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
    """Kill only the head's GCS, and start it again with Ray's command."""
    (pid,) = [one for one in cluster.head.members() if _command(one)[0].endswith("/gcs_server")]
    command = _command(pid)
    environment = dict(one.split("=", 1) for one in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in one)
    os.kill(pid, signal.SIGKILL)
    time.sleep(AWAY_S)
    cluster.head.begin(*command, **environment)


def restart_head(cluster: Cluster) -> None:
    """Kill the head's machine, and start it again."""
    cluster.head.kill()
    time.sleep(AWAY_S)
    cluster.head.start()
    cluster.start_head()


def ask(cluster: Cluster, path: str, *options: str) -> dict[str, Any]:
    """The node's answer to a request for stored responses."""
    url = f"http://{cluster.served[0].address}:8000/v1/responses{path}"
    found: dict[str, Any] = json.loads(cluster.network.operator("curl", "-sf", "-m", "60", *options, url))
    return found


def _command(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")


@pytest.mark.parametrize("fault", [restart_gcs, restart_head])
def test_no_stream_is_cut_when_the_gcs_starts_again(
    cluster: Cluster, fault: Callable[[Cluster], None], capsys: pytest.CaptureFixture[str]
) -> None:
    undisturbed = [one["text"] for one in results(cluster.begin_streams(cluster.served))]
    body = {"model": "embedded", "input": "Hi", "max_output_tokens": 8}
    stored = ask(cluster, "", "-H", "content-type: application/json", "-d", json.dumps(body))
    streams = cluster.begin_streams(cluster.served)
    time.sleep(4)  # so that all streams have begun
    with ThreadPoolExecutor(1) as pool:
        over = pool.submit(fault, cluster)
        time.sleep(AWAY_S / 2)
        read = ask(cluster, f"/{stored['id']}")
        found = results(streams)
        over.result()
    with capsys.disabled():
        gap, cuts, total_s = max(one["gap"][0] for one in found), sum(len(one["cuts"]) for one in found), found[0]["s"]
        print(f"\n{fault.__name__}: longest gap {gap:.1f} s, {cuts} cuts, {total_s:.0f} s")
    assert [one["cuts"] for one in found] == [[]] * len(found)
    assert [one["text"] for one in found] == undisturbed
    assert read == stored
    cluster.wait_until_whole()  # the GCS knows the actors again
