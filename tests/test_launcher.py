"""The launcher without a server: what it reads of a configuration file, of actors' lines, and of processes."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from raylm import launcher
from raylm.cli import app
from raylm.config import IngressConfig, knobs
from raylm.errors import ConfigError
from raylm.launcher import read_serve_file
from raylm.serve_process import port_is_free, session_members
from raylm.stages import parse, say
from tests.serving import ROOT


def test_the_shipped_configuration_is_read() -> None:
    served = read_serve_file(ROOT / "configs" / "llama.yaml")
    assert served.config.model == "embedded"
    assert served.url == "http://127.0.0.1:8000"


def test_the_70b_over_four_gpus_is_read() -> None:
    config = read_serve_file(ROOT / "configs" / "llama-3.3-70b-tp4.yaml").config
    assert (config.model_name, config.device, config.engine.tensor_parallel_size) == ("llama-3.3-70b", "cuda", 4)


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda file: file.stem)
def test_both_places_that_haproxy_needs_know_of_it(file: Path) -> None:
    data = yaml.safe_load(file.read_text())
    shipped = yaml.safe_load((ROOT / "configs" / "llama.yaml").read_text())["controller_options"]
    assert data["controller_options"] == shipped
    for place in (data["applications"][0], data["controller_options"]):
        assert place["runtime_env"]["env_vars"]["RAY_SERVE_ENABLE_HA_PROXY"] == "1"


def test_a_route_prefix_and_a_wildcard_host_give_the_url_of_this_machine(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "applications: [{import_path: 'raylm:build_app', route_prefix: /llm}]\nhttp_options: {host: 0.0.0.0, port: 81}"
    )
    assert read_serve_file(file).url == "http://127.0.0.1:81/llm"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("applications: []", "exactly one application"),
        ("- 1", "exactly one application"),
        ("a: [", "cannot be read"),
        ("applications: [{import_path: 'raylm:build_app', args: {dtype: int3}}]", "dtype: Input should be"),
        (
            "applications: [{import_path: 'raylm:build_app', args: {cache: {blocksize: 16}}}]",
            "did you mean 'block_size'",
        ),
        (
            "applications: [{import_path: 'raylm:build_app', args: {engine: {executor: local, "
            "tensor_parallel_size: 2}}}]",
            "engine: tensor_parallel_size: ranks are processes of their own",
        ),
        (
            "applications: [{import_path: 'raylm:build_app', args: {engine: {tensor_parallel_size: 2}, "
            "scheduler: {speculative_tokens: 4}}}]",
            "scheduler.speculative_tokens: how many tokens are guessed",
        ),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_serve_file(file)
    assert str(file) in caught.value.message
    assert said in caught.value.message
    assert "Value error" not in caught.value.message


def test_a_closed_health_is_asked_with_a_key(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("probe: sk-1\n")
    keys = {"api_keys_file": str(tmp_path / "keys")}
    assert launcher._key_header(IngressConfig.model_validate(keys)) == {}
    assert launcher._key_header(IngressConfig.model_validate(keys | {"open_paths": []})) == {"x-api-key": "sk-1"}
    assert launcher._key_header(IngressConfig.model_validate({"open_paths": []})) == {}


def test_what_an_actor_says_is_found_behind_rays_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    say("stage", "kv", "64 blocks\nof 16 tokens")
    line = capsys.readouterr().out
    assert parse(f"(ServeReplica:default:Engine pid=7) {line}") == ("stage", "kv", "64 blocks of 16 tokens")
    assert parse("(ServeReplica:default:Engine pid=7) something else") is None


def test_members_of_a_session_are_found_and_no_others() -> None:
    code = "import subprocess, sys; subprocess.Popen(['sleep', '60']); print('up', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as leader:
        assert leader.stdout is not None
        assert leader.stdin is not None
        leader.stdout.readline()
        members = session_members(leader.pid)
        assert leader.pid in members
        assert len(members) == 2
        (orphan,) = set(members) - {leader.pid}
        leader.stdin.close()
        leader.wait()
        assert session_members(leader.pid) == [orphan]
        subprocess.run(["kill", str(orphan)], check=True)


def test_a_port_that_is_listened_on_is_not_free() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert not port_is_free("127.0.0.1", taken.getsockname()[1])
        port = taken.getsockname()[1]
    assert port_is_free("127.0.0.1", port)


def test_config_prints_every_knob_with_its_default() -> None:
    printed = CliRunner().invoke(app, ["config"]).output.splitlines()
    assert [line.split()[0] for line in printed] == [name for name, _, _ in knobs()]
    assert any(line.startswith("cache.block_size") and " 16 " in line for line in printed)
