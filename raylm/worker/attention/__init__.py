"""Front door of paged attention: the interface and the choice of a backend."""

from raylm.worker.attention.base import AnyBackend, AttentionBackend, AttentionMetadata, StepLimits
from raylm.worker.attention.registry import BACKENDS, select_backend

__all__ = ["BACKENDS", "AnyBackend", "AttentionBackend", "AttentionMetadata", "StepLimits", "select_backend"]
