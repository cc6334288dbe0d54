"""Caller: the caller of a background response, and its service level, as they are stored with the job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from raylm.frontend import ApiKey, Arrival, KeyLimits, Request
from raylm.ingress.http.body import JSONObject
from raylm.messages import ServiceLevel

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Caller:
    """The API key of a request without its secret, its ``service``, and the first fields of its timeline."""

    key: ApiKey | None
    service: ServiceLevel
    request_id: str | None = None
    path: str = "/v1/responses"
    trace: tuple[str, str] | None = None

    @classmethod
    def of(cls, request: Request) -> Caller:
        arrival = request.arrival
        return cls(arrival.key, request.service, arrival.request_id, arrival.path, arrival.trace)

    def as_json(self) -> JSONObject:
        return asdict(self)

    @classmethod
    def from_json(cls, stored: JSONObject | None, owner: str) -> Caller:
        """The inverse of ``as_json``. Jobs of earlier versions have no caller; then only the key's name is known."""
        if stored is None:
            return cls(ApiKey(owner) if owner else None, ServiceLevel())
        key, trace = stored.get("key"), stored.get("trace")
        if key is not None:
            key = _known(ApiKey, key | {"limits": _known(KeyLimits, key.get("limits") or {})})
        service = _known(ServiceLevel, stored.get("service") or {})
        path = stored.get("path") or "/v1/responses"
        return cls(key, service, stored.get("request_id"), path, None if trace is None else (trace[0], trace[1]))

    def arrival(self, response_id: str) -> Arrival:
        """How the request for ``response_id`` arrives at another replica."""
        return Arrival(self.request_id or response_id, self.path, self.key, self.trace, is_job=True)


def _known(kind: type[T], stored: Mapping[str, Any]) -> T:
    """Construct ``kind`` from stored fields. Ignores fields of another version."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in stored.items() if name in names})
