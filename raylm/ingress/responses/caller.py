"""Caller: the caller of a background response, and its service level, as they are stored with the job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from raylm.frontend import ApiKey, KeyLimits, Place, Record, Timelines
from raylm.ingress.http.body import JSONObject
from raylm.messages import ServiceLevel

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Caller:
    """The API key of a request without its secret, its ``service``, and the first fields of its record."""

    key: ApiKey | None
    service: ServiceLevel
    request_id: str | None = None
    path: str = "/v1/responses"
    trace: tuple[str, str] | None = None

    @classmethod
    def of(cls, place: Place) -> Caller:
        record = place.record
        if record is None:
            return cls(place.key, place.service)
        return cls(place.key, place.service, record.id, record.path, record.trace)

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

    def record(self, timelines: Timelines, response_id: str) -> Record:
        """Open a record of the request for ``response_id``, in a replica that takes it over."""
        name = "" if self.key is None else self.key.name
        return timelines.begin(self.request_id or response_id, name, self.path, self.trace)


def _known(kind: type[T], stored: Mapping[str, Any]) -> T:
    """Construct ``kind`` from stored fields. Ignores fields of another version."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in stored.items() if name in names})
