"""The actor that computes; owns the model runner, and through it weights, KV tensors and rows."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from raylm.config import Config
from raylm.messages import ModelRunnerOutput, SchedulerOutput, WorkerInfo
from raylm.worker.distributed.rendezvous import Rendezvous, open_rendezvous

if TYPE_CHECKING:
    from raylm.worker.model_runner import ModelRunner


class Worker:
    """Start it, hand it steps in order, shut it down; all but ``prepare_grammar`` from one thread.

    Of ``engine.tensor_parallel_size`` workers each is one ``rank``. All are given the same steps; rank 0 draws, and
    only what it returns means something. ``when_computing``, set before the start, is called on the thread of a step as
    its layers begin, from when on other threads have the interpreter; not in every step on a GPU.

    Importing this class and creating a worker do not import torch; ``start`` does.
    """

    def __init__(self, config: Config, rank: int = 0) -> None:
        self._config = config
        self._rendezvous = Rendezvous(rank)
        self._runner: ModelRunner | None = None
        self.when_computing: Callable[[], None] | None = None

    def open_rendezvous(self) -> int:
        """Listen for the other ranks, on rank 0 and before any rank starts; return the port on the loopback."""
        self._rendezvous = open_rendezvous()
        return self._rendezvous.port

    def start(self, port: int = 0) -> WorkerInfo:
        """Load weights, profile, allocate the KV pool; return what was found out.

        Several ranks are started at the same time, as they wait for each other at the ``port`` that rank 0 opened.

        Raises:
            ConfigError: the model cannot be served as configured.
            PeerLostError: another rank is gone.
        """
        started = time.perf_counter()
        # Read once, when torch loads OpenMP: threads that spin while they wait take the cores from the other actors,
        # and a step of 3 ms becomes one of 80 ms on a busy machine.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        from raylm.worker.startup import start_runner

        imported = ("import torch", time.perf_counter() - started)
        self._runner, info = start_runner(self._config, replace(self._rendezvous, port=port))
        self._runner.forward.when_computing = self.when_computing
        info.stages.insert(0, imported)
        return info

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        return self.launch(plan)()

    def launch(self, plan: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """Start a step, in the order of their plans; what is returned waits for its output on any thread."""
        return self._started_runner.launch(plan)

    def prepare_grammar(self, grammar: str) -> None:
        """Compile a grammar, so that no step waits for it; may run beside a step, on any thread."""
        self._started_runner.batch.prepare_grammar(grammar)

    def load_adapter(self, adapter: int, path: str) -> str:
        """Load the LoRA adapter in the directory ``path`` under a number; may run beside a step.

        Returns the digest of its content.

        Raises:
            InvalidRequestError: it cannot be served; says why.
        """
        return self._started_runner.adapters.load(adapter, path)

    def unload_adapter(self, adapter: int) -> None:
        """Let go of an adapter; no step that was handed over, or will be, may use it."""
        self._started_runner.adapters.unload(adapter)

    @property
    def _started_runner(self) -> ModelRunner:
        if self._runner is None:
            raise RuntimeError("the worker has not been started, or was shut down")
        return self._runner

    def shutdown(self) -> None:
        self._runner = None
