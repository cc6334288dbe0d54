"""TransformersForCausalLM: transformers' modeling code with paged attention."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from raylm.checkpoint import Checkpoint
from raylm.errors import ConfigError
from raylm.models.causal_lm import Attend, AttentionSpec, CausalLM
from raylm.models.linear import HEAD, KernelFactory, Linear, Weighted
from raylm.models.ranks import Ranks
from raylm.models.transformers_backend.build import Modeling, build_modeling
from raylm.models.transformers_backend.conversion import Conversion
from raylm.models.transformers_backend.inspection import UnservedError
from raylm.models.transformers_backend.module_replacement import Experts, SharedEmbedding
from raylm.models.transformers_backend.paged_attention import heads_last
from raylm.native import NativeLinear

_APART = 0.1  # of the largest value: far more than rounding, far less than the difference to another token


class TransformersForCausalLM(CausalLM):
    """A transformers model with RayLM's linear layers, experts and attention in place of its own modules."""

    def __init__(self, modeling: Modeling, checkpoint: Checkpoint) -> None:
        super().__init__()
        self.checkpoint, self.modeling = checkpoint, modeling
        self.vocab_size = int(modeling.causal.config.vocab_size)
        self.attention_specs: list[AttentionSpec] = list(modeling.specs.values())
        for name, child in modeling.causal.named_children():
            self.add_module(name, child)
        self.add_module(modeling.causal.base_model_prefix, modeling.decoder)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, ranks: Ranks) -> TransformersForCausalLM:
        name = checkpoint.config["architectures"][0]
        for knob, count in (
            ("engine.tensor_parallel_size", ranks.world_size),
            ("engine.pipeline_parallel_size", ranks.stage.count),
        ):
            if count > 1:
                only = f"{name} is served by one rank only; several share the Llama, Mistral, Qwen2 and Qwen3 families"
                raise ConfigError(f"{knob}: {only}.")
        try:
            return cls(build_modeling(checkpoint, name), checkpoint)
        except UnservedError as error:
            raise ConfigError(f"model: {name} of {checkpoint} cannot be served as configured: {error}.") from error

    def materialize(self, dtype: torch.dtype, device: torch.device) -> None:
        self._check_quantization()
        super().materialize(dtype, device)
        wide = self.modeling.kept_in_float32(dtype)
        for name, parameter in self.named_parameters():
            if name in wide:
                parameter.data = parameter.data.float()
        for path, module in self.named_modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                loaded = f"{path}.{name}" in self.modeling.names - wide and buffer.is_floating_point()
                module._buffers[name] = buffer.to(device, dtype if loaded else buffer.dtype)
            if isinstance(module, Experts):
                module.stack()

    def _check_quantization(self) -> None:
        """Raise ConfigError if large weights would not be quantized in a quantized model."""
        name = next(self._left_to_torch(), None)
        self.torch_multiplies = name is not None
        if name is not None and self.quantization is not None:
            left = f"{name} of {self.checkpoint} is not a linear layer and would not be quantized"
            raise ConfigError(f"quantization: {left}; {type(self.modeling.causal).__name__} is not served quantized.")

    def _left_to_torch(self) -> Iterator[str]:
        """Large weights outside RayLM's linear layers, which are neither norms nor routers."""
        large = self.modeling.causal.config.hidden_size**2 // 2
        for path, module in self.named_modules():
            if not isinstance(module, (Weighted, nn.Embedding)):
                for name, parameter in module.named_parameters(recurse=False):
                    if parameter.numel() >= large:
                        yield f"{path}.{name}"

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        stacked = "-"
        for path, module in self.named_modules():
            if isinstance(module, Experts) and module.stacked:
                stacked = f"{path}."
                yield from ((f"{path}.{name}", target) for name, target in module.stacked.items())
            elif isinstance(module, Weighted) and not path.startswith(stacked):
                yield from module.targets(path)
            elif not isinstance(module, Weighted):
                for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                    if f"{path}.{name}" in self.modeling.names:
                        yield f"{path}.{name}", tensor

    def places(self, found: frozenset[str]) -> dict[str, Tensor]:
        wanted = frozenset(name for name in found if not super(TransformersForCausalLM, self).ignores(name))
        try:
            return Conversion(self.modeling.causal, self.modeling.names).places(wanted, self.targets())
        except UnservedError as error:
            raise ConfigError(f"model: {self.checkpoint} cannot be served: {error}.") from error

    def ignores(self, name: str) -> bool:
        patterns = self.modeling.causal._keys_to_ignore_on_load_unexpected or ()
        return super().ignores(name) or any(re.search(pattern, name) for pattern in patterns)

    @property
    def redundant(self) -> frozenset[str]:
        return self.modeling.tied

    @property
    def embedding(self) -> Tensor | None:
        weight: Tensor = self.modeling.decoder.get_input_embeddings().weight  # type: ignore[operator]
        return weight

    def freeze(self, kernels: KernelFactory) -> None:
        head = next(module for module in self.modules() if isinstance(module, Linear) and HEAD in module.parts)
        embeddings = self.modeling.decoder.get_input_embeddings()  # type: ignore[operator]
        if self.redundant:
            head.weight = embeddings.weight
        for module in self.modules():
            if isinstance(module, (Weighted, Experts)):
                module.freeze(kernels)
        if self.redundant and isinstance(head.kernel, NativeLinear) and head.kernel.dtype is not None:
            self._share(embeddings, head.kernel)
        experts = [module for module in self.modules() if isinstance(module, Experts)]
        routed = getattr(self.modeling.causal.config, "num_experts_per_tok", None) is not None
        # Experts that are multiplied one by one, or by their own modeling code, need the number of rows of each.
        self.capturable = all(module.grouped is not None for module in experts) and (bool(experts) or not routed)
        self._check_tokens_apart(embeddings.weight.device)

    def _share(self, embeddings: nn.Module, head: NativeLinear) -> None:
        """Use the head's packed weights for the embedding too, if the results are equal."""
        path = next(path for path, module in self.named_modules() if module is embeddings)
        shared = SharedEmbedding(head.rows, getattr(embeddings, "embed_scale", None))
        ids = torch.arange(min(16, self.vocab_size))[None]
        if torch.equal(shared(ids), embeddings(ids)):
            self.set_submodule(path, shared)

    @torch.inference_mode()
    def _check_tokens_apart(self, device: torch.device) -> None:
        """Check that, without attention, a token's state does not depend on neighbouring tokens of other sequences."""
        ids, positions = torch.tensor([[1, 2, 3], [7, 0, 2]], device=device) % self.vocab_size
        order = torch.tensor([2, 0, 1], device=device)
        hidden = self(ids, positions, lambda spec, q, k, v: q)[order]
        again = self(ids[order], positions[order], lambda spec, q, k, v: q)
        if (hidden - again).abs().max() > _APART * hidden.abs().max():
            name = type(self.modeling.causal).__name__
            raise ConfigError(f"model: {name} cannot be served: its layers mix tokens outside of attention.")

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        def call(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
            return attend(self.modeling.specs[module], heads_last(q), heads_last(k), heads_last(v))[None]

        self.modeling.attention.call = call
        out = self.modeling.decoder(input_ids=input_ids[None], position_ids=positions[None], use_cache=False)
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.modeling.causal(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits.float()
