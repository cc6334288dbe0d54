"""Public names of the worker package. Importing it does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raylm.lazy import front_door
from raylm.worker.cgroup import available_cores, available_memory
from raylm.worker.distributed.rendezvous import LOOPBACK
from raylm.worker.worker import Worker

if TYPE_CHECKING:
    from raylm.worker.forecast import MemoryForecast, forecast_pool, torch_build

__all__ = [
    "LOOPBACK",
    "MemoryForecast",
    "Worker",
    "available_cores",
    "available_memory",
    "forecast_pool",
    "torch_build",
]

__getattr__ = front_door(__name__, {"forecast": ("MemoryForecast", "forecast_pool", "torch_build")})
