"""Host time of a step with a prompt: layer by layer, and replayed. Needs triton, xformers and ptxas, but no GPU.

    python -m benchmarks.gpu.host_time --out host_time.jsonl

The launches are stubbed at the driver: Triton binds arguments and finds the compiled kernel as usual, but launches
nothing. The replay of a graph does nothing. torch's operations run on a CPU, with a model so small that their time is
their dispatch. So the figures are the cost of Python and torch without the driver's own calls. `launches` counts these
calls for Triton's kernels.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["XFORMERS_ENABLE_TRITON"] = "1"  # xformers cannot detect a GPU here

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.shapes import SHAPES, make_checkpoint
from benchmarks.rows import Report, parser
from raylm.checkpoint import Checkpoint
from raylm.models import CausalLM, load_model
from raylm.models.elementwise import ELEMENTWISE
from raylm.worker.attention import AttentionMetadata, StepLimits
from raylm.worker.forward import ModuleForward
from raylm.worker.gpu.cuda_graphs import GraphForward
from raylm.worker.gpu.tiled import TiledBackend
from raylm.worker.gpu.triton_attention import TritonBackend
from raylm.worker.gpu.xformers import XformersBackend
from raylm.worker.input_buffers import StepInputs

CPU = torch.device("cpu")
SHAPES["narrow"] = SHAPES["tiny"] | {"num_hidden_layers": 32, "head_dim": 64}
BLOCK = 64


class StubDriver:
    """Triton's driver of an H100 that launches nothing. ``launches`` counts the calls."""

    def __init__(self) -> None:
        self.launches = 0
        self.utils = SimpleNamespace(
            load_binary=lambda *binary: (0, 0, 0, 0, 1024),
            get_device_properties=lambda device: {"max_shared_mem": 227 << 10, "multiprocessor_count": 132},
        )

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        def launch(*arguments: Any) -> None:
            self.launches += 1

        return launch

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return CPU


@contextmanager
def stubbed() -> Iterator[StubDriver]:
    from triton.runtime import driver

    stub = StubDriver()
    torch.cuda.get_device_capability = lambda device=None: (9, 0)  # type: ignore[assignment]
    driver._active = stub
    ELEMENTWISE._homes["cpu"] = ELEMENTWISE._homes["cuda"]
    yield stub


def mixed_step(decodes: int, context: int, prompt: int, blocks: int) -> StepInputs:
    """A step with ``decodes`` sequences after ``context`` tokens, and a prompt."""
    counts = np.array([1] * decodes + [prompt], np.int32)
    ends = np.array([context + 1] * decodes + [prompt], np.int32)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    tokens = int(starts[-1])
    columns = torch.zeros(tokens, dtype=torch.int64), torch.zeros(len(counts), blocks, dtype=torch.int32)
    meta = AttentionMetadata(decodes, *columns, torch.from_numpy(ends), torch.from_numpy(starts), ends, starts)
    return StepInputs(torch.zeros(tokens, dtype=torch.int64), torch.zeros(tokens, dtype=torch.int64), meta)


def step_row(
    model: CausalLM, backend: type[TiledBackend], stub: StubDriver, args: argparse.Namespace
) -> dict[str, float]:
    """Milliseconds of CPU thread time of a step layer by layer and of a replayed step, measured alternately."""
    limits = StepLimits(args.prompt + args.decodes, args.decodes + 1, 4096 // BLOCK, BLOCK)
    pools = [
        torch.zeros(backend.kv_cache_shape(4, BLOCK, spec), dtype=torch.bfloat16) for spec in model.attention_specs
    ]
    eager = ModuleForward(model, backend(limits), pools)
    graphs = GraphForward(eager, limits, 3, CPU, capture=replayed)
    graphs.capture_at_start()
    inputs = mixed_step(args.decodes, args.context, args.prompt, limits.max_blocks)
    times: dict[str, list[float]] = {"layers_ms": [], "graph_ms": []}
    launches = {}
    for _ in range(args.steps):
        for (name, taken), forward in zip(times.items(), (eager, graphs), strict=True):
            before, started = stub.launches, time.thread_time()
            forward.hidden(inputs)
            taken.append(1e3 * (time.thread_time() - started))
            launches[name.replace("ms", "launches")] = stub.launches - before
    return {name: statistics.median(taken[1:]) for name, taken in times.items()} | launches


def replayed(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    out = run()
    return lambda: out


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--decodes", type=int, default=16)
    options.add_argument("--context", type=int, default=500)
    options.add_argument("--prompt", type=int, default=48)
    options.add_argument("--steps", type=int, default=15)
    args = options.parse_args()
    torch.set_num_threads(1)
    units = {"layers_ms": "ms", "graph_ms": "ms", "layers_launches": "", "graph_launches": ""}
    report = Report("host_time", units, args.out)
    with tempfile.TemporaryDirectory() as folder, stubbed() as stub, torch.inference_mode():
        make_checkpoint(Path(folder), "narrow", CPU)
        model, _ = load_model(Checkpoint(Path(folder)), torch.bfloat16, CPU)
        for backend in (XformersBackend, TritonBackend):
            case = f"{backend.name}, 32 layers, {args.decodes} decodes, prompt of {args.prompt}"
            report.add(case, step_row(model, backend, stub, args))


if __name__ == "__main__":
    main()
