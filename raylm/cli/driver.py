"""Driver: the child process of `raylm serve`. It connects to Ray, and deploys, watches and deletes the applications."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from pydantic import ValidationError
from ray import serve
from ray.actor import ActorHandle
from ray.serve.schema import ServeDeploySchema

from raylm import ray_private
from raylm.app import build_app
from raylm.cli.guard import guards, start_guard, take_away
from raylm.cli.serve_file import HAPROXY_VARIABLE, ServedFile
from raylm.cli.serve_process import port_is_free
from raylm.cli.start_checks import check_files, ray_address
from raylm.config import faults
from raylm.errors import ConfigError
from raylm.ingress import check_open_files
from raylm.stages import report

_POLL_S = 0.25
_POLL_RUNNING_S = 2.0
_TELL_S = 30.0
_LINES_S = 5.0  # wait for the reason that an actor logged: Ray delivers its lines later than its status
_CONNECT_S = 60.0
_ENDING_S = 15.0  # wait for the end of the applications of a killed server when it is started again
_DASHBOARD_NICENESS = 10
_DECLARATIVE = ("deployments", "runtime_env", "autoscaling_policy")  # need a file that is deployed as a whole


class Driver:
    """Serves one file. It starts its own Ray, or joins a running one, where it changes nothing but its applications."""

    def __init__(self, served: ServedFile, dashboard: bool) -> None:
        self._served = served
        self._dashboard = dashboard
        self._names = [application.name for application in served.applications]
        self._shared = ray_address() is not None
        self._started_serve = False
        self._deployed = False
        self._guard: ActorHandle | None = None

    def run(self, connected: Callable[[], object]) -> int:
        """Serve until SIGINT. Returns the exit status: 2 if the configuration or the machine must be changed first.

        ``connected`` is called when this process has connected to Ray.
        """
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have set it to be ignored
        try:
            schema = self._schema()
            self._check(schema)
            self._connect()
            connected()
            self._start_serve(schema)
            self._deploy(schema)
            report("stage", "deploy", ", ".join(self._names))
            return self._watch()
        except KeyboardInterrupt:
            return 0
        except ConfigError as error:
            traceback.print_exc()
            report("error", "config", error.message)
            return 2
        except Exception as error:
            traceback.print_exc()
            report("error", "serve", f"{type(error).__name__}: {_last_line(str(error))}")
            return 1
        finally:
            self._end()

    def _schema(self) -> ServeDeploySchema:
        try:
            return ServeDeploySchema.model_validate(self._served.tree)
        except ValidationError as error:
            raise ConfigError(f"{self._served.source}: {faults(error)}") from error

    def _check(self, schema: ServeDeploySchema) -> None:
        """Check the limits and files of a server on this machine, in the environment that it has."""
        if not self._shared and os.environ.get(HAPROXY_VARIABLE) == "1":
            check_open_files()
        for served, entry in zip(self._served.applications, schema.applications, strict=True):
            if served.config is not None and not self._shared and not entry.runtime_env:
                check_files(served.name, served.config)

    def _connect(self) -> None:
        address = ray_address()
        if address is not None:
            report("stage", "ray", f"connecting to {address}")
        limit = threading.Timer(_CONNECT_S, _give_up, [address])
        limit.daemon = True
        try:
            if address is not None:
                limit.start()
                context = ray.init(address=address, namespace="serve")
            else:
                ray_private.let_others_find_ray()
                context = ray.init(address="local", namespace="serve", include_dashboard=False)
        except Exception as error:  # of any class: Ray's own are plain ones too
            raise ConfigError(_why_no_ray(error, address)) from error
        finally:
            limit.cancel()
        found = ray.cluster_resources()
        gcs = ray_private.gcs_address()
        mode = "RAY_AUTH_MODE=token " if os.environ.get("RAY_AUTH_MODE") == "token" else ""
        report("stage", "ray", f"{gcs}, {found.get('CPU', 0):g} CPUs, {found.get('GPU', 0):g} GPUs")
        report("stage", "ray", f"{mode}RAY_ADDRESS={gcs} ray status")
        session = Path(context.address_info["session_dir"])
        report("stage", "logs", f"{session}/logs")

    def _start_serve(self, schema: ServeDeploySchema) -> None:
        details = ray_private.serve_details() if self._shared else None
        if details is not None:
            self._join_serve(details)
            return
        if self._shared and ray_private.is_head_node() and not port_is_free(self._served.host, self._served.port):
            raise ConfigError(f"http_options.port: port {self._served.port} is already in use.")
        self._started_serve = True
        # On another thread, which waits for the proxy while the replicas start.
        starting = ThreadPoolExecutor(1, "start of serve").submit(self._start_controller_and_proxy, schema)
        while ray_private.serve_details() is None and not starting.done():
            time.sleep(_POLL_S / 5)
        if starting.done():
            starting.result()

    def _start_controller_and_proxy(self, schema: ServeDeploySchema) -> None:
        # The controller replaces a proxy that is slow to start on a busy machine; ready is when there is one.
        with suppress(ray.exceptions.RayActorError, TimeoutError):
            serve.start(
                proxy_location=schema.proxy_location,
                http_options=schema.http_options.model_dump(),
                grpc_options=schema.grpc_options.model_dump(),
                logging_config=schema.logging_config,
                tracing_config=schema.tracing_config,
                controller_options=schema.controller_options if self._shared else None,
            )
        report("stage", "serve", "controller and HTTP proxy are up")

    def _join_serve(self, details: dict[str, Any]) -> None:
        """Join a running Serve. Its settings cannot be changed, so they must equal those of the file."""
        running = details["http_options"]
        for key, value in {"host": self._served.host, "port": self._served.port}.items():
            if running.get(key, value) != value:
                raise ConfigError(
                    f"http_options.{key}: Ray Serve already runs with {running[key]!r}, not {value!r}, and this cannot "
                    f"be changed while it runs. Use --{key} {running[key]}."
                )
        report("stage", "serve", "is already running; its options and other applications are not changed")
        deadline = time.monotonic() + _ENDING_S
        while taken := self._conflict((ray_private.serve_details() or details)["applications"]):
            if time.monotonic() > deadline or not guards():
                raise ConfigError(taken)
            time.sleep(_POLL_S)

    def _conflict(self, running: dict[str, Any]) -> str | None:
        prefixes = {application["route_prefix"]: name for name, application in running.items()}
        for application in self._served.applications:
            if application.name in running:
                return f"name: an application {application.name!r} already runs here; set another name with --name."
            if application.route_prefix is not None and application.route_prefix in prefixes:
                return (
                    f"route_prefix: {application.route_prefix} belongs to the application "
                    f"{prefixes[application.route_prefix]!r}; set another prefix with --route-prefix."
                )
        return None

    def _deploy(self, schema: ServeDeploySchema) -> None:
        whole = [key for entry in self._served.tree["applications"] for key in _DECLARATIVE if entry.get(key)]
        whole += ["target_capacity"] if schema.target_capacity is not None else []
        if whole and self._shared:
            raise ConfigError(
                f"{whole[0]}: `raylm serve` cannot set this on a shared Ray cluster. Remove it, unset RAY_ADDRESS, or "
                "use `serve deploy`, which ends other applications that were deployed from files."
            )
        if self._shared:
            self._guard = start_guard(self._names, self._started_serve)
        if whole:
            self._deployed = True
            ray_private.deploy_file(schema)
            return
        # Built here instead of in a Ray task, which would need another process and delay the start by seconds.
        targets = [self._target(schema, place) for place in range(len(self._names))]
        self._deployed = True
        serve.run_many(targets, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)

    def _target(self, schema: ServeDeploySchema, place: int) -> serve.RunTarget:
        served, entry = self._served.applications[place], schema.applications[place]
        if served.config is not None:
            application = build_app(served.config)
        else:
            try:
                application = ray_private.application(entry.import_path, entry.args)
            except Exception as error:
                reason = f"{type(error).__name__}: {_last_line(str(error))}"
                raise ConfigError(f"applications[{place}] ({served.name}): {entry.import_path}: {reason}") from error
        return serve.RunTarget(
            target=application,
            name=served.name,
            route_prefix=served.route_prefix,
            logging_config=entry.logging_config or schema.logging_config,
            external_scaler_enabled=entry.external_scaler_enabled,
        )

    def _watch(self) -> int:
        """Watch until SIGINT, or until an application fails to start or is deleted. Returns the exit status."""
        running: set[str] = set()
        told = time.monotonic()
        while True:
            found = _statuses()
            if found is None:
                time.sleep(_POLL_S)
                continue
            if fault := next(filter(None, (_fault(name, found, name in running) for name in self._names)), None):
                time.sleep(_LINES_S)
                report("error", "serve", fault)
                return 1
            others = [served for served in self._served.applications if served.config is None]
            now = {name for name in self._names if found[name]["status"] == "RUNNING"}
            for served in others:
                if served.name in now - running:
                    report("stage", "running", f"{served.name}{self._place(served.route_prefix)}")
            running |= now
            waiting = [name for name in self._names if name not in running]
            if self._dashboard and not waiting:
                self._dashboard = False
                threading.Thread(target=_start_dashboard, name="start of the dashboard", daemon=True).start()
            if waiting and time.monotonic() - told > _TELL_S:
                told = time.monotonic()
                report("stage", "waiting", "; ".join(f"{name}: {_describe(found[name])}" for name in waiting))
            time.sleep(_POLL_S if waiting else _POLL_RUNNING_S)

    def _place(self, route_prefix: str | None) -> str:
        return f" at {self._served.url(route_prefix)}" if route_prefix else " at no URL, by handle"

    def _end(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if not ray.is_initialized():
            return
        if self._deployed or self._started_serve:
            take_away(self._names if self._deployed else [], with_serve=self._started_serve)
        if self._guard is not None:
            ray.kill(self._guard)


def _start_dashboard() -> None:
    """Start the dashboard at low priority: on Linux niceness belongs to a thread, and child processes inherit it."""
    os.setpriority(os.PRIO_PROCESS, 0, _DASHBOARD_NICENESS)
    if fault := ray_private.dashboard_fault():
        report("stage", "ray", f"no dashboard: {fault}; pip install 'ray[default]' installs it")
        return
    try:
        url = f"http://{ray_private.start_dashboard()}"
    except Exception as error:  # of any class: without it everything is served all the same
        if ray.is_initialized():  # else everything has been stopped meanwhile
            report("stage", "ray", f"the dashboard did not start: {_last_line(str(error))}")
        return
    token = ", with the token of `ray get-auth-token`" if os.environ.get("RAY_AUTH_MODE") == "token" else ""
    report("stage", "ray", f"dashboard at {url}{token}; RAY_DASHBOARD_ADDRESS={url} serve status")
    threading.Event().wait()  # the kernel ends the child processes when the thread that started them ends


def _statuses() -> dict[str, Any] | None:
    """Serve's applications by name; empty if Serve was shut down, None while its controller does not answer."""
    try:
        details = ray_private.serve_details()
    except (ray.exceptions.RayError, TimeoutError):
        return None
    return {} if details is None else dict(details["applications"])


def _fault(name: str, found: dict[str, Any], was_running: bool) -> str | None:
    if name not in found or found[name]["status"] == "DELETING":
        return f"{name}: another program deleted the application"
    if not was_running and found[name]["status"] == "DEPLOY_FAILED":
        failed = [one["message"] for one in found[name]["deployments"].values() if one["status"] == "DEPLOY_FAILED"]
        reason = "\n".join(filter(None, [found[name]["message"], *failed]))
        print(reason, file=sys.stderr)
        return f"{name}: {_last_line(reason)}"
    return None


def _describe(application: dict[str, Any]) -> str:
    messages = [deployment["message"] for deployment in application["deployments"].values() if deployment["message"]]
    return " ".join([application["status"], *filter(None, [application["message"], *messages])])


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason was given"])[-1].strip()


def _give_up(address: str | None) -> None:
    """Report that Ray does not answer, and exit. Ray itself would wait for minutes if another program listens."""
    report("error", "config", f"RAY_ADDRESS: the server at {address} is not Ray's GCS. Check the port.")
    os._exit(2)


def _why_no_ray(error: Exception, address: str | None) -> str:
    text = str(error)
    if address is None:
        return f"Ray could not be started: {_last_line(text)}; --verbose shows everything."
    return (
        f"RAY_ADDRESS: cannot connect to Ray at {address}: {_last_line(text)}. Check the port, which `ray start "
        "--head` prints, and the token: RAY_AUTH_MODE=token, RAY_AUTH_TOKEN as `ray get-auth-token` prints on the head."
    )
