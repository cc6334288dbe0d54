"""Public names of the engine package. Names that need Ray are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raylm.engine.block_hashes import ChainedHasher as ChainedHasher
from raylm.engine.block_hashes import keys_of as keys_of
from raylm.engine.block_hashes import pack_keys as pack_keys
from raylm.engine.block_hashes import unpack_keys as unpack_keys
from raylm.engine.client_link import MAX_OUTPUTS_IN_FLIGHT as MAX_OUTPUTS_IN_FLIGHT
from raylm.engine.deployment.autoscaling import LOAD_PERIOD_S as LOAD_PERIOD_S
from raylm.engine.deployment.autoscaling import UPSCALE_DELAY_S as UPSCALE_DELAY_S
from raylm.engine.deployment.autoscaling import EngineLoad as EngineLoad
from raylm.engine.deployment.autoscaling import EnginePolicy as EnginePolicy
from raylm.engine.deployment.autoscaling import ScalingTargets as ScalingTargets
from raylm.engine.deployment.autoscaling import wanted_engines as wanted_engines
from raylm.engine.deployment.names import EngineName as EngineName
from raylm.engine.deployment.names import engine_digest as engine_digest
from raylm.engine.engine_core import EngineCore as EngineCore
from raylm.engine.kv_cache_manager import KVCacheManager as KVCacheManager
from raylm.engine.link import SILENCE_S as SILENCE_S
from raylm.engine.link import Link as Link
from raylm.engine.link import Silence as Silence
from raylm.engine.load_report import Pace as Pace
from raylm.engine.model_executor import LocalExecutor as LocalExecutor
from raylm.engine.model_executor import ModelExecutor as ModelExecutor
from raylm.engine.queues import Forecast as Forecast
from raylm.engine.queues import WaitingQueue as WaitingQueue
from raylm.engine.recording import columns as columns
from raylm.engine.scheduler import Scheduler as Scheduler
from raylm.engine.sequence import Sequence as Sequence
from raylm.lazy import front_door

if TYPE_CHECKING:
    from raylm.engine.actor import NAMESPACE as NAMESPACE
    from raylm.engine.actor import REPORT_S as REPORT_S
    from raylm.engine.deployment.memory import check_memory as check_memory
    from raylm.engine.ray_executor import as_raylm_error as as_raylm_error
    from raylm.engine.supervisor import SUPERVISOR_CPUS as SUPERVISOR_CPUS
    from raylm.engine.supervisor import Engine as Engine
    from raylm.engine.supervisor import drain_limit_s as drain_limit_s
    from raylm.engine.supervisor import placement_bundles as placement_bundles

_MODULES = {
    "actor": ("NAMESPACE", "REPORT_S"),
    "deployment.memory": ("check_memory",),
    "ray_executor": ("as_raylm_error",),
    "supervisor": ("SUPERVISOR_CPUS", "Engine", "drain_limit_s", "placement_bundles"),
}

__getattr__ = front_door(__name__, _MODULES)
