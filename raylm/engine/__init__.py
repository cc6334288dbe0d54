"""Front door of the engine room: the EngineCore actor's insides and the actors around it, imported when first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raylm.lazy import front_door

if TYPE_CHECKING:
    from raylm.engine.actor import MAX_OUTPUTS_IN_FLIGHT, NAMESPACE, create_engine_core, engine_core_prefix
    from raylm.engine.engine_core import EngineCore
    from raylm.engine.model_executor import LocalExecutor, ModelExecutor, WorkerInterface
    from raylm.engine.outbox import Outbox
    from raylm.engine.ray_executor import RayExecutor, as_raylm_error, create_worker, prepare_process
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
    "as_raylm_error",
    "create_engine_core",
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
    "as_raylm_error": "raylm.engine.ray_executor",
    "create_engine_core": "raylm.engine.actor",
    "create_worker": "raylm.engine.ray_executor",
    "engine_core_prefix": "raylm.engine.actor",
    "placement_bundles": "raylm.engine.supervisor",
    "prepare_process": "raylm.engine.ray_executor",
}

__getattr__ = front_door(__name__, _HOMES)
