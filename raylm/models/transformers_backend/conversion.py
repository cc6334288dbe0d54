"""Conversion: maps a checkpoint's weights to transformers' modeling code, which renames or stacks some of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Any

from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from raylm.models.transformers_backend.inspection import UnservedError

_SERVED = ([MergeModulelist], [MergeModulelist, Concatenate], [Concatenate], [Transpose])


class Conversion:
    """transformers' conversion rules for a ``model`` with the weights ``known``, applied to names and memory."""

    def __init__(self, model: Any, known: Collection[str]) -> None:
        rules = get_model_conversion_mapping(model)
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._rules = {source: rule for rule in self._converters for source in rule.source_patterns}
        self._prefix, self._known = model.base_model_prefix, dict.fromkeys(known, True)

    def target(self, name: str) -> tuple[str, str | None]:
        """The weight that the checkpoint's ``name`` belongs to, and the pattern of its rule if it is only a part."""
        found, pattern = rename_source_key(name, self._renamings, self._converters, self._prefix, self._known)
        if found not in self._known and name in self._known:
            return name, None
        return found, pattern

    def places(self, found: Collection[str], targets: dict[str, Tensor]) -> dict[str, Tensor]:
        """Memory for each of ``found`` that is used, and for each of ``targets`` that they do not fill."""
        placed: dict[str, Tensor] = {}
        filled: set[str] = set()
        parts: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for name in sorted(found, key=dot_natural_key):
            target, pattern = self.target(name)
            if target in targets and pattern is None:
                placed[name] = targets[target]
                filled.add(target)
            elif target in targets and pattern is not None:
                parts[target][pattern].append(name)
        for target, by_pattern in parts.items():
            rule = self._rules[next(iter(by_pattern))]
            placed |= _views(rule, target, by_pattern, targets[target])
            if set(by_pattern) == set(rule.source_patterns) and len({*map(len, by_pattern.values())}) == 1:
                filled.add(target)
        return placed | {name: memory for name, memory in targets.items() if name not in filled}


def _views(rule: WeightConverter, target: str, by_pattern: dict[str, list[str]], memory: Tensor) -> dict[str, Tensor]:
    """The memory in ``target`` of each name by ``rule``. Names of a pattern are in order."""
    steps = [type(operation) for operation in rule.operations]
    if len(rule.target_patterns) != 1 or steps not in _SERVED:
        raise UnservedError(f"its checkpoint holds {target} in a form that is not served ({rule.operations})")
    return {
        name: _view(rule, memory, part, index)
        for part, pattern in enumerate(rule.source_patterns)
        for index, name in enumerate(by_pattern.get(pattern, []))
    }


def _view(rule: WeightConverter, memory: Tensor, part: int, index: int) -> Tensor:
    """The memory for the ``index``-th name of the ``part``-th pattern."""
    view = memory
    for operation in rule.operations:
        if isinstance(operation, MergeModulelist):
            view = view.select(operation.dim, index)
        elif isinstance(operation, Concatenate):
            view = view.chunk(len(rule.source_patterns), operation.dim - memory.ndim + view.ndim)[part]
        else:
            view = view.transpose(operation.dim0, operation.dim1)
    return view
