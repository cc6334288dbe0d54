"""The configurations in configs/ are valid, name the model that they serve, and start Serve as llama.yaml does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from raylm.config import Config
from raylm.lazy import member

CONFIGS = Path(__file__).parents[1] / "configs"
FILES = sorted(CONFIGS.glob("*.yaml"))


def read(file: Path) -> dict[str, Any]:
    """The file, parsed as Serve parses it."""
    return dict(yaml.safe_load(file.read_text()))


def test_there_are_some_for_gpus() -> None:
    assert {"llama.yaml", "llama-3.1-8b.yaml", "qwen3-0.6b.yaml"} <= {file.name for file in FILES}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from pydantic, in Ray's schema
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_each_is_valid(file: Path) -> None:
    from ray.serve.schema import ServeDeploySchema

    tree = read(file)
    schema = ServeDeploySchema.model_validate(tree)
    (application,) = schema.applications
    assert application.import_path == "raylm:build_app"
    config = Config.model_validate(application.args)
    assert config.model
    # While a prompt chunk of the longest allowed length is computed, all sequences can still decode.
    assert config.scheduler.max_num_batched_tokens >= config.scheduler.max_num_seqs


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_environment_of_serve_is_the_same_in_all(file: Path) -> None:
    usual, tree = read(CONFIGS / "llama.yaml"), read(file)
    assert usual["controller_options"] == tree["controller_options"]
    assert usual["http_options"].keys() == tree["http_options"].keys()


def test_what_serve_calls_back_is_there() -> None:
    variables = read(CONFIGS / "llama.yaml")["controller_options"]["runtime_env"]["env_vars"]
    places = [value for name, value in variables.items() if name.endswith("_CALLBACK_IMPORT_PATH")]
    assert len(places) == 2
    assert all(callable(member(place)) for place in places)


def test_the_usual_one_is_short() -> None:
    assert len((CONFIGS / "llama.yaml").read_text().splitlines()) <= 45
