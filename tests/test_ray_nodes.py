"""Four raylets on this machine: engines run on three of them, and killing one node loses no answer."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import ray
import yaml
from ray.cluster_utils import Cluster
from ray.util.state import list_actors

from raylm.cli.serve_process import serve_ports
from tests.serving import ARGS, Server, chat, free_port, serve_file, text_of

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.filterwarnings("default")]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("RAY_worker_niceness", "0")
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    ports, claims = serve_ports()
    for name, number in ports.items():
        monkeypatch.setenv(name, number)
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": True, "dashboard_port": 0})
    for _ in range(3):
        made.add_node(num_cpus=1)
    monkeypatch.setenv("RAY_ADDRESS", made.address)
    ray.init(address=made.address, namespace="serve", log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()
    for claim in claims:
        claim.close()


def nodes_of(cls: str) -> dict[int, str]:
    """The node ids of all live actors of a class, by process id."""
    alive = list_actors(filters=[("class_name", "=", cls), ("state", "=", "ALIVE")])
    return {actor.pid: actor.node_id for actor in alive}


def test_engines_spread_and_a_lost_node_takes_no_answer_with_it(cluster: Cluster, tmp_path: Path) -> None:
    port = free_port()
    path = serve_file(tmp_path / "serve.yaml", port, ARGS | {"engine": {"threads": 1, "replicas": 2}})
    tree = yaml.safe_load(path.read_text()) | {"proxy_location": "HeadOnly"}
    path.write_text(yaml.safe_dump(tree))
    body = chat("What is a KV cache?", stream=True, ignore_eos=True, max_tokens=2500, temperature=0.8, seed=7)
    begun = threading.Event()

    def read_stream() -> str:
        found = last = ""
        with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=200) as answer:
            for line in answer.iter_lines():
                found += text_of(line)
                last = line or last
                if len(found) > 100:
                    begun.set()
        assert last == "data: [DONE]", last
        return found

    with Server(path, port, "--ready-timeout=600") as server:  # --no-dashboard needs a Ray of its own
        server.wait_until(lambda: len(nodes_of("EngineCoreActor")) == 2, "has not two engines")
        cores, workers = nodes_of("EngineCoreActor"), nodes_of("WorkerActor")
        assert len({*cores.values()}) == 2, "each EngineCore is on its own node"
        assert sorted(cores.values()) == sorted(workers.values()), "each worker is on the node of its EngineCore"
        undisturbed = read_stream()
        begun.clear()
        with ThreadPoolExecutor(1) as pool:
            reader = pool.submit(read_stream)
            assert begun.wait(300)
            engines = {*cores.values()} - {*nodes_of("ServeReplica:default:Ingress").values()}
            lost = next(node for node in cluster.worker_nodes if node.node_id in engines)
            cluster.remove_node(lost, allow_graceful=False)
            assert reader.result(200) == undisturbed
        server.wait_until(lambda: len({*nodes_of("EngineCoreActor").values()} - {lost.node_id}) == 2, "has one engine")
        assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
        os.kill(server._launcher.pid, signal.SIGINT)
        server._launcher.wait(300)
