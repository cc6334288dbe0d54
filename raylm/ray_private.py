"""Every private name of Ray and Ray Serve that RayLM uses, behind functions with plain names.

tests/test_ray_private.py checks each name alone, so that after an upgrade of Ray it says which one went away.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray

# Lines of Serve's template for HAProxy, each there once
_DEFAULTS, _ROUTING, _BACKENDS = "\ndefaults\n", "\n    # Static routing based on ", "\nbackend default_backend\n"
_NAMESPACE = b"raylm"


def stop_flag() -> Callable[[], bool]:
    """Call in a Serve replica: the function returned says whether Serve has begun to stop that replica."""
    replica = _replica()
    return lambda: bool(replica._shutting_down)


def route_prefix() -> Callable[[], str]:
    """Call in a Serve replica: the function returned says under which path Serve has mounted its app."""
    replica = _replica()
    return lambda: str(replica._route_prefix or "")


def routed_for_s() -> float:
    """Seconds for which Serve lets proxies route requests to a replica of an ingress that has begun to stop."""
    from ray.serve._private import constants

    direct = constants.RAY_SERVE_ENABLE_DIRECT_INGRESS
    return float(constants.RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S) if direct else 0.0


def _replica() -> Any:
    actor_id = ray.get_runtime_context().current_actor._actor_id
    return ray._private.worker.global_worker.actors[actor_id]._replica_impl


def replace_http_server(server: type) -> None:
    """Call before Serve starts an HTTP server in this process: it is made by this subclass of uvicorn's Server."""
    import uvicorn
    from ray.serve._private import http_util

    http_util.uvicorn = SimpleNamespace(Server=server, Config=uvicorn.Config)


def serve_headers() -> tuple[frozenset[bytes], frozenset[bytes]]:
    """Names of headers that steer how Serve handles a request, and of those that it reads as UTF-8, with - for _."""
    from ray.serve._private import constants

    steering = (constants.SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER, constants.SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER)
    names = (constants.SERVE_HTTP_REQUEST_ID_HEADER, constants.SERVE_MULTIPLEXED_MODEL_ID, constants.SERVE_SESSION_ID)
    read = (*steering, *names, "traceparent", "tracestate")
    return (
        frozenset(name.lower().encode() for name in steering),
        frozenset(name.lower().replace("_", "-").encode() for name in read),
    )


def shared_secret(name: str) -> bytes:
    """32 random bytes, drawn once in the life of a Ray cluster by whoever asks first; its GCS keeps them."""
    from ray.experimental import internal_kv

    key = name.encode()
    internal_kv._internal_kv_put(key, secrets.token_bytes(32), overwrite=False, namespace=_NAMESPACE)
    return bytes(internal_kv._internal_kv_get(key, namespace=_NAMESPACE))


def dead_processes() -> list[str]:
    """Which of the processes that ``ray.init`` started ended by themselves, as kinds: raylet, gcs_server, ..."""
    node = ray._private.worker._global_node
    started = [] if node is None else list(node.all_processes.items())  # start_dashboard() changes it meanwhile
    return [kind for kind, infos in started if any(info.process.poll() is not None for info in infos)]


def dashboard_url() -> str | None:
    """Of Ray's dashboard, as its head knows it; None where there is none."""
    from ray._private import ray_constants
    from ray.experimental import internal_kv

    found = internal_kv._internal_kv_get(b"webui:url", namespace=ray_constants.KV_NAMESPACE_DASHBOARD)
    return f"http://{found.decode()}" if found else None


def dashboard_fault() -> str | None:
    """Why Ray's dashboard cannot be started here: which package it lacks."""
    from ray._private.utils import get_dashboard_dependency_error

    error = get_dashboard_dependency_error()
    return None if error is None else str(error)


def start_dashboard() -> str:
    """Start Ray's dashboard for the Ray that this process started without; HOST:PORT when it answers.

    It takes the place of the process that Ray starts instead. Any exception of Ray's says why it did not start.
    """
    from ray._private import ray_constants
    from ray.experimental import internal_kv

    node = ray._private.worker._global_node
    node.kill_dashboard(check_alive=False)
    key, namespace = ray_constants.DASHBOARD_ADDRESS, ray_constants.KV_NAMESPACE_DASHBOARD
    internal_kv._internal_kv_del(key.encode(), namespace=namespace)  # by which Ray knows that it is up
    node.start_api_server(include_dashboard=True, raise_on_failure=True)
    return str(node.webui_url)


def haproxy_manager() -> type:
    """The class, before ``ray.remote``, of the actor that writes HAProxy's configuration and runs it."""
    from ray.serve._private import haproxy

    manager: type = haproxy.HAProxyManager.__ray_metadata__.modified_class.__ray_actor_class__
    return manager


def replace_haproxy_manager(manager: type) -> None:
    """Call in Serve's controller before it starts its proxies: they become actors of this class."""
    from ray.serve._private import controller

    controller.HAProxyManager = ray.remote(num_cpus=0)(manager)


def configure_haproxy(
    manager: Any, error_answer: bytes, bufsize: int, head_timeout_s: int, reader_timeout_s: int, *options: str
) -> None:
    """Call at the end of the HAProxy manager's ``__init__``, which has not started HAProxy yet.

    ``error_answer`` is the whole HTTP response to 502, 503 or 504, ``bufsize`` bounds the bytes of a request's head,
    which must arrive in ``head_timeout_s``. Who has something to read and reads nothing for ``reader_timeout_s`` is cut
    off.
    """
    haproxy = manager._haproxy
    haproxy.cfg.bufsize = bufsize
    haproxy.cfg.timeout_http_request_s = head_timeout_s
    haproxy.cfg.timeout_client_s = reader_timeout_s
    Path(haproxy.cfg.error_file_path).write_bytes(error_answer)
    haproxy._start_and_wait_for_haproxy = functools.partial(haproxy._start_and_wait_for_haproxy, *options)


def extend_haproxys_template(defaults: str, routing: str, sections: str) -> None:
    """Add to the Jinja template of HAProxy's configuration, once in a process.

    ``defaults`` are lines of the section of that name. ``routing`` are rules that come before the choice of a backend,
    in which ``backends`` are Serve's BackendConfig of all applications over HTTP, and ``sections`` are sections.
    """
    from ray.serve._private import haproxy

    template = haproxy.HAPROXY_CONFIG_TEMPLATE
    if sections not in template:
        template = template.replace(_DEFAULTS, _DEFAULTS + defaults)
        template = template.replace(_ROUTING, "\n" + routing + _ROUTING)
        haproxy.HAPROXY_CONFIG_TEMPLATE = template.replace(_BACKENDS, "\n" + sections + _BACKENDS)


def application(import_path: str, args: dict[str, Any]) -> Any:
    """The Serve application that ``import_path`` names or builds from ``args``, as Serve itself makes it of a file."""
    from ray._common.utils import import_attr
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary

    return call_user_app_builder_with_args_if_necessary(import_attr(import_path), args)


def serve_details() -> dict[str, Any] | None:
    """What Serve's REST API says of the whole cluster, None where Serve does not run."""
    from ray.serve.context import _get_global_client

    client = _get_global_client(raise_if_no_controller_running=False)
    return None if client is None else client.get_serve_details()


def deploy_file(schema: Any) -> None:
    """Hand a whole Serve file to the controller; what was deployed from a file before and is not in it ends."""
    from ray.serve.context import _get_global_client

    _get_global_client().deploy_apps(schema)


def delete_applications(names: list[str]) -> None:
    """Delete these, all at once, and wait for their end; TimeoutError after a minute."""
    from ray.serve.context import _get_global_client

    _get_global_client().delete_apps(names)


def job_has_ended(job_id: str) -> bool:
    """Whether the driver of this job is gone, as Ray's control plane sees it."""
    return any(job["JobID"] == job_id and job["IsDead"] for job in ray._private.state.jobs())


def raylm_actors() -> list[dict[str, Any]]:
    """RayLM's actors in the whole cluster, as Ray's control plane knows them; the dead ones of late are among them."""
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
