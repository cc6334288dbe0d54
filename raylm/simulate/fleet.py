"""Fleet: what is simulated, as a file says it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError

from raylm.config import Config, Frozen, faults
from raylm.errors import ConfigError
from raylm.simulate.step_costs import StepCosts

_BLOCK_SIZE = 16  # as on CPUs


class EngineGroup(Frozen):
    """Engines of one kind."""

    count: int = Field(1, ge=1, le=4096)
    """How many."""
    slowness: float = Field(1.0, gt=0)
    """What a step takes, as a multiple of the costs."""
    num_blocks: int = Field(16_000, ge=2)
    """KV blocks of each."""


class Fleet(Frozen):
    """Engines, ingress replicas and what lies between them; ``config`` are the knobs of the served model."""

    engines: tuple[EngineGroup, ...] = Field((EngineGroup(),), min_length=1)
    ingresses: int = Field(1, ge=1, le=1024)
    """Ingress replicas; each request comes to any of them."""
    staleness_s: float = Field(0.0, ge=0, le=3600)
    """Age of what an ingress knows of an engine's cache and of the load by others."""
    max_model_len: int = Field(131_072, ge=2)
    """Longest sequence in tokens."""
    costs: StepCosts = StepCosts()
    config: Config = Config()

    @property
    def block_size(self) -> int:
        return self.config.cache.block_size or _BLOCK_SIZE

    @classmethod
    def read(cls, path: Path, **over: Any) -> Fleet:
        """Of a YAML file, some of it replaced; ConfigError where it is not right."""
        try:
            given = yaml.safe_load(path.read_text())
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"{path}: it cannot be read: {error}") from None
        if not isinstance(given, dict):
            raise ConfigError(f"{path}: a fleet is a mapping with some of {', '.join(cls.model_fields)}.")
        return cls.of(given | over, str(path))

    @classmethod
    def of(cls, given: dict[str, Any], source: str) -> Fleet:
        try:
            fleet = cls.model_validate(given)
        except ValidationError as error:
            raise ConfigError(f"{source}: {faults(error)}") from None
        if fleet.config.scheduler.speculative_tokens:
            raise ConfigError(f"{source}: config.scheduler.speculative_tokens: drafts are not simulated.")
        return fleet
