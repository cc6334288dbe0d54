"""Front door of the engine: EngineCore and the actors around it, imported when first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raylm.lazy import front_door

if TYPE_CHECKING:
    from raylm.engine.actor import MAX_OUTPUTS_IN_FLIGHT as MAX_OUTPUTS_IN_FLIGHT
    from raylm.engine.actor import NAMESPACE as NAMESPACE
    from raylm.engine.actor import create_engine_core as create_engine_core
    from raylm.engine.actor import engine_core_prefix as engine_core_prefix
    from raylm.engine.engine_core import EngineCore as EngineCore
    from raylm.engine.model_executor import LocalExecutor as LocalExecutor
    from raylm.engine.model_executor import ModelExecutor as ModelExecutor
    from raylm.engine.ray_executor import RayExecutor as RayExecutor
    from raylm.engine.ray_executor import as_raylm_error as as_raylm_error
    from raylm.engine.ray_executor import create_worker as create_worker
    from raylm.engine.ray_executor import prepare_process as prepare_process
    from raylm.engine.supervisor import SUPERVISOR_CPUS as SUPERVISOR_CPUS
    from raylm.engine.supervisor import Engine as Engine
    from raylm.engine.supervisor import placement_bundles as placement_bundles

_MODULES = {
    "actor": ("MAX_OUTPUTS_IN_FLIGHT", "NAMESPACE", "create_engine_core", "engine_core_prefix"),
    "engine_core": ("EngineCore",),
    "model_executor": ("LocalExecutor", "ModelExecutor"),
    "ray_executor": ("RayExecutor", "as_raylm_error", "create_worker", "prepare_process"),
    "supervisor": ("SUPERVISOR_CPUS", "Engine", "placement_bundles"),
}

__getattr__ = front_door(__name__, _MODULES)
