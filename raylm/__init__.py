"""RayLM: LLM serving in the actor model on Ray Serve. Public names, imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raylm.lazy import front_door
from raylm.version import VERSION

if TYPE_CHECKING:
    from raylm.app import build_app as build_app
    from raylm.config import CacheConfig as CacheConfig
    from raylm.config import Config as Config
    from raylm.config import EngineConfig as EngineConfig
    from raylm.config import IngressConfig as IngressConfig
    from raylm.config import SchedulerConfig as SchedulerConfig
    from raylm.handles import handle as handle
    from raylm.llm import LLM as LLM
    from raylm.params import SamplingParams as SamplingParams

__version__ = VERSION
_MODULES = {
    "app": ("build_app",),
    "config": ("CacheConfig", "Config", "EngineConfig", "IngressConfig", "SchedulerConfig"),
    "handles": ("handle",),
    "llm": ("LLM",),
    "params": ("SamplingParams",),
}

__getattr__ = front_door(__name__, _MODULES)
