"""Reads the metadata and the table of tensors of GGUF files with the ``gguf`` package. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType, ReaderField

from raylm.errors import ConfigError
from raylm.gguf.stored import StoredTensor

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_MOST_PARTS = 1000
_MOST_TEXTS = 2**22


class _CheckedReader(GGUFReader):  # type: ignore[misc] # the package has no types
    """The package's reader, but each read checks the file's end. The package returns fewer values, without an error.

    It is also several times as fast, since it makes no views of a ``numpy.memmap``.
    """

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        wanted = np.dtype(dtype)
        if self.byte_order != "I":
            raise ValueError("it was written for another byte order")
        return np.frombuffer(self.__memory, wanted, int(count), int(offset))

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        """An array of numbers as one piece. The package would read each entry by itself."""
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        number = self.gguf_scalar_to_np.get(GGUFValueType(kind[0]))
        if number is None:
            if count[0] > _MOST_TEXTS:
                raise ValueError(f"it has a list of {count[0]} texts")
            return super()._get_field_parts(orig_offs, raw_type)
        parts = [kind, count, self._get(orig_offs + 12, number, count[0])]
        return sum(part.nbytes for part in parts), parts, [2], [GGUFValueType.ARRAY, GGUFValueType(kind[0])]

    @cached_property
    def __memory(self) -> memoryview:
        return memoryview(self.data)


class FileMetadata:
    """The values of a file by key. Methods raise ConfigError for values that are missing or of another type."""

    def __init__(self, file: Path, fields: dict[str, ReaderField]) -> None:
        self.file, self._fields, self._read = file, fields, dict[str, Any]()

    def __contains__(self, key: str) -> bool:
        return key in self._fields

    def get(self, key: str, default: Any = None) -> Any:
        """A number, a string, a truth value, or a list of them."""
        if key not in self._fields:
            return default
        if key not in self._read:
            try:
                self._read[key] = self._fields[key].contents()
            except (ValueError, IndexError, TypeError) as error:
                raise ConfigError(f"model: {key} of {self.file} cannot be read: {error}.") from error
        return self._read[key]

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self._typed(key, default, int, "an integer"))

    def number(self, key: str, default: float | None = None) -> float:
        """A number as its shortest decimal that is the stored float32: 1e-05, not 9.999999747378752e-06."""
        found = self._typed(key, default, (int, float), "a number")
        return float(str(np.float32(found))) if isinstance(found, float) else float(found)

    def text(self, key: str, default: str | None = None) -> str:
        return str(self._typed(key, default, str, "a text"))

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._typed(key, default, bool, "true or false"))

    def texts(self, key: str) -> list[str]:
        return self._list(key, str, "texts")

    def integers(self, key: str) -> list[int]:
        return self._list(key, int, "integers")

    def numbers(self, key: str) -> list[float]:
        return [float(one) for one in self._list(key, (int, float), "numbers")]

    def _list(self, key: str, kind: Any, what: str) -> list[Any]:
        found = self._typed(key, None, list, f"a list of {what}")
        if not all(isinstance(one, kind) for one in found):
            raise ConfigError(f"model: {key} of {self.file} must be a list of {what}.")
        return list(found)

    def _typed(self, key: str, default: Any, kind: Any, what: str) -> Any:
        found = self.get(key, default)
        if found is None:
            raise ConfigError(f"model: {self.file} has no {key}.")
        if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool):
            shown = repr(found)
            raise ConfigError(f"model: {key} of {self.file} is {shown[:80]}; it must be {what}.")
        return found


def parts_of(file: Path) -> list[Path]:
    """The files of a model, which may be split: ``name-00001-of-00003.gguf``. Raises ConfigError if one is missing."""
    match = _PART.fullmatch(file.name)
    if match is None:
        return [file]
    count = int(match[3])
    if not 1 <= count <= _MOST_PARTS:
        raise ConfigError(f"model: {file} would be one of {count} parts; at most {_MOST_PARTS} are read.")
    parts = [file.with_name(f"{match[1]}-{number:05}-of-{match[3]}.gguf") for number in range(1, count + 1)]
    for part in parts:
        if not part.is_file():
            raise ConfigError(f"model: {file.parent} has no {part.name}, a part of the model.")
    return parts


def read_parts(parts: list[Path]) -> tuple[FileMetadata, list[StoredTensor]]:
    """The metadata of the first part, and the tensors of all parts.

    Raises:
        ConfigError: a file is damaged, or it is no model.
    """
    opened = [_open(part) for part in parts]
    first = FileMetadata(parts[0], opened[0].fields)
    kind = first.text("general.type", "model")
    if kind != "model":
        hint = "; RayLM serves LoRA adapters in the format of PEFT" if kind == "adapter" else ""
        raise ConfigError(f"model: {parts[0]} is of the type {kind[:40]!r}, not a model{hint}.")
    stated = first.integer("split.count", 1) or 1
    if stated != len(parts):
        raise ConfigError(
            f"model: {parts[0]} is one of {stated} parts by its split.count, and {len(parts)} by its name."
        )
    tensors: dict[str, StoredTensor] = {}
    for number, (file, reader) in enumerate(zip(parts, opened, strict=True)):
        for tensor in reader.tensors:
            if tensor.name in tensors:
                raise ConfigError(f"model: {file} has the tensor {tensor.name} a second time.")
            shape = tuple(int(size) for size in reversed(tensor.shape.tolist()))
            place = number, int(tensor.data_offset), int(tensor.n_bytes)
            tensors[tensor.name] = StoredTensor(tensor.name, tensor.tensor_type.name, shape, *place)
    return first, list(tensors.values())


def _open(file: Path) -> GGUFReader:
    if not file.is_file():
        raise ConfigError(f"model: {file} is not a regular file.")
    try:
        return _CheckedReader(file)
    except Exception as error:  # the package raises many kinds
        raise ConfigError(f"model: {file} is not a readable GGUF file: {error}; the file may be incomplete.") from error


def floats_of(parts: Sequence[Path], tensor: StoredTensor) -> list[float]:
    """The values of a small float32 tensor."""
    if tensor.kind != "F32":
        raise ConfigError(f"model: {tensor.name} of {parts[0]} has the type {tensor.kind}; it must be F32.")
    with parts[tensor.part].open("rb") as file:
        file.seek(tensor.offset)
        return [float(one) for one in np.frombuffer(file.read(tensor.nbytes), np.float32)]
