"""ServedFile: what `raylm serve` needs of a Serve configuration file, checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import Field, ValidationError

from raylm.config import Config, Frozen
from raylm.errors import ConfigError

M = TypeVar("M", bound=Frozen)

BUILDER = "raylm:build_app"
_BUILDERS = (BUILDER, "raylm.build_app", "raylm.app:build_app", "raylm.app.build_app")


@dataclass(frozen=True)
class ServedFile:
    path: Path
    config: Config
    host: str
    port: int
    route_prefix: str

    @property
    def url(self) -> str:
        """For clients on this machine, without a slash at the end."""
        host = "127.0.0.1" if self.host in {"0.0.0.0", "::"} else self.host
        return f"http://{host}:{self.port}{self.route_prefix.rstrip('/')}"


class HTTPOptions(Frozen):
    """What is Any, here and below, is for Serve to check."""

    host: str = "0.0.0.0"
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    root_path: Any = None
    request_timeout_s: Any = None
    keep_alive_timeout_s: Any = None
    ssl_keyfile: Any = None
    ssl_certfile: Any = None
    ssl_keyfile_password: Any = None
    ssl_ca_certs: Any = None


class ApplicationEntry(Frozen):
    import_path: str
    args: dict[str, Any] | None = None
    route_prefix: Annotated[str, Field(pattern="^/")] = "/"
    name: Any = None
    runtime_env: Any = None
    host: Any = None
    port: Any = None
    deployments: Any = None
    autoscaling_policy: Any = None
    logging_config: Any = None
    external_scaler_enabled: Any = None


class DeployFile(Frozen):
    """The whole file; Serve itself ignores keys that it does not know."""

    applications: Annotated[list[dict[str, Any]], Field(default_factory=list)]
    http_options: HTTPOptions = HTTPOptions()
    proxy_location: Any = None
    grpc_options: Any = None
    controller_options: Any = None
    logging_config: Any = None
    tracing_config: Any = None
    target_capacity: Any = None


def read_serve_file(path: Path) -> ServedFile:
    """Read and check a Serve configuration file with one RayLM application; a ConfigError names the wrong knob."""
    try:
        data = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    given = {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else {}
    file = _checked(DeployFile, given, str(path))
    ours = [place for place, entry in enumerate(file.applications) if _is_ours(entry)]
    if len(ours) != 1:
        raise ConfigError(f"{path} must have exactly one application whose import_path is {BUILDER}.")
    where = f"{path}, applications[{ours[0]}]"
    entry = _checked(ApplicationEntry, file.applications[ours[0]], where)
    if entry.import_path not in _BUILDERS:
        raise ConfigError(f"{where}: import_path: there is no {entry.import_path!r}; it must be {BUILDER!r}.")
    config = _checked(Config, entry.args or {}, f"{path}, args")
    return ServedFile(path, config, file.http_options.host, file.http_options.port, entry.route_prefix)


def _is_ours(application: dict[str, Any]) -> bool:
    return str(application.get("import_path", "")).replace(":", ".").split(".")[0] == "raylm"


def _checked(model: type[M], data: object, where: str) -> M:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        faults = [
            f"{'.'.join(map(str, fault['loc']))}: {fault['msg'].removeprefix('Value error, ')}".lstrip(": ")
            for fault in error.errors()
        ]
        raise ConfigError(f"{where}: {'; '.join(faults)}") from error
