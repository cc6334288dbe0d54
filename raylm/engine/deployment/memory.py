"""check_memory: whether a node has memory for one more engine, checked before the checkpoint is read."""

from __future__ import annotations

from raylm.checkpoint import resolve
from raylm.config import Config
from raylm.errors import ConfigError

GIB = 2**30


def check_memory(config: Config, others: int, available: int) -> None:
    """Check that an engine on CPUs fits in the ``available`` bytes of a node; ``others`` engines run already.

    The check uses a lower bound: the size of the checkpoint's files, and of the KV pool if it is configured. With
    several stages it is the average of a stage, because each may be on a node of its own. It is not needed on GPUs: a
    GPU has one engine, and Ray's resources count GPUs.

    Raises:
        ConfigError: the engine cannot fit. If other engines run, the message says that an update needs memory for
            old and new engines.
    """
    checkpoint = resolve(config.model, config.revision)
    weights = checkpoint.weight_bytes // config.engine.pipeline_parallel_size
    pool = int((config.cache.memory_gib or 0) * GIB) * config.engine.tensor_parallel_size
    if weights + pool <= available:
        return
    sizes = f"{weights / GIB:.2f} GiB of weights" + (f" and {pool / GIB:.2f} GiB of KV cache" if pool else "")
    why = (
        f", where {others} are running. An update starts new engines before it stops old ones. Set "
        "max_surge_percent: 0 for the deployment Engine to stop old engines first."
    )
    raise ConfigError(
        f"engine: it needs {sizes}, but only {available / GIB:.2f} GiB are free on its node{why if others else '.'}"
    )
