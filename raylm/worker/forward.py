"""The forward pass of a step, by the model's modules or by the native decoder; owns the KV tensors."""

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
    """One step through a model; with ``captures`` it has graphs to capture before the first one.

    Where it is ``batch_invariant``, a position's logits are the same bits whatever else is in its step, however its
    prompt was cut into steps, and on any number of threads. ``when_computing`` is called as the layers begin, from when
    on other threads have the interpreter.
    """

    captures: ClassVar[bool] = False
    batch_invariant: ClassVar[bool] = False
    when_computing: Callable[[], None] | None = None

    @abstractmethod
    def hidden(self, inputs: StepInputs) -> Tensor:
        """Run the step: hidden states (tokens, hidden_size)."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Rows of hidden states -> float32 logits (rows, vocab_size), in memory of their own."""

    def serve_adapters(self, limits: AdapterLimits) -> None:  # noqa: B027  # the native decoder is ready for them
        """Called once, before the first step, if steps may have adapters."""

    @abstractmethod
    def pack(self, weights: Mapping[str, LowRank]) -> object:
        """An adapter, by the names of its modules, in the form that ``hidden`` reads; may be called beside a step."""

    def compile_at_start(self) -> None:  # noqa: B027  # most have nothing to compile
        """Compile what steps may need beyond those of the profile run."""

    def capture_at_start(self) -> None:  # noqa: B027  # most have nothing to capture
        """Capture what the first steps will need."""

    def seconds(self) -> dict[str, float]:
        """Where the time of all steps went, as far as it is known."""
        return {}


class StepAttention:
    """The attention of one step, as the layers call it (Attend)."""

    def __init__(
        self, backend: AnyBackend, kv_caches: Sequence[Tensor], plan: object, specs: Sequence[AttentionSpec]
    ) -> None:
        self._backend, self._kv_caches, self._plan, self._specs = backend, kv_caches, plan, specs

    def __call__(self, spec: AttentionSpec, q: Tensor, k: Tensor | None = None, v: Tensor | None = None) -> Tensor:
        kv, spec = self._kv_caches[spec.layer], self._specs[spec.layer]  # which has the scales of the cache
        if k is None or v is None:
            return self._backend.attend(q, kv, self._plan, spec)
        return self._backend.forward(q, k, v, kv, self._plan, spec)

    def places(self, spec: AttentionSpec) -> KVPlaces | None:
        return self._backend.places(self._kv_caches[spec.layer], self._plan, self._specs[spec.layer])


class ModuleForward(Forward):
    """Layer by layer through torch modules, with any attention backend."""

    def __init__(self, model: CausalLM, backend: AnyBackend, kv_caches: Sequence[Tensor]) -> None:
        self._model, self._backend, self._kv_caches = model, backend, list(kv_caches)
        self._low_rank: LowRankLayers | None = None

    @property
    def captures_adapters(self) -> bool:
        """Whether ``run`` is the same operations whatever the adapters of a step are."""
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
        """Say which tokens of what runs next have which adapter."""
        if self._low_rank is not None:
            self._low_rank.begin(runs)

    def hold(self, *, adapted: bool) -> None:
        """Let what is captured next be a step with adapters, or one without."""
        if self._low_rank is not None and self._low_rank.capturable:
            self._low_rank.hold(adapted)

    def run(self, inputs: StepInputs) -> Tensor:
        """The layers of a step, whatever its ``adapters`` say."""
        return self.run_planned(inputs.input_ids, inputs.positions, self._backend.prepare(inputs.metadata))

    def run_planned(self, input_ids: Tensor, positions: Tensor, plan: object) -> Tensor:
        """As ``run``, of a step that the backend has planned."""
        attend = StepAttention(self._backend, self._kv_caches, plan, self._model.attention_specs)
        return self._model(input_ids, positions, attend)  # type: ignore[no-any-return]

    def plan_in_place(self, tokens: int, width: int, scratch_slot: int) -> object | None:
        """The backend's, if it has one; until a step is taken over all its tokens are written to the scratch slot."""
        device = self._kv_caches[0].device
        return self._backend.plan_in_place(tokens, width, self._model.attention_specs, scratch_slot, device)

    def refill(self, plan: object, metadata: AttentionMetadata, scratch_slot: int) -> bool:
        return self._backend.refill(plan, metadata, scratch_slot)

    def compile_at_start(self) -> None:
        specs = self._model.attention_specs
        self._backend.compile_all([(spec, self._kv_caches[spec.layer]) for spec in specs], self._model.dtype)
        if self._low_rank is not None:
            self._low_rank.compile_all()

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)


class NativeForward(Forward):
    """All layers in one native call."""

    batch_invariant: ClassVar[bool] = True

    def __init__(
        self, model: CausalLM, decoder: NativeDecoder, backend: CpuBackend, kv_caches: Sequence[Tensor]
    ) -> None:
        self._model, self._decoder, self._backend, self._kv_caches = model, decoder, backend, list(kv_caches)

    def pack(self, weights: Mapping[str, LowRank]) -> object:
        return pack_native(self._model, self._kv_caches[0].dtype, weights)

    def hidden(self, inputs: StepInputs) -> Tensor:
        batch = self._backend.batch(inputs.metadata, inputs.positions)
        return self._decoder.step(inputs.input_ids, batch, inputs.adapters, self.when_computing)

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
