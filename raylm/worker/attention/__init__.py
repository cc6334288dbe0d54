"""Front door of paged attention: the interface and the choice of a backend."""

from raylm.worker.attention.base import AnyBackend, AttentionBackend, AttentionMetadata, StepLimits
from raylm.worker.attention.registry import backend_class, select_backend

__all__ = ["AnyBackend", "AttentionBackend", "AttentionMetadata", "StepLimits", "backend_class", "select_backend"]
