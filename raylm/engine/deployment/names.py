"""EngineName: the names of EngineCore actors. A name contains a digest of the engine's configuration."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from raylm.config import Config

_KIND = "EngineCore"
_OF_THE_FRONT_END = {"ingress", "served_model_name", "tool_parser", "reasoning_parser"}


@dataclass(frozen=True, slots=True)
class EngineName:
    """``str()`` gives the name of one EngineCore among Ray's named actors.

    Engines of an application with the same ``digest`` have the same configuration, except for the knobs of the front
    end and the number of engines.
    """

    app_name: str
    digest: str
    engine_id: str

    def __str__(self) -> str:
        return f"{_KIND}:{self.app_name}:{self.digest}:{self.engine_id}"

    @classmethod
    def parse(cls, name: str) -> EngineName | None:
        """Parse the name of an actor. None if the actor is no EngineCore. An application's name may contain colons."""
        kind, _, rest = name.partition(":")
        words = rest.rsplit(":", 2)
        return cls(*words) if kind == _KIND and len(words) == 3 else None


def engine_digest(config: Config) -> str:
    """Digest (12 hex digits) of the part of the configuration on which engines depend."""
    kept = config.model_dump_json(exclude={**dict.fromkeys(_OF_THE_FRONT_END, True), "engine": {"replicas"}})
    return hashlib.sha256(kept.encode()).hexdigest()[:12]
