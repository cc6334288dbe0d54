"""RayLM: LLM serving in the actor model on Ray Serve. Public names only, imported when first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raylm.app import build_app
    from raylm.config import CacheConfig, Config, EngineConfig, IngressConfig, SchedulerConfig
    from raylm.llm import LLM
    from raylm.params import SamplingParams

__version__ = "0.1.0"
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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'raylm' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
