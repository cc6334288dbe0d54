"""The private names of Ray that raylm/ray_private.py uses, one test each. A test fails if an upgrade removes a name."""

from __future__ import annotations

import inspect
import re
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray warns when its modules are imported


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("ray.actor", "ActorHandle._actor_id"),
        ("ray._private.worker", "global_worker.actors"),
        ("ray._private.worker", "_global_node"),
        ("ray._private.node", "Node.kill_dashboard"),
        ("ray._private.node", "Node.start_api_server"),
        ("ray._private.node", "Node.webui_url"),
        ("ray._private.ray_constants", "DASHBOARD_ADDRESS"),
        ("ray._private.ray_constants", "KV_NAMESPACE_DASHBOARD"),
        ("ray._private.utils", "get_dashboard_dependency_error"),
        ("ray.experimental.internal_kv", "_internal_kv_put"),
        ("ray.experimental.internal_kv", "_internal_kv_del"),
        ("ray.experimental.internal_kv", "_internal_kv_get"),
        ("ray._common.constants", "HEAD_NODE_RESOURCE_NAME"),
        ("ray._common.utils", "import_attr"),
        ("ray._private.state", "actors"),
        ("ray._private.state", "jobs"),
        ("ray.serve._private.api", "call_user_app_builder_with_args_if_necessary"),
        ("ray.serve._private.client", "ServeControllerClient.get_serve_details"),
        ("ray.serve._private.client", "ServeControllerClient.deploy_apps"),
        ("ray.serve._private.client", "ServeControllerClient.delete_apps"),
        ("ray.serve.context", "_get_global_client"),
        ("ray.serve._private.controller", "HAProxyManager"),
        ("ray.serve._private.deployment_scheduler", "DeploymentScheduler._get_available_resources_per_node"),
        ("ray.serve._private.deployment_scheduler", "ReplicaSchedulingRequest.requested_resources"),
        ("ray.serve._private.haproxy", "HAProxyManager.__ray_metadata__.modified_class.__ray_actor_class__"),
        ("ray.serve._private.haproxy", "HAProxyApi._start_and_wait_for_haproxy"),
        ("ray.serve._private.haproxy", "HAProxyConfig.bufsize"),
        ("ray.serve._private.haproxy", "HAProxyConfig.error_file_path"),
        ("ray.serve._private.constants", "SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER"),
        ("ray.serve._private.constants", "SERVE_HTTP_REQUEST_ID_HEADER"),
        ("ray.serve._private.constants", "SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER"),
        ("ray.serve._private.constants", "SERVE_MULTIPLEXED_MODEL_ID"),
        ("ray.serve._private.constants", "SERVE_SESSION_ID"),
        ("ray.serve._private.haproxy", "HAProxyConfig.timeout_client_s"),
        ("ray.serve._private.haproxy", "HAProxyConfig.timeout_connect_s"),
        ("ray.serve._private.haproxy", "HAProxyConfig.timeout_http_request_s"),
    ],
)
def test_a_name_is_there(module: str, name: str) -> None:
    reduce(getattr, name.split("."), import_module(module))


@pytest.mark.parametrize(
    ("module", "attribute"),
    [
        ("ray.serve._private.replica", "self._replica_impl"),
        ("ray.serve._private.replica", "self._shutting_down"),
        ("ray.serve._private.replica", "__serve_build_asgi_app__"),
        ("ray.serve._private.haproxy", "self._haproxy"),
        ("ray.serve._private.haproxy", "self._http_options"),
        ("ray.serve._private.haproxy", "self._target_to_server("),
        ("ray._private.node", "self.all_processes"),
        ("ray.serve._private.deployment_scheduler", "self._running_replicas"),
        ("ray.serve._private.deployment_scheduler", "self._launching_replicas"),
    ],
)
def test_an_attribute_of_an_object_is_there(module: str, attribute: str) -> None:
    assert attribute in inspect.getsource(import_module(module))


def test_the_headers_that_serve_reads_in_a_replica() -> None:
    from raylm.ray_private import serve_headers

    steering, read = serve_headers()
    assert steering == {b"x-request-timeout-seconds", b"x-request-disconnect-disabled"} < read
    assert {b"x-request-id", b"x-session-id", b"serve-multiplexed-model-id", b"traceparent", b"tracestate"} < read
    handling = inspect.getsource(import_module("ray.serve._private.replica").Replica._direct_ingress_asgi)
    assert set(re.findall(r"(\w+)\(headers\)", handling)) == {
        "_parse_request_timeout", "parse_disconnect_disabled_header", "parse_session_id_header"}  # fmt: skip
    assert set(re.findall(r"\bSERVE_[A-Z_]+\b", handling)) == {
        "SERVE_HTTP_REQUEST_ID_HEADER", "SERVE_MULTIPLEXED_MODEL_ID"}  # fmt: skip


def test_a_ray_on_loopback_is_named_to_others_by_an_address_that_ray_does_not_replace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from raylm import ray_private

    services = import_module("ray._private.services")
    assert [*inspect.signature(services.start_raylet).parameters][:2] == ["redis_address", "gcs_address"]
    started: list[tuple[Any, ...]] = []
    monkeypatch.setattr(services, "start_raylet", lambda *args, **_: started.append(args))
    ray_private.let_others_find_ray()
    for address in ("127.0.0.1:6379", "192.0.2.7:6379"):
        services.start_raylet(None, address, "node", huge_pages=False)
    assert started == [(None, "[::ffff:127.0.0.1]:6379", "node"), (None, "192.0.2.7:6379", "node")]
    assert [services.canonicalize_bootstrap_address(args[1]) for args in started] == [args[1] for args in started]


def test_the_variable_by_which_ray_listens_on_loopback() -> None:
    from raylm.cli.serve_process import _OWN_RAY

    assert import_module("ray._private.ray_constants").ENABLE_RAY_CLUSTERS_ENV_VAR in _OWN_RAY


def test_haproxys_template_has_each_part_that_is_changed_once() -> None:
    from raylm import ray_private

    template = import_module("ray.serve._private.haproxy").HAPROXY_CONFIG_TEMPLATE
    names = (
        "ADMIN_SOCKET", "KEEP_ALIVE", "DEFAULTS", "FRONTEND", "ROUTING", "BACKENDS", "PROMETHEUS", "AFTER_PROMETHEUS",
        "STATISTICS", "PROMETHEUS_PORT", "STATISTICS_PORT", "REPLICA",
    )  # fmt: skip
    assert [template.count(getattr(ray_private, f"_{name}")) for name in names] == [1] * len(names)


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("::1", "::1"), ("127.0.0.2", "127.0.0.2"), ("localhost", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"),
        ("::", "127.0.0.1"), (None, "127.0.0.1"),
    ],
)  # fmt: skip
def test_haproxy_connects_to_replicas_of_its_node_where_they_listen(host: str | None, address: str) -> None:
    from types import SimpleNamespace

    from ray.serve._private.haproxy import ServerConfig

    from raylm.ray_private import connect_where_replicas_listen

    servers = {"here": ServerConfig("a", "127.0.0.1", 30000), "elsewhere": ServerConfig("b", "192.0.2.9", 30000)}
    manager = SimpleNamespace(_http_options=SimpleNamespace(host=host), _target_to_server=servers.__getitem__)
    connect_where_replicas_listen(manager)
    assert manager._target_to_server("here") == ServerConfig("a", address, 30000)
    assert manager._target_to_server("elsewhere").host == "192.0.2.9"


@pytest.mark.parametrize(
    "name", ["ADMIN_SOCKET", "KEEP_ALIVE", "FRONTEND", "PROMETHEUS", "STATISTICS", "BACKENDS", "REPLICA"]
)
def test_a_part_that_went_away_is_no_silent_change(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from raylm import ray_private

    haproxy = import_module("ray.serve._private.haproxy")
    before = haproxy.HAPROXY_CONFIG_TEMPLATE.replace(getattr(ray_private, f"_{name}"), "")
    monkeypatch.setattr(haproxy, "HAPROXY_CONFIG_TEMPLATE", before)
    with pytest.raises(RuntimeError, match="0 times instead of once"):
        ray_private.edit_haproxys_template(ray_private.HAProxyLines("", "", "", "    x\n", " y", 10, None))
    assert before == haproxy.HAPROXY_CONFIG_TEMPLATE


class Nodes:
    """Serve's view of three nodes with four CPUs each."""

    def __init__(self) -> None:
        self.cpus = dict.fromkeys("abc", 4.0)

    def get_active_node_ids(self) -> set[str]:
        return set(self.cpus)

    def get_available_resources_per_node(self) -> dict[str, dict[str, float]]:
        return {node: {"CPU": cpus, "GPU": 4.0} for node, cpus in self.cpus.items()}

    get_total_resources_per_node = get_available_resources_per_node


def test_replicas_are_spread_over_the_nodes_that_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.serve._private.common import DeploymentID, ReplicaID
    from ray.serve._private.deployment_scheduler import (
        DeploymentScheduler,
        ReplicaConfig,
        ReplicaSchedulingRequest,
        SpreadDeploymentSchedulingPolicy,
    )

    from raylm.ray_private import spread_over_nodes

    placed: list[str | None] = []

    def place(self: Any, request: Any, strategy: str, target_node_id: str | None = None) -> bool:
        placed.append(target_node_id)
        del self._pending_replicas[request.replica_id.deployment_id][request.replica_id]
        self._on_replica_launching(request.replica_id, target_node_id=target_node_id)
        return True

    monkeypatch.setattr(DeploymentScheduler, "_schedule_replica", place)
    spread_over_nodes(frozenset({"Ingress"}))
    nodes = Nodes()
    scheduler = DeploymentScheduler(nodes, "a", lambda request: None)

    def start(name: str, replica: str, resources: dict[str, float], strategy: str | None = None) -> str | None:
        """The node that Serve requests for the replica."""
        of = DeploymentID(name, "app")
        if of not in scheduler._deployments:
            scheduler.on_deployment_created(of, SpreadDeploymentSchedulingPolicy())
            config = ReplicaConfig.create(Nodes, ray_actor_options={"num_cpus": 0.1})
            scheduler.on_deployment_deployed(of, config)
        request = ReplicaSchedulingRequest(
            replica_id=ReplicaID(replica, of), actor_def=None, actor_resources=resources, actor_options={},
            actor_init_args=(), on_scheduled=lambda *_: None, placement_group_strategy=strategy,
        )  # fmt: skip
        scheduler._pending_replicas[of][request.replica_id] = request
        scheduler._schedule_with_spread_strategy()
        return placed[-1]

    small = {"CPU": 0.1}
    assert start("Other", "o", small) is None
    assert {start("Ingress", one, small) for one in "123"} == {"a", "b", "c"}
    assert {start("Ingress", one, small) for one in "456"} == {"a", "b", "c"}, "in an update, before old replicas stop"
    for one in "14":
        scheduler.on_replica_running(ReplicaID(one, DeploymentID("Ingress", "app")), "a")
        scheduler.on_replica_stopping(ReplicaID(one, DeploymentID("Ingress", "app")))
    nodes.cpus.pop("a")  # node a is lost
    assert {start("Ingress", one, small) for one in "78"} == {"b", "c"}
    assert start("Ingress", "s", small, "SPREAD") is None, "Ray refuses an engine of several nodes with a fixed node"
    nodes.cpus["b"] = 0.0
    assert start("Ingress", "9", small) == "c", "the only node with free CPUs"
    nodes.cpus["c"] = 0.0
    assert start("Ingress", "10", small) is None
    assert start("Ingress", "11", {"GPU": 1.0}) is None


def test_a_replica_listens_for_others_by_the_function_that_is_replaced() -> None:
    source = inspect.getsource(import_module("ray.serve._private.replica"))
    assert source.count('add_port_to_grpc_server(self._server, "[::]:0")') == 1
    calls = inspect.getsource(import_module("ray._common.tls_utils").add_port_to_grpc_server)
    assert "server" in calls
    assert "address" in calls


def test_the_environment_variables_of_the_configurations_and_the_launcher_are_read_by_serve() -> None:
    from ray.serve._private import constants

    file = yaml.safe_load((ROOT / "configs" / "llama.yaml").read_text())
    ours = set(file["controller_options"]["runtime_env"]["env_vars"])
    ours |= set(re.findall(r"RAY_SERVE_\w+", (ROOT / "raylm" / "cli" / "serve_process.py").read_text()))
    assert ours
    assert {name for name in ours if f'"{name}"' not in inspect.getsource(constants)} == set()


def test_only_one_module_knows_private_names() -> None:
    private = re.compile(r"\bray(\.\w+)*\._\w+|\bfrom ray(\.[\w.]+)? import _")
    sources = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "raylm").rglob("*.py")}
    assert [name for name, source in sources.items() if private.search(source)] == ["raylm/ray_private.py"]
