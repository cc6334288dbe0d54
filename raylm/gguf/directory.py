"""Writes what a GGUF file says, apart from weights, as the files of a Hugging Face checkpoint, into the cache.

This is done once, since a vocabulary takes seconds to read. The directory's name depends on the file, its size and its
time of change, and on the code that wrote it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from raylm.errors import ConfigError
from raylm.folders import user_folder
from raylm.gguf.stored import StoredTensor

_TENSORS = "tensors.json"
_MAGIC = b"GGUF"
_SOURCES = ("config.py", "directory.py", "reader.py", "stored.py", "tokenizer.py")


@dataclass(frozen=True)
class Gguf:
    """A model in GGUF files. ``path`` is the directory with the files of a checkpoint, without weights."""

    path: Path
    parts: tuple[Path, ...]

    def tensors(self) -> dict[str, StoredTensor]:
        """The stored tensors by GGUF's names."""
        listed = json.loads((self.path / _TENSORS).read_bytes())
        return {one["name"]: StoredTensor(**(one | {"shape": tuple(one["shape"])})) for one in listed}


def is_gguf(path: Path) -> bool:
    """Whether ``path`` is a file that is a GGUF file, by its name or its first bytes."""
    if path.suffix == ".gguf":
        return True
    if not path.is_file():
        return False
    with suppress(OSError), path.open("rb") as file:
        return file.read(4) == _MAGIC
    return False


def open_gguf(file: Path) -> Gguf:
    """The model in ``file``, and in the other parts that its name tells of. Makes its directory if there is none yet.

    Raises:
        ConfigError: a file is missing or damaged, or holds no model that is served.
    """
    from raylm.gguf.reader import parts_of

    parts = tuple(parts_of(Path(os.path.abspath(file))))
    path = _cache() / _key(parts)
    if not (path / _TENSORS).is_file():
        _make(parts, path)
    return Gguf(path, parts)


def _cache() -> Path:
    return user_folder("XDG_CACHE_HOME", "~/.cache") / "gguf"


def _key(parts: tuple[Path, ...]) -> str:
    digest = hashlib.sha256(f"{version('gguf')} {version('tokenizers')}".encode())
    for source in _SOURCES:
        digest.update((Path(__file__).parent / source).read_bytes())
    for part in parts:
        try:
            found = part.stat()
        except (OSError, ValueError) as error:
            raise ConfigError(f"model: {part} cannot be read: {getattr(error, 'strerror', error)}.") from error
        digest.update(f"{part} {found.st_size} {found.st_mtime_ns} {found.st_ino}".encode())
    return digest.hexdigest()[:24]


def _make(parts: tuple[Path, ...], path: Path) -> None:
    files = _contents(parts)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fresh = Path(tempfile.mkdtemp(dir=path.parent, prefix=f"{path.name}-"))
        try:
            for name, content in files.items():
                (fresh / name).write_text(
                    content if isinstance(content, str) else json.dumps(content), encoding="utf-8"
                )
            with suppress(FileExistsError, NotADirectoryError):  # another process was first
                _rename(fresh, path)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    except OSError as error:
        what = f"the cache {path.parent} cannot be written: {error.strerror}"
        raise ConfigError(f"model: {what}; set XDG_CACHE_HOME to a directory that can.") from error


def _rename(fresh: Path, path: Path) -> None:
    try:
        fresh.rename(path)
    except OSError as error:
        if not (path / _TENSORS).is_file():
            raise
        raise FileExistsError from error


def _contents(parts: tuple[Path, ...]) -> dict[str, Any]:
    from raylm.gguf.config import ROPE_FACTORS, SourceFile, config_of
    from raylm.gguf.reader import floats_of, read_parts
    from raylm.gguf.tokenizer import tokenizer_files

    metadata, tensors = read_parts(list(parts))
    named = {tensor.name: tensor for tensor in tensors}
    factors = floats_of(parts, named[ROPE_FACTORS]) if ROPE_FACTORS in named else None
    config = config_of(SourceFile(metadata, named, metadata.text("general.architecture")), factors)
    return tokenizer_files(metadata) | {
        "config.json": config,
        _TENSORS: [asdict(tensor) for tensor in tensors],
    }
