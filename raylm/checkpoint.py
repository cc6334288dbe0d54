"""Checkpoint: where a model's files lie and what its JSON files say; imports no torch."""

from __future__ import annotations

import difflib
import errno
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from raylm.errors import ConfigError

EMBEDDED = Path(__file__).parent / "models" / "embedded"
_WANTED = ("*.json", "1_Pooling/config.json", "*.safetensors", "*.jinja", "*.model", "*.txt")


@dataclass(frozen=True)
class Checkpoint:
    path: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        return self._read("config.json")

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        return self._read("generation_config.json", required=False)

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """generation_config's, else config's."""
        found = self.generation_config.get("eos_token_id", self.config.get("eos_token_id"))
        if found is None:
            return ()
        return tuple(found) if isinstance(found, list) else (int(found),)

    @cached_property
    def max_position_embeddings(self) -> int | None:
        """Longest context in tokens the model was made for.

        Rotary embeddings of the longrope kind have other frequencies beyond the length that they were trained at first,
        also for the tokens before it, whose keys are in the cache by then: it is the longest for them.
        """
        found = [self.config.get("max_position_embeddings", self.config.get("n_positions"))]
        rope = self.config.get("rope_scaling") or self.config.get("rope_parameters") or {}
        if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) in ("longrope", "su"):
            name = "original_max_position_embeddings"
            found.append(rope.get(name, self.config.get(name)))
        return min((int(length) for length in found if length is not None), default=None)

    @cached_property
    def hidden_size(self) -> int | None:
        holders, names = (self.config, self.config.get("text_config") or {}), ("hidden_size", "n_embd", "d_model")
        found = (holder.get(name) for holder in holders for name in names)
        return next((int(size) for size in found if size is not None), None)

    @cached_property
    def pooling_config(self) -> dict[str, Any]:
        return self._read("1_Pooling/config.json", required=False)

    def _read(self, name: str, *, required: bool = True) -> dict[str, Any]:
        file = self.path / name
        if not file.exists():
            if required:
                raise ConfigError(f"model: {self.path} has no {name}, so it is no Hugging Face checkpoint.")
            return {}
        try:
            data = json.loads(file.read_text())
        except ValueError as error:
            raise ConfigError(f"model: {file} is not valid JSON: {error}") from error
        if not isinstance(data, dict):
            raise ConfigError(f"model: {file} does not hold a JSON object.")
        return data


def resolve(model: str, revision: str | None = None) -> Checkpoint:
    """Find the files of ``model``: 'embedded', a directory, or a hub id (downloaded once); ConfigError without any."""
    if model == "embedded":
        return Checkpoint(EMBEDDED)
    path = Path(model).expanduser()
    if path.is_dir():
        return Checkpoint(path)
    if path.is_absolute() or model.startswith((".", "~")):
        raise ConfigError(f"model: the directory {model} does not exist.")
    return Checkpoint(_download(model, revision))


def find_local(model: str, revision: str | None = None) -> Checkpoint | None:
    """As ``resolve``, without a download: None for a hub id that needs one."""
    if model == "embedded" or Path(model).expanduser().is_dir() or model.startswith(("/", ".", "~")):
        return resolve(model, revision)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Checkpoint(Path(snapshot_download(model, revision=revision, local_files_only=True)))
    except HFValidationError as error:
        raise ConfigError(f"model: {model!r} is neither 'embedded', nor a directory here, nor a hub id.") from error
    except LocalEntryNotFoundError:
        return None


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
    """What the hub's refusal means for the user."""
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
