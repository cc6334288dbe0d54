"""check_memory: whether one more engine fits beside what runs, asked before any of it is read."""

from __future__ import annotations

from raylm.checkpoint import resolve
from raylm.config import Config
from raylm.errors import ConfigError

GIB = 2**30


def check_memory(config: Config, others: int, available: int) -> None:
    """Of a node's ``available`` bytes, for an engine on CPUs; ``others`` engines of the application run already.

    What is asked for is a lower bound: the checkpoint's files and a KV pool whose size is given. A GPU has only one
    engine, so there Ray's resources say whether there is room.

    Raises:
        ConfigError: it cannot fit; the message says that updates need room for old and new engines.
    """
    checkpoint = resolve(config.model, config.revision)
    weights = sum(file.stat().st_size for file in checkpoint.path.glob("*.safetensors"))
    pool = int((config.cache.memory_gib or 0) * GIB) * config.engine.tensor_parallel_size
    if weights + pool <= available:
        return
    sizes = f"{weights / GIB:.2f} GiB of weights" + (f" and {pool / GIB:.2f} GiB of KV cache" if pool else "")
    why = (
        f", beside {others} that run. An update starts new engines before it ends old ones; with max_surge_percent: 0 "
        "for the deployment Engine it would end them first."
    )
    raise ConfigError(
        f"engine: it needs {sizes}, and {available / GIB:.2f} GiB are free on its node{why if others else '.'}"
    )
