"""A served file that changes while it is served, as with `serve deploy`, and the states of the replicas in Serve."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

from raylm import ray_private
from tests.serving import ARGS, Server, free_port, serve_file

LIMIT_S = 180


class Updates:
    """Updates of one application, through the Ray of a server that was started with its file."""

    def __init__(self, server: Server, tree: dict[str, Any]) -> None:
        self.server = server
        self.tree = copy.deepcopy(tree)

    @property
    def application(self) -> dict[str, Any]:
        entry: dict[str, Any] = self.tree["applications"][0]
        return entry

    def deploy(self) -> None:
        """Deploy the tree in its current state. Returns immediately."""
        from ray.serve.schema import ServeDeploySchema  # Ray Serve warns when it is imported

        ray_private.deploy_file(ServeDeploySchema.model_validate(self.tree))

    def replicas(self, deployment: str) -> dict[str, str]:
        """The states of a deployment's replicas, by id."""
        found = ray_private.serve_details()
        assert found is not None
        deployments = found["applications"]["default"]["deployments"]
        replicas = deployments.get(deployment, {}).get("replicas", [])
        return {replica["replica_id"]: _plain(replica["state"]) for replica in replicas}

    def status(self) -> str:
        found = ray_private.serve_details()
        assert found is not None
        return _plain(found["applications"]["default"]["status"])

    def set_engines(self, number: int) -> None:
        """Change only the number of engines, and wait until exactly that many run."""
        self.set_replicas(number)

    def set_replicas(self, number: int, deployment: str = "Engine", **numbers: int) -> None:
        """Like ``set_engines``, for any deployment. ``numbers`` are the unchanged numbers of other deployments."""
        self.ask_for_replicas(number, deployment, **numbers)
        self.wait(
            lambda: [*self.replicas(deployment).values()] == ["RUNNING"] * number, f"has not {number} of {deployment}"
        )

    def ask_for_replicas(self, number: int, deployment: str = "Engine", **numbers: int) -> None:
        """Like ``set_replicas``, without waiting."""
        wanted = {deployment: number} | numbers
        self.application["deployments"] = [{"name": name, "num_replicas": n} for name, n in wanted.items()]
        self.deploy()

    def update(self, **args: Any) -> None:
        """Change args of the application, and wait until only new replicas run."""
        before = {name: self.replicas(name).keys() for name in ("Engine", "Ingress")}
        self.application["args"] |= args
        self.deploy()

        def is_new(name: str) -> bool:
            now = self.replicas(name)
            return not now.keys() & before[name] and {*now.values()} == {"RUNNING"}

        self.wait(lambda: self.status() == "RUNNING" and is_new("Engine") and is_new("Ingress"), "is not updated")

    def wait(self, condition: Callable[[], bool], complaint: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while ray.is_initialized() and not condition():  # an abandoned test leaves this thread running
            if time.monotonic() > deadline:
                found = {name: self.replicas(name) for name in ("Engine", "Ingress")}
                raise AssertionError(f"it {complaint}: {found}\n{self.server.log.read_text()}")
            time.sleep(0.1)


@contextmanager
def updated_server(path: Path, engines: int = 1, **args: Any) -> Iterator[Updates]:
    """A server of the embedded model, started from a file, with this process connected to its Ray."""
    port = free_port()
    serve_file(path, port, ARGS | args)
    tree = yaml.safe_load(path.read_text())
    if engines:
        tree["applications"][0]["deployments"] = [{"name": "Engine", "num_replicas": engines}]
    else:
        tree["applications"][0]["deployments"] = [{"name": "Ingress", "max_ongoing_requests": 8192}]
    path.write_text(yaml.safe_dump(tree))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_AUTH_MODE", "disabled")  # neither the server nor this process uses a token
        server = Server(path, port)
    with server:
        line = re.search(r"RAY_ADDRESS=(\S+)", server.log.read_text())
        assert line is not None
        ray.init(address=line[1], namespace="serve", log_to_driver=False)
        try:
            yield Updates(server, tree)
        finally:
            from ray.serve.context import _set_global_client

            _set_global_client(None)  # otherwise the client would be used for the next Ray too
            ray.shutdown()


def _plain(state: Any) -> str:
    """The value of one of Serve's enums."""
    return str(getattr(state, "value", state))
