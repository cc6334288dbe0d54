"""A Ray cluster and a server on simulated machines, which are network namespaces of this machine."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import yaml

from raylm.serve_variables import SERVE_VARIABLES
from tests.nodes.machines import Machine, Network, until

STREAMS, TOKENS = 12, 2000
HEALTH_CHECKS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}
# Serve's proxies start slowly on a crowded machine. The default limits would end them before they are ready.
PATIENCE = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120", "RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S": "120"}


class Cluster:
    """Ray and one server on some machines. The first machine is the head.

    Each machine has an engine and an ingress, except a head with ``head_cpus`` 0.
    """

    def __init__(self, network: Network, folder: Path, *, head_cpus: int = 2, redis: str | None = None) -> None:
        self.network, self.head, self._folder = network, network.machines[0], folder
        self.ingress: dict[str, Any] = {}  # fields of the configuration besides the number of replicas
        self.served = network.machines if head_cpus else network.machines[1:]
        self._head_cpus = str(head_cpus)
        self.key = ""  # an admin's key, if there are API keys
        self.asked: Machine | None = None if head_cpus == 0 else self.head
        self._environment = HEALTH_CHECKS | ({} if redis is None else {"RAY_REDIS_ADDRESS": redis})
        for home in (network.home, *(machine.home for machine in network.machines)):
            token = home / ".ray" / "auth_token"
            token.parent.mkdir()
            token.write_text("0123456789abcdef" * 4)
            token.chmod(0o600)
        self.start_head()
        for machine in network.machines[1:]:
            self.join(machine)

    def start_head(self) -> None:
        """Start the head on the first machine."""
        address = self.head.address
        here = ("--node-ip-address", address, "--dashboard-host", address)
        self.head.run("ray", "start", "--head", "--num-cpus", self._head_cpus, *here, **self._environment)

    def join(self, machine: Machine) -> None:
        """Start a node on a machine."""
        head = f"{self.head.address}:6379"
        machine.run("ray", "start", "--address", head, "--num-cpus", "2", "--node-ip-address", machine.address)

    def deploy(self, **engine: Any) -> None:
        """Serve the embedded model, and wait until all its processes are ready."""
        count = len(self.served)
        engine = {"threads": 1, "replicas": count} | engine
        engines = engine["replicas"]
        self._whole = [count, engines, engines * engine.get("pipeline_parallel_size", 1), count, engines]
        self.submit({"model": "embedded", "engine": engine, "ingress": {"replicas": count} | self.ingress})
        self.wait_until_whole()

    def submit(self, args: dict[str, Any]) -> None:
        """Deploy an application with these arguments."""
        application = {"name": "default", "import_path": "raylm:build_app", "route_prefix": "/", "args": args}
        tree = {
            "applications": [application],
            "proxy_location": "EveryNode",
            "http_options": {"host": "0.0.0.0", "port": 8000},
            "controller_options": {"runtime_env": {"env_vars": SERVE_VARIABLES | PATIENCE}},
        }
        path = self._folder / "serve.yaml"
        path.write_text(yaml.safe_dump(tree))
        deploy = ("serve", "deploy", "-a", f"http://{self.head.address}:8265", str(path))
        # Serve gives its proxies a limited time to start, which is too short on a crowded machine
        until(lambda: self.network.operator(*deploy) is not None, "it is not deployed")

    def seen(self) -> dict[str, Any]:
        """A proxy's view of the cluster: that of ``asked``, or of the last machine with a server."""
        asked = self.asked or self.served[-1]
        options = ("-sf", "-m", "10", "-H", f"authorization: Bearer {self.key}")
        found: dict[str, Any] = json.loads(asked.run("curl", *options, "http://localhost:8000/v1/cluster"))
        return found

    def nodes_of(self, kind: str) -> list[str]:
        return sorted(one["node"] for one in self.seen()["actors"] if (one["kind"], one["state"]) == (kind, "alive"))

    def wait_until_whole(self) -> None:
        """Wait until all ingresses know all engines."""

        def whole() -> bool:
            seen = self.seen()
            found = [len(self.nodes_of(kind)) for kind in ("Ingress", "EngineCore", "Worker")]
            return [*found, len(seen["ingresses"]), len(seen["engines"])] == self._whole

        until(whole, "the cluster is not whole", 400)

    def most_used(self) -> Machine:
        """The machine besides the head with the most engines and ingresses."""
        places = self.nodes_of("EngineCore") + self.nodes_of("Ingress")
        return max(self.network.machines[1:], key=lambda machine: places.count(machine.address))

    def begin_streams(
        self, machines: list[Machine], count: int = STREAMS, tokens: int = TOKENS
    ) -> subprocess.Popen[str]:
        """Start streams through the proxies of these machines. They begin shortly after the call."""
        urls = [f"http://{machine.address}:8000" for machine in machines]
        return self.network.begin("python", "-m", "tests.nodes.streams", str(count), str(tokens), *urls)

    def begin_asks(self, machine: Machine, key: str, seconds: float, rate: float) -> subprocess.Popen[str]:
        """Start ``rate`` requests per second with a key, through the proxy of a machine."""
        url = f"http://{machine.address}:8000"
        return self.network.begin("python", "-m", "tests.nodes.asks", str(seconds), str(rate), url, KEY=key)


def results(streams: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """The results of each stream, in order."""
    said, _ = streams.communicate(timeout=500)
    assert streams.returncode == 0, said[-3000:]
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]
