"""Front door of the engine room: the EngineCore actor's insides and the actors around it, imported when first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raylm.engine.actor import MAX_OUTPUTS_IN_FLIGHT, NAMESPACE, engine_core_prefix
    from raylm.engine.engine_core import EngineCore
    from raylm.engine.model_executor import LocalExecutor, ModelExecutor, WorkerInterface
    from raylm.engine.outbox import Outbox
    from raylm.engine.ray_executor import RayExecutor, create_worker, prepare_process
    from raylm.engine.scheduler import Scheduler
    from raylm.engine.supervisor import SUPERVISOR_CPUS, Engine, placement_bundles

__all__ = [
    "MAX_OUTPUTS_IN_FLIGHT",
    "NAMESPACE",
    "SUPERVISOR_CPUS",
    "Engine",
    "EngineCore",
    "LocalExecutor",
    "ModelExecutor",
    "Outbox",
    "RayExecutor",
    "Scheduler",
    "WorkerInterface",
    "create_worker",
    "engine_core_prefix",
    "placement_bundles",
    "prepare_process",
]

_HOMES = {
    "MAX_OUTPUTS_IN_FLIGHT": "raylm.engine.actor",
    "NAMESPACE": "raylm.engine.actor",
    "SUPERVISOR_CPUS": "raylm.engine.supervisor",
    "Engine": "raylm.engine.supervisor",
    "EngineCore": "raylm.engine.engine_core",
    "LocalExecutor": "raylm.engine.model_executor",
    "ModelExecutor": "raylm.engine.model_executor",
    "Outbox": "raylm.engine.outbox",
    "RayExecutor": "raylm.engine.ray_executor",
    "Scheduler": "raylm.engine.scheduler",
    "WorkerInterface": "raylm.engine.model_executor",
    "create_worker": "raylm.engine.ray_executor",
    "engine_core_prefix": "raylm.engine.actor",
    "placement_bundles": "raylm.engine.supervisor",
    "prepare_process": "raylm.engine.ray_executor",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'raylm.engine' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
