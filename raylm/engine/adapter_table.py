"""AdapterTable: the LoRA adapters of an engine by name, and their numbers in the worker."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import count

from raylm.config import LoRAConfig
from raylm.errors import InvalidRequestError, ModelNotFoundError, OverloadedError
from raylm.messages import LoRAAdapter

BASE = 0  # the number of the base model


class AdapterTable:
    """Gives every loading of an adapter a new number. The prefix cache tells adapters apart by digest instead."""

    def __init__(self, config: LoRAConfig) -> None:
        self._most = config.max_adapters
        self._served = config.root is not None
        self._numbers: dict[LoRAAdapter, int] = {}
        self._loading: dict[LoRAAdapter, asyncio.Event] = {}
        self._next = count(BASE + 1)

    @property
    def adapters(self) -> tuple[LoRAAdapter, ...]:
        return tuple(self._numbers)

    def loaded(self, name: str | None) -> tuple[int, str]:
        """(number, digest of the content) of a loaded adapter; (BASE, "") if ``name`` is None.

        Raises:
            ModelNotFoundError: no adapter of this name is loaded.
        """
        if name is None:
            return BASE, ""
        adapter = self.find(name)
        if adapter is None:
            raise ModelNotFoundError(f"The LoRA adapter '{name}' is not loaded.", param="model")
        return self._numbers[adapter], adapter.digest

    def find(self, name: str) -> LoRAAdapter | None:
        return next((adapter for adapter in self._numbers if adapter.name == name), None)

    async def until_not_loading(self, adapter: LoRAAdapter) -> None:
        """Wait while exactly this adapter is being loaded: several replicas may restore the same adapter at once."""
        while (loading := self._loading.get(adapter)) is not None:
            await loading.wait()

    def begin(self, adapter: LoRAAdapter) -> int | None:
        """Reserve a number for an adapter before loading it. None if it is loaded already.

        Raises:
            InvalidRequestError: no adapters are served, or another adapter has this name.
            OverloadedError: lora.max_adapters adapters are loaded.
        """
        if not self._served:
            raise InvalidRequestError("This server serves no LoRA adapters: lora.root is not set.", param="lora_path")
        if adapter in self._numbers:
            return None
        if any(other.name == adapter.name for other in (*self._numbers, *self._loading)):
            raise InvalidRequestError(
                f"A LoRA adapter '{adapter.name}' is loaded already, or being loaded; unload it first.",
                param="lora_name",
            )
        if len(self._numbers) + len(self._loading) >= self._most:
            raise OverloadedError(
                f"{self._most} LoRA adapters are loaded, the limit of lora.max_adapters. Unload one first.",
                param="lora_name",
            )
        self._loading[adapter] = asyncio.Event()
        return next(self._next)

    def end(self, adapter: LoRAAdapter, number: int | None, digest: str = "") -> None:
        """Record the end of a loading. ``number`` is None if it failed; ``digest`` is that of the loaded content."""
        self._loading.pop(adapter).set()
        if number is not None:
            self._numbers[replace(adapter, digest=digest)] = number

    def remove(self, name: str) -> int | None:
        """Remove an adapter. Returns its number, or None if no adapter has this name."""
        adapter = self.find(name)
        return None if adapter is None else self._numbers.pop(adapter)
