"""Front door of the worker; importing it does not import torch."""

from raylm.worker.cgroup import available_memory
from raylm.worker.worker import Worker

__all__ = ["Worker", "available_memory"]
