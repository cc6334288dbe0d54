"""ServedFile: a Serve configuration for `raylm serve`, checked before anything starts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, ValidationError

from raylm.config import Config, Frozen, faults
from raylm.errors import ConfigError
from raylm.serve_variables import SERVE_VARIABLES
from raylm.strict_yaml import read_yaml

M = TypeVar("M", bound=Frozen)

HAPROXY_VARIABLE = "RAY_SERVE_ENABLE_HA_PROXY"
BUILDER = "raylm:build_app"
APPLICATION = "default"
_BUILDERS = (BUILDER, "raylm.build_app", "raylm.app:build_app", "raylm.app.build_app")
_WILDCARDS = {"0.0.0.0", "::"}
# The settings of a Serve file besides its applications; configs/llama.yaml explains them. A test compares the two.
SERVE_OPTIONS: dict[str, Any] = {
    "http_options": {"host": "127.0.0.1", "port": 8000},
    "controller_options": {"runtime_env": {"env_vars": SERVE_VARIABLES}},
    "logging_config": {"log_level": "WARNING", "enable_access_log": False},
}


@dataclass(frozen=True)
class ServedApplication:
    """An application of the file. ``config`` is None if it is not a RayLM application."""

    name: str
    route_prefix: str | None
    config: Config | None


@dataclass(frozen=True)
class ServedFile:
    """``tree`` is the whole configuration in Serve's form, ``source`` the name of its origin."""

    source: str
    tree: dict[str, Any]
    host: str
    port: int
    scheme: str
    applications: tuple[ServedApplication, ...]

    @property
    def ours(self) -> list[ServedApplication]:
        return [application for application in self.applications if application.config is not None]

    def configs(self) -> list[Config]:
        return [application.config for application in self.applications if application.config is not None]

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of Serve's controller, proxies and replicas.

        RayLM's variables that the file lacks get their default values. A file that turns HAProxy off keeps it off.
        """
        options = self.tree.get("controller_options") or {}
        usual = {name: value for name, value in SERVE_VARIABLES.items() if name != HAPROXY_VARIABLE}
        return usual | ((options.get("runtime_env") or {}).get("env_vars") or {})

    def url(self, route_prefix: str, node: str = "127.0.0.1") -> str:
        """The URL for clients on ``node``, without a trailing slash."""
        host = node if self.host in _WILDCARDS else self.host
        return f"{self.scheme}://{f'[{host}]' if ':' in host else host}:{self.port}{route_prefix.rstrip('/')}"


class HTTPOptions(Frozen):
    """HTTP options of a Serve file. Serve itself checks the fields of type Any, here and below."""

    host: str = "0.0.0.0"
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    root_path: Any = None
    request_timeout_s: Any = None
    keep_alive_timeout_s: Any = None
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile_password: Any = None
    ssl_ca_certs: str | None = None


class RuntimeEnv(BaseModel):
    """The part of Ray's runtime_env that RayLM reads."""

    env_vars: dict[str, str] | None = None


class ControllerOptions(BaseModel):
    """The part of the controller's options that RayLM reads."""

    runtime_env: RuntimeEnv | None = None


class ApplicationEntry(Frozen):
    import_path: str
    args: dict[str, Any] | None = None
    route_prefix: Annotated[str, Field(pattern=r"^/([!-z|~]*[!-.0-z|~])?$")] | None = "/"  # what a URL may have
    name: Annotated[str, Field(min_length=1)] = APPLICATION
    runtime_env: Any = None
    host: Any = None
    port: Any = None
    deployments: Any = None
    autoscaling_policy: Any = None
    logging_config: Any = None
    external_scaler_enabled: Any = None


class DeployFile(Frozen):
    """The whole file. Unknown keys are rejected, which Serve would ignore."""

    applications: Annotated[list[dict[str, Any]], Field(default_factory=list)]
    http_options: HTTPOptions = HTTPOptions()
    proxy_location: Any = None
    grpc_options: Any = None
    controller_options: ControllerOptions | None = None
    logging_config: Any = None
    tracing_config: Any = None
    target_capacity: Any = None


def load_tree(path: Path) -> dict[str, Any]:
    """Read a Serve file as a dict, without keys that have no value."""
    data = read_yaml(path)
    return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else {}


def read_serve_file(path: Path) -> ServedFile:
    """Read and check a Serve configuration file. ConfigError names the invalid knob."""
    return check_tree(load_tree(path), str(path))


def check_tree(tree: dict[str, Any], source: str) -> ServedFile:
    """Check a configuration, which must have a RayLM application. Messages of ConfigErrors begin with ``source``."""
    file = checked(DeployFile, tree, source)
    applications = tuple(_application(entry, source, place) for place, entry in enumerate(file.applications))
    if not any(application.config for application in applications):
        raise ConfigError(f"{source} must have an application whose import_path is {BUILDER}.")
    for key in ("name", "route_prefix"):
        values = [value for application in applications if (value := getattr(application, key)) is not None]
        if twice := next((value for value in values if values.count(value) > 1), None):
            raise ConfigError(f"{source}, applications: several have the {key} {twice!r}; each needs its own.")
    options = file.http_options
    scheme = "https" if options.ssl_certfile else "http"
    served = ServedFile(source, tree, options.host, options.port, scheme, applications)
    if scheme == "https" and served.environment.get(HAPROXY_VARIABLE, os.environ.get(HAPROXY_VARIABLE)) == "1":
        raise ConfigError(
            f"{source}, http_options.ssl_certfile: HAProxy does not serve TLS; put TLS in front (nginx, Caddy), or "
            f"remove {HAPROXY_VARIABLE}."
        )
    return served


def our_places(tree: dict[str, Any]) -> list[int]:
    """The indexes of RayLM's applications in the list of a checked tree."""
    return [place for place, entry in enumerate(tree.get("applications") or []) if _is_ours(entry)]


def _application(data: dict[str, Any], source: str, place: int) -> ServedApplication:
    where = f"{source}, applications[{place}]"
    entry = checked(ApplicationEntry, data, where)
    if not _is_ours(data):
        return ServedApplication(entry.name, entry.route_prefix, None)
    if entry.import_path not in _BUILDERS:
        raise ConfigError(f"{where}: import_path: there is no {entry.import_path!r}; it must be {BUILDER!r}.")
    if entry.route_prefix is None:
        raise ConfigError(f"{where}: route_prefix: RayLM serves HTTP and needs one, such as '/'.")
    return ServedApplication(entry.name, entry.route_prefix, checked(Config, entry.args or {}, f"{where}, args"))


def _is_ours(application: dict[str, Any]) -> bool:
    return str(application.get("import_path", "")).replace(":", ".").split(".")[0] == "raylm"


def checked(model: type[M], data: object, where: str) -> M:
    """Validate ``data`` as a ``model``. ConfigError names each invalid key after ``where``."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{where}: {faults(error)}") from error
