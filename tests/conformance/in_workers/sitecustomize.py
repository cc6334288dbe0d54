"""Python imports this module at start if its folder is on the path. It patches the sampler: see played_sampler.py."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_SAMPLER = "raylm.worker.sampling.sampler"


class _Finder(MetaPathFinder):
    """Finds the sampler's module, and patches it after the module is executed."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _SAMPLER:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        assert spec is not None
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_change(module: Any) -> None:
            execute(module)
            from tests.conformance.played_sampler import play

            play(module.Sampler)

        loader.exec_module = execute_and_change
        return spec


sys.meta_path.insert(0, _Finder())
