"""Wraps every private name of Ray and Ray Serve that RayLM uses. No other module uses private names.

tests/test_ray_private.py checks each name separately, so that it names the missing ones after an upgrade of Ray.
"""

from __future__ import annotations

import dataclasses
import functools
import secrets
import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

# Parts of Serve's template for HAProxy; each must occur exactly once.
_DEFAULTS, _ROUTING, _BACKENDS = "\ndefaults\n", "\n    # Static routing based on ", "\nbackend default_backend\n"
_REPLICA = "\n    server {{ server.name }} {{ server.host }}:{{ server.port }} check"
_ADMIN_SOCKET, _KEEP_ALIVE = " mode 666 level admin ", "http-keep-alive {{ config.timeout_http_keep_alive_s }}s"
_FRONTEND = "\n    bind {{ config.frontend_host }}:{{ config.frontend_port }}\n"
# Serve itself listens on 0.0.0.0 alone where :: is configured.
_FRONTEND_OF_BOTH = _FRONTEND.replace(
    "config.frontend_host", "'::' if config.http_options.host == '::' else config.frontend_host"
).replace(" }}\n", " }} v4v6\n")
_PROMETHEUS, _AFTER_PROMETHEUS, _STATISTICS = (
    "\nfrontend prometheus\n",
    "\nfrontend http_frontend\n",
    "\nlisten stats\n",
)
_PROMETHEUS_PORT, _STATISTICS_PORT = "bind :{{ config.metrics_port }}", "bind *:{{ config.stats_port }}"
_NAMESPACE = b"raylm"
_LOOPBACK = "127.0.0.1"
_LOOPBACK_FOR_OTHERS = f"[::ffff:{_LOOPBACK}]"  # the same address in IPv6's form for IPv4


def stop_flag() -> Callable[[], bool]:
    """Call in a Serve replica. The returned function says whether Serve has begun to stop the replica."""
    replica = _replica()
    return lambda: bool(replica._shutting_down)


def routed_for_s() -> float:
    """Seconds for which Serve's proxies may still route requests to an ingress replica that has begun to stop."""
    from ray.serve._private import constants

    direct = constants.RAY_SERVE_ENABLE_DIRECT_INGRESS
    return float(constants.RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S) if direct else 0.0


def _replica() -> Any:
    actor_id = ray.get_runtime_context().current_actor._actor_id
    return ray._private.worker.global_worker.actors[actor_id]._replica_impl


def serve_headers() -> tuple[frozenset[bytes], frozenset[bytes]]:
    """(headers that control how Serve handles a request, headers that Serve reads as UTF-8).

    The names are lowercase. In the second set, - stands for _.
    """
    from ray.serve._private import constants

    steering = (constants.SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER, constants.SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER)
    names = (constants.SERVE_HTTP_REQUEST_ID_HEADER, constants.SERVE_MULTIPLEXED_MODEL_ID, constants.SERVE_SESSION_ID)
    read = (*steering, *names, "traceparent", "tracestate")
    return (
        frozenset(name.lower().encode() for name in steering),
        frozenset(name.lower().replace("_", "-").encode() for name in read),
    )


def shared_secret(name: str) -> bytes:
    """32 random bytes, the same for the life of a Ray cluster. The first caller draws them; Ray's GCS stores them."""
    from ray.experimental import internal_kv

    key = name.encode()
    internal_kv._internal_kv_put(key, secrets.token_bytes(32), overwrite=False, namespace=_NAMESPACE)
    return bytes(internal_kv._internal_kv_get(key, namespace=_NAMESPACE))


def dead_processes() -> list[str]:
    """Kinds (raylet, gcs_server, ...) of the processes started by ``ray.init`` that have ended by themselves."""
    node = ray._private.worker._global_node
    started = [] if node is None else list(node.all_processes.items())  # a copy: start_dashboard() may change it
    return [kind for kind, infos in started if any(info.process.poll() is not None for info in infos)]


def dashboard_url() -> str | None:
    """The URL of Ray's dashboard as registered at the head node, or None if it does not run."""
    from ray._private import ray_constants
    from ray.experimental import internal_kv

    found = internal_kv._internal_kv_get(b"webui:url", namespace=ray_constants.KV_NAMESPACE_DASHBOARD)
    return f"http://{found.decode()}" if found else None


def dashboard_fault() -> str | None:
    """Why Ray's dashboard cannot start here (a missing package), or None if it can."""
    from ray._private.utils import get_dashboard_dependency_error

    error = get_dashboard_dependency_error()
    return None if error is None else str(error)


def start_dashboard() -> str:
    """Start the dashboard of a Ray that this process started without one. Returns HOST:PORT when it answers.

    The dashboard replaces the reduced process that Ray starts without it. If the dashboard does not start, Ray's
    exception is raised.
    """
    from ray._private import ray_constants
    from ray.experimental import internal_kv

    node = ray._private.worker._global_node
    node.kill_dashboard(check_alive=False)
    key, namespace = ray_constants.DASHBOARD_ADDRESS, ray_constants.KV_NAMESPACE_DASHBOARD
    internal_kv._internal_kv_del(key.encode(), namespace=namespace)  # Ray waits for this key to appear
    node.start_api_server(include_dashboard=True, raise_on_failure=True)
    return str(node.webui_url)


def spread_over_nodes(deployments: frozenset[str]) -> None:
    """Make Serve place each replica of these deployments on the node that has the fewest of them and room for one more.

    Call in Serve's controller. Serve itself lets Ray choose: a replica in a placement group goes where most is taken,
    others go in turn with the replicas of all deployments, so that two may share a node while another has none. A
    replica that needs a GPU, or several nodes (stages of an engine), is left to Ray. Later calls in the same process do
    nothing.
    """
    from ray.serve._private.deployment_scheduler import DeploymentScheduler

    place = DeploymentScheduler._schedule_replica
    if hasattr(place, "__wrapped__"):
        return

    @functools.wraps(place)
    def spread(self: Any, scheduling_request: Any, default_scheduling_strategy: str, **more: Any) -> bool:
        is_free = default_scheduling_strategy == "SPREAD" and not more
        is_free = is_free and scheduling_request.placement_group_strategy in (None, "STRICT_PACK")
        if is_free and scheduling_request.replica_id.deployment_id.name in deployments:
            more["target_node_id"] = _least_used_node(self, scheduling_request)
        return bool(place(self, scheduling_request, default_scheduling_strategy, **more))

    DeploymentScheduler._schedule_replica = spread


def _least_used_node(scheduler: Any, request: Any) -> str | None:
    """The node with room that has the fewest replicas of the deployment, then of all; None leaves it to Ray."""
    needed = request.requested_resources
    if needed.get("GPU"):
        return None
    own: Counter[str] = Counter()
    every: Counter[str] = Counter()
    for deployment_id in {*scheduler._running_replicas, *scheduler._launching_replicas}:
        nodes = [*scheduler._running_replicas[deployment_id].values()]
        nodes += [info.target_node_id for info in scheduler._launching_replicas[deployment_id].values()]
        every.update(nodes)
        if deployment_id == request.replica_id.deployment_id:
            own.update(nodes)
    free = scheduler._get_available_resources_per_node()
    fitting = [node for node, resources in free.items() if resources.can_fit(needed)]
    return min(fitting, key=lambda node: (own[node], every[node], node), default=None)


def haproxy_manager() -> type:
    """The undecorated class of the actor that writes HAProxy's configuration and runs HAProxy."""
    from ray.serve._private import haproxy

    manager: type = haproxy.HAProxyManager.__ray_metadata__.modified_class.__ray_actor_class__
    return manager


def replace_haproxy_manager(manager: type) -> None:
    """Make Serve's proxies actors of this class. Call in Serve's controller before it starts them."""
    from ray.serve._private import controller

    controller.HAProxyManager = ray.remote(num_cpus=0)(manager)


@dataclasses.dataclass(frozen=True)
class HAProxySettings:
    """HAProxy settings of RayLM in addition to those of Serve.

    ``error_answer`` is the whole HTTP response for 502, 503 and 504. ``bufsize`` limits the size of a request's head in
    bytes; the head must arrive within ``head_timeout_s``. A client that reads nothing for ``reader_timeout_s`` while
    data waits for it is disconnected. ``options`` are arguments of HAProxy's command line.
    """

    error_answer: bytes
    bufsize: int
    max_connections: int
    connect_timeout_s: int
    head_timeout_s: int
    reader_timeout_s: int
    options: tuple[str, ...]


def configure_haproxy(manager: Any, settings: HAProxySettings) -> None:
    """Apply the settings. Call at the end of the HAProxy manager's ``__init__``, before HAProxy starts."""
    haproxy = manager._haproxy
    haproxy.cfg.bufsize = settings.bufsize
    haproxy.cfg.maxconn = settings.max_connections
    haproxy.cfg.timeout_connect_s = settings.connect_timeout_s
    haproxy.cfg.timeout_http_request_s = settings.head_timeout_s
    haproxy.cfg.timeout_client_s = settings.reader_timeout_s
    Path(haproxy.cfg.error_file_path).write_bytes(settings.error_answer)
    haproxy._start_and_wait_for_haproxy = functools.partial(haproxy._start_and_wait_for_haproxy, *settings.options)


def connect_where_replicas_listen(manager: Any) -> None:
    """Let HAProxy connect to the replicas of its node at the configured host, instead of always at 127.0.0.1.

    Call at the end of the HAProxy manager's ``__init__``.
    """
    host, convert = manager._http_options.host, manager._target_to_server
    if host in (None, "0.0.0.0", "::"):
        return
    address = host if ":" in host else socket.gethostbyname(host)

    def target_to_server(target: Any) -> Any:
        server = convert(target)
        return dataclasses.replace(server, host=address) if server.host == _LOOPBACK else server

    manager._target_to_server = target_to_server


@dataclasses.dataclass(frozen=True)
class HAProxyLines:
    """Lines to add to HAProxy's configuration.

    ``defaults`` are lines of the section ``defaults``, ``connections`` lines of the HTTP frontend. ``routing`` are
    rules of that frontend before the choice of a backend; in them the Jinja variable ``backends`` holds Serve's
    BackendConfig of all HTTP applications. ``sections`` are whole sections. ``server`` is added to the line of each
    replica. An idle connection is kept for ``keep_alive_s``. HAProxy's statistics and metrics for Prometheus listen on
    ``monitor_host``; None disables both.
    """

    defaults: str
    connections: str
    routing: str
    sections: str
    server: str
    keep_alive_s: int
    monitor_host: str | None


def edit_haproxys_template(lines: HAProxyLines) -> None:
    """Change the Jinja template of HAProxy's configuration. Later calls in the same process do nothing.

    HAProxy's admin socket, which Serve opens to every user of the machine, is restricted to the server's own user.

    Raises:
        RuntimeError: a part of the template that has to be changed does not occur exactly once.
    """
    from ray.serve._private import haproxy

    template = haproxy.HAPROXY_CONFIG_TEMPLATE
    if lines.sections in template:
        return
    keep_alive_s = f"[config.timeout_http_keep_alive_s, {lines.keep_alive_s}] | min"
    changes = {
        _ADMIN_SOCKET: " mode 600 level admin ",
        _KEEP_ALIVE: f"http-keep-alive {{{{ {keep_alive_s} }}}}s",
        _DEFAULTS: _DEFAULTS + lines.defaults,
        _FRONTEND: _FRONTEND_OF_BOTH + lines.connections,
        _ROUTING: "\n" + lines.routing + _ROUTING,
        _BACKENDS: "\n" + lines.sections + _BACKENDS,
        _REPLICA: _REPLICA + lines.server,
    }
    if lines.monitor_host is None:
        for section, following in ((_PROMETHEUS, _AFTER_PROMETHEUS), (_STATISTICS, "")):
            changes[_text_of(template, section, following)] = following or "\n"
    else:
        changes[_PROMETHEUS_PORT] = f"bind {lines.monitor_host}:{{{{ config.metrics_port }}}}"
        changes[_STATISTICS_PORT] = f"bind {lines.monitor_host}:{{{{ config.stats_port }}}}"
    for old, new in changes.items():
        template = _replaced(template, old, new)
    haproxy.HAPROXY_CONFIG_TEMPLATE = template


def _text_of(template: str, section: str, following: str) -> str:
    """The template's text from the line ``section`` to the line ``following``, or to its end if that is empty."""
    _, found, rest = template.partition(section)
    body, end, _ = rest.partition(following) if following else (rest, "", "")
    return (found + body + end) if found and end == following else section + following


def _replaced(template: str, old: str, new: str) -> str:
    if template.count(old) != 1:
        raise RuntimeError(
            f"Ray Serve's template for HAProxy contains {old.strip()!r} {template.count(old)} times instead of once: "
            "RayLM does not support this version of Ray."
        )
    return template.replace(old, new)


def haproxys_files() -> dict[str, Path]:
    """HAProxy's files by the environment variables that set them. Each node uses its own directory beside them."""
    from ray.serve._private import constants

    names = ("CONFIG_FILE_LOC", "SOCKET_PATH", "METRICS_SOCKET_PATH", "SERVER_STATE_FILE")
    found = {f"RAY_SERVE_HAPROXY_{name}": getattr(constants, f"RAY_SERVE_HAPROXY_{name}") for name in names}
    return {name: Path(path) for name, path in found.items()}


def is_first_start() -> bool:
    """Call in an actor: whether this is its first start rather than a restart."""
    return not ray.get_runtime_context().was_current_actor_reconstructed


def fallback_proxys_port() -> int:
    """The port of Serve's own proxy, which runs beside HAProxy on the head node."""
    from ray.serve._private import constants

    return int(constants.RAY_SERVE_FALLBACK_PROXY_HTTP_PORT)


def head_resource() -> str:
    """The resource that the head node alone has, 1 of it."""
    from ray._common.constants import HEAD_NODE_RESOURCE_NAME

    return str(HEAD_NODE_RESOURCE_NAME)


def listen_where_ray_does() -> None:
    """If Ray listens on loopback, let replicas listen for each other there too. Call in a deployment's constructor."""
    from ray._common.tls_utils import add_port_to_grpc_server
    from ray.serve._private import replica

    def add_port(server: Any, address: str) -> int:
        return int(add_port_to_grpc_server(server, address.replace("[::]", _LOOPBACK)))

    if ray.util.get_node_ip_address() == _LOOPBACK:
        replica.add_port_to_grpc_server = add_port


def let_others_find_ray() -> None:
    """Let other Ray programs of this machine find a Ray that listens on loopback. Call before ``ray.init`` starts it.

    ``ray.init(address="auto")`` finds a Ray by the arguments of its raylet, and Ray replaces 127.0.0.1 by the machine's
    address in the network, where this Ray does not listen. It does not replace _LOOPBACK_FOR_OTHERS.
    """
    from ray._private import services

    start = services.start_raylet

    @functools.wraps(start)
    def start_raylet(redis_address: str | None, gcs_address: str, *rest: Any, **more: Any) -> Any:
        return start(redis_address, _for_others(gcs_address), *rest, **more)

    services.start_raylet = start_raylet


def gcs_address() -> str:
    """HOST:PORT of the GCS of the connected Ray, as other Ray programs of the cluster need it."""
    return _for_others(ray.get_runtime_context().gcs_address)


def _for_others(address: str) -> str:
    host, _, port = address.rpartition(":")
    return f"{_LOOPBACK_FOR_OTHERS if host == _LOOPBACK else host}:{port}"


def is_head_node() -> bool:
    """Whether this process is connected to Ray on the node of Ray's GCS."""
    node_id = ray.get_runtime_context().get_node_id()
    return any(node["NodeID"] == node_id and head_resource() in node["Resources"] for node in ray.nodes())


def application(import_path: str, args: dict[str, Any]) -> Any:
    """The Serve application that ``import_path`` names or builds from ``args``, as Serve does for a Serve file."""
    from ray._common.utils import import_attr
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary

    return call_user_app_builder_with_args_if_necessary(import_attr(import_path), args)


def serve_details() -> dict[str, Any] | None:
    """The state of the whole cluster as in Serve's REST API, or None if Serve does not run."""
    from ray.serve.context import _get_global_client

    client = _get_global_client(raise_if_no_controller_running=False)
    return None if client is None else client.get_serve_details()


def listening_host() -> str:
    """The configured address of Serve's HTTP servers. Waits for Serve's controller."""
    from ray.serve.context import _get_global_client

    return str(ray.get(_get_global_client()._controller.get_http_config.remote()).host)


def deploy_file(schema: Any) -> None:
    """Deploy a whole Serve file. Applications that an earlier file deployed and this file lacks are deleted."""
    from ray.serve.context import _get_global_client

    _get_global_client().deploy_apps(schema)


def delete_applications(names: list[str]) -> None:
    """Delete the applications, all at once, and wait until they have ended.

    Raises:
        TimeoutError: they have not ended after a minute.
    """
    from ray.serve.context import _get_global_client

    _get_global_client().delete_apps(names)


def job_has_ended(job_id: str) -> bool:
    """Whether the driver of this job has ended, according to Ray's control plane."""
    return any(job["JobID"] == job_id and job["IsDead"] for job in ray._private.state.jobs())


def raylm_actors() -> list[dict[str, Any]]:
    """RayLM's actors in the whole cluster, according to Ray's control plane. Includes recently ended actors."""
    found = []
    for actor in ray._private.state.actors().values():
        name = actor["ActorClassName"]
        is_replica = name.startswith("ServeReplica:") and name.rpartition(":")[2] in ("Ingress", "Engine")
        if not is_replica and name not in ("EngineCoreActor", "WorkerActor"):
            continue
        found.append({
            "kind": name.rpartition(":")[2].removesuffix("Actor"),
            "name": actor["Name"],
            "state": actor["State"].lower(),
            "node": actor["Address"]["IPAddress"],
            "pid": actor["Pid"],
            "restarts": actor["NumRestarts"],
            "began": actor["StartTime"] / 1000,
        })  # fmt: skip
    return found
