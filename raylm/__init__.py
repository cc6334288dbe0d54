"""RayLM: LLM serving in the actor model on Ray Serve. Public names only, imported when first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raylm.lazy import front_door
from raylm.version import VERSION

if TYPE_CHECKING:
    from raylm.app import build_app
    from raylm.config import CacheConfig, Config, EngineConfig, IngressConfig, SchedulerConfig
    from raylm.llm import LLM
    from raylm.params import SamplingParams

__version__ = VERSION
__all__ = [
    "LLM",
    "CacheConfig",
    "Config",
    "EngineConfig",
    "IngressConfig",
    "SamplingParams",
    "SchedulerConfig",
    "build_app",
]

_HOMES = {
    "build_app": "raylm.app",
    "LLM": "raylm.llm",
    "SamplingParams": "raylm.params",
} | dict.fromkeys(("CacheConfig", "Config", "EngineConfig", "IngressConfig", "SchedulerConfig"), "raylm.config")

__getattr__ = front_door(__name__, _HOMES)
