"""Worker: runs the model. Owns the ModelRunner, and through it the weights, the KV tensors and the rows."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from raylm.config import Config
from raylm.messages import ModelRunnerOutput, SchedulerOutput, WorkerInfo
from raylm.worker.distributed.rendezvous import LOOPBACK, Rendezvous, open_rendezvous

if TYPE_CHECKING:
    from raylm.worker.model_runner import ModelRunner


class Worker:
    """Executes steps in the order of their submission. Call all methods but ``prepare_grammar`` from one thread.

    An engine has ``engine.pipeline_parallel_size`` stages of ``engine.tensor_parallel_size`` workers, each with its
    ``rank``: those of a stage follow each other. All of them get the same steps. The first worker of the last stage
    samples, and only its outputs are meaningful. Set ``when_computing`` before ``start``: it is called on the thread
    of a step when the layers begin, because they release the interpreter lock. On a GPU not every step calls it.

    Importing this class and creating a worker do not import torch; ``start`` does.
    """

    def __init__(self, config: Config, rank: int = 0) -> None:
        self._config = config
        self._rendezvous = Rendezvous(rank)
        self._runner: ModelRunner | None = None
        self.when_computing: Callable[[], None] | None = None

    def open_rendezvous(self, address: str = LOOPBACK) -> str:
        """On rank 0, create the place where the ranks meet. Call before any rank starts. Returns its path.

        Ranks on other nodes reach it at ``address``.
        """
        self._rendezvous = open_rendezvous(address)
        return self._rendezvous.path

    def start(self, meeting: str = "", address: str = LOOPBACK) -> WorkerInfo:
        """Load the weights, profile the memory and allocate the KV pool. Returns the properties of the worker.

        Several ranks must be started at the same time: they wait for each other at ``meeting``, the path from rank 0.
        Ranks on other nodes reach this one at ``address``.

        Raises:
            ConfigError: the model cannot be served with this configuration.
            PeerLostError: another rank was lost.
        """
        started = time.perf_counter()
        # OpenMP reads it once, when torch loads it. Spinning threads would take the cores from the other actors: a step
        # of 3 ms becomes one of 80 ms on a busy machine.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        from raylm.worker.startup import start_runner

        imported = ("import torch", time.perf_counter() - started)
        self._runner, info = start_runner(self._config, replace(self._rendezvous, path=meeting, address=address))
        self._runner.forward.when_computing = self.when_computing
        info.stages.insert(0, imported)
        return info

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        return self.launch(plan)()

    def launch(self, plan: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """Start a step. Steps must be started in their order. The returned call waits for the output, on any thread."""
        return self._started_runner.launch(plan)

    def prepare_grammar(self, grammar: str) -> None:
        """Compile a grammar in advance, so that no step waits for it. May run during a step, on any thread."""
        self._started_runner.batch.prepare_grammar(grammar)

    def load_adapter(self, adapter: int, path: str) -> str:
        """Load the LoRA adapter in the directory ``path`` under the number ``adapter``. May run during a step.

        Returns the digest of the adapter's content.

        Raises:
            InvalidRequestError: the adapter cannot be served; the message says why.
        """
        return self._started_runner.adapters.load(adapter, path)

    def unload_adapter(self, adapter: int) -> None:
        """Unload an adapter. No submitted or later step may use it."""
        self._started_runner.adapters.unload(adapter)

    @property
    def _started_runner(self) -> ModelRunner:
        if self._runner is None:
            raise RuntimeError("the worker has not been started, or was shut down")
        return self._runner

    def shutdown(self) -> None:
        self._runner = None
