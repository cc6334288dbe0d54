"""Fleet: the description of a simulated fleet, read from a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError, model_validator

from raylm.config import Config, Frozen, ReplicaRange, faults
from raylm.errors import ConfigError
from raylm.simulate.step_costs import StepCosts
from raylm.strict_yaml import read_yaml

_BLOCK_SIZE = 16  # as on CPUs
SIMULATED_KNOBS = frozenset(
    {
        "max_model_len", "cache.block_size", "cache.prefix_caching", "engine.record_dir", "engine.step_timeout_s",
        "ingress.max_queued_requests", "ingress.max_queued_tokens", "scheduler.max_num_batched_tokens",
        "scheduler.max_num_seqs", "scheduler.policy", "scheduler.steps_in_flight", "scheduler.target_itl_ms",
    }
)  # fmt: skip
"""Knobs of a served model's configuration that a simulated fleet supports."""


class EngineGroup(Frozen):
    """Engines with the same properties."""

    count: int = Field(1, ge=1, le=4096)
    """Number of engines, at the beginning if they are scaled."""
    slowness: float = Field(1.0, gt=0)
    """Factor of a step's duration, relative to the costs."""
    num_blocks: int = Field(16_000, ge=2)
    """KV blocks of each engine."""
    costs: StepCosts | None = None
    """Costs of steps; by default those of the fleet."""
    replicas: ReplicaRange | None = None
    """Starts and ends engines with the load, as `engine.replicas` of a served model. At least one engine is kept."""
    start_s: float = Field(30.0, ge=0, le=3600)
    """Seconds until an engine that is started with the load is ready."""

    @model_validator(mode="after")
    def _begins_within_the_range(self) -> EngineGroup:
        if self.replicas is None:
            if "start_s" in self.model_fields_set:
                raise ValueError("start_s: needs replicas")
        elif not max(1, self.replicas.min) <= self.count <= self.replicas.max:
            raise ValueError(f"count: {self.count} is not a number of engines between replicas.min (1) and max")
        return self


class Fleet(Frozen):
    """Engines, ingress replicas and their delays. ``config`` may only set SIMULATED_KNOBS."""

    engines: tuple[EngineGroup, ...] = Field((EngineGroup(),), min_length=1)
    ingresses: int = Field(1, ge=1, le=1024)
    """Number of ingress replicas. Each request arrives at a random one."""
    staleness_s: float = Field(0.0, ge=0, le=3600)
    """Age in seconds of an ingress's reports about engines' caches and load."""
    max_model_len: int = Field(131_072, ge=2)
    """Longest sequence in tokens."""
    costs: StepCosts = StepCosts()
    config: Config = Config()

    @property
    def block_size(self) -> int:
        return self.config.cache.block_size or _BLOCK_SIZE

    @classmethod
    def read(cls, path: Path, **over: Any) -> Fleet:
        """Read a YAML file. ``over`` replaces some of its fields. Raises ConfigError if it is invalid."""
        given = read_yaml(path)
        if not isinstance(given, dict):
            raise ConfigError(f"{path}: a fleet is a mapping with some of {', '.join(cls.model_fields)}.")
        return cls.of(given | over, str(path))

    @classmethod
    def of(cls, given: dict[str, Any], source: str) -> Fleet:
        try:
            fleet = cls.model_validate(given)
        except ValidationError as error:
            raise ConfigError(f"{source}: {faults(error)}") from None
        if unknown := [name for name in _given(fleet.config) if name not in SIMULATED_KNOBS]:
            names = ", ".join(f"config.{name}" for name in unknown)
            elsewhere = "; blocks are counted by engines.num_blocks" if "cache.num_blocks" in unknown else ""
            raise ConfigError(f"{source}: {names}: not simulated{elsewhere}.")
        return fleet


def _given(node: BaseModel, prefix: str = "") -> Iterator[str]:
    """Dotted names of the knobs that are set explicitly."""
    for name in sorted(node.model_fields_set):
        value = getattr(node, name)
        if isinstance(value, BaseModel):
            yield from _given(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
