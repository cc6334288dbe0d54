"""Forward: the forward pass of a step, by torch modules or by the native decoder. Owns the KV tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from raylm.models import (
    AdapterLimits,
    AttentionSpec,
    CausalLM,
    KVPlaces,
    LowRank,
    LowRankLayers,
    low_rank_layers,
    pack_native,
)
from raylm.native import AdapterRun, NativeDecoder
from raylm.worker.attention import AnyBackend, AttentionMetadata, StepLimits
from raylm.worker.attention.cpu import CpuBackend
from raylm.worker.input_buffers import StepInputs


class Forward(ABC):
    """Runs steps through a model. ``captures`` says that it captures graphs before the first step.

    If it is ``batch_invariant``, the logits of a position are bitwise equal for any other rows in the step, any cut of
    the prompt into steps, and any number of threads. ``when_computing`` is called when the layers begin, because they
    release the interpreter lock.
    """

    captures: ClassVar[bool] = False
    batch_invariant: ClassVar[bool] = False
    when_computing: Callable[[], None] | None = None

    @abstractmethod
    def hidden(self, inputs: StepInputs) -> Tensor:
        """Run the step. Returns hidden states (tokens, hidden_size), or the ``stream`` for the next stage."""

    def empty_stream(self, tokens: int) -> Tensor:
        """Memory for the ``stream`` that a stage of a pipeline passes to the next one."""
        raise AssertionError("it runs whole models only")

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Compute float32 logits (rows, vocab_size) from rows of hidden states, in new memory."""

    def serve_adapters(self, limits: AdapterLimits) -> None:  # noqa: B027  # the native decoder is ready for them
        """Prepare for steps with adapters. Called once, before the first step."""

    @abstractmethod
    def pack(self, weights: Mapping[str, LowRank]) -> object:
        """Convert an adapter, given by module names, to the form that ``hidden`` reads. May be called during a step."""

    def compile_at_start(self) -> None:  # noqa: B027  # most have nothing to compile
        """Compile the kernels that steps may need in addition to those of the profile run."""

    def capture_at_start(self) -> None:  # noqa: B027  # most have nothing to capture
        """Capture the graphs of the first steps."""

    def seconds(self) -> dict[str, float]:
        """Seconds spent in each part of all steps so far; empty if not measured."""
        return {}


class StepAttention:
    """The attention of one step. Implements Attend, which the layers call."""

    def __init__(
        self, backend: AnyBackend, kv_caches: Sequence[Tensor], plan: object, specs: Sequence[AttentionSpec]
    ) -> None:
        self._backend, self._kv_caches, self._plan, self._specs = backend, kv_caches, plan, specs

    def __call__(self, spec: AttentionSpec, q: Tensor, k: Tensor | None = None, v: Tensor | None = None) -> Tensor:
        kv, spec = self._kv_caches[spec.layer], self._specs[spec.layer]  # this spec has the scales of the cache
        if k is None or v is None:
            return self._backend.attend(q, kv, self._plan, spec)
        return self._backend.forward(q, k, v, kv, self._plan, spec)

    def places(self, spec: AttentionSpec) -> KVPlaces | None:
        return self._backend.places(self._kv_caches[spec.layer], self._plan, self._specs[spec.layer])


class ModuleForward(Forward):
    """Runs the model layer by layer through torch modules, with any attention backend."""

    def __init__(self, model: CausalLM, backend: AnyBackend, kv_caches: Sequence[Tensor]) -> None:
        self._model, self._backend, self._kv_caches = model, backend, list(kv_caches)
        self._low_rank: LowRankLayers | None = None

    @property
    def captures_adapters(self) -> bool:
        """Whether ``run`` executes the same operations for any adapters, so that a graph can be captured."""
        return self._low_rank is not None and self._low_rank.capturable

    def serve_adapters(self, limits: AdapterLimits) -> None:
        self._low_rank = low_rank_layers(self._model, self._model.dtype, self._kv_caches[0].device, limits)

    def pack(self, weights: Mapping[str, LowRank]) -> object:
        assert self._low_rank is not None
        return self._low_rank.pack(weights)

    def hidden(self, inputs: StepInputs) -> Tensor:
        if self.when_computing is not None:
            self.when_computing()
        self.adapt(inputs.adapters)
        return self.run(inputs)

    def adapt(self, runs: Sequence[AdapterRun]) -> None:
        """Set the adapters of the tokens of the next run."""
        if self._low_rank is not None:
            self._low_rank.begin(runs)

    def hold(self, *, adapted: bool) -> None:
        """Choose whether the next captured step includes adapters."""
        if self._low_rank is not None and self._low_rank.capturable:
            self._low_rank.hold(adapted)

    def empty_stream(self, tokens: int) -> Tensor:
        return self._model.empty_stream(tokens)

    def run(self, inputs: StepInputs) -> Tensor:
        """Run the layers of a step. Ignores ``adapters`` of the inputs; ``adapt`` sets them."""
        plan = self._backend.prepare(inputs.metadata)
        if inputs.stream is None:
            return self.run_planned(inputs.input_ids, inputs.positions, plan)
        attend = StepAttention(self._backend, self._kv_caches, plan, self._model.attention_specs)
        return self._model(inputs.input_ids, inputs.positions, attend, inputs.stream)  # type: ignore[no-any-return]

    def run_planned(self, input_ids: Tensor, positions: Tensor, plan: object) -> Tensor:
        """Like ``run`` of a whole model, with an attention plan of the backend."""
        attend = StepAttention(self._backend, self._kv_caches, plan, self._model.attention_specs)
        return self._model(input_ids, positions, attend)  # type: ignore[no-any-return]

    def plan_in_place(self, tokens: int, width: int, scratch_slot: int) -> object | None:
        """The backend's plan with fixed memory, or None. Until ``refill``, all tokens go to the scratch slot."""
        device = self._kv_caches[0].device
        return self._backend.plan_in_place(tokens, width, self._model.attention_specs, scratch_slot, device)

    def refill(self, plan: object, metadata: AttentionMetadata, scratch_slot: int) -> bool:
        return self._backend.refill(plan, metadata, scratch_slot)

    def compile_at_start(self) -> None:
        specs = self._model.attention_specs
        self._backend.compile_all([(spec, self._kv_caches[spec.layer]) for spec in specs], self._model.dtype)
        if self._low_rank is not None:
            self._low_rank.compile_all()
        self._model.compile_for_one_row(self._kv_caches[0].device)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)


class NativeForward(Forward):
    """Runs all layers in one native call."""

    batch_invariant: ClassVar[bool] = True

    def __init__(
        self, model: CausalLM, decoder: NativeDecoder, backend: CpuBackend, kv_caches: Sequence[Tensor]
    ) -> None:
        self._model, self._decoder, self._backend, self._kv_caches = model, decoder, backend, list(kv_caches)

    def pack(self, weights: Mapping[str, LowRank]) -> object:
        return pack_native(self._model, self._kv_caches[0].dtype, weights)

    def hidden(self, inputs: StepInputs) -> Tensor:
        batch = self._backend.batch(inputs.metadata, inputs.positions)
        return self._decoder.step(inputs.input_ids, batch, inputs.adapters, self.when_computing, inputs.stream)

    def empty_stream(self, tokens: int) -> Tensor:
        return self._decoder.empty_stream(tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._decoder.logits(hidden)

    def seconds(self) -> dict[str, float]:
        return self._decoder.seconds()


def select_forward(
    model: CausalLM, backend: type[AnyBackend], kv_caches: Sequence[Tensor], limits: StepLimits
) -> Forward:
    """The fastest forward pass for this model with this backend."""
    attention = backend(limits)
    if isinstance(attention, CpuBackend):
        decoder = model.native_decoder(limits.max_num_tokens, kv_caches)
        if decoder is not None:
            return NativeForward(model, decoder, attention, kv_caches)
    return ModuleForward(model, attention, kv_caches)
