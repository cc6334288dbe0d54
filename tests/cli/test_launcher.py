"""The launcher without a server: how it reads configuration files, actors' lines, and processes."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from raylm.checkpoint import resolve
from raylm.cli import launcher, main
from raylm.cli.options import Place, served
from raylm.cli.serve_file import ApplicationEntry, DeployFile, HTTPOptions, read_serve_file
from raylm.cli.serve_process import claim_port, port_is_free, serve_ports, session_members
from raylm.config import IngressConfig, knobs
from raylm.errors import ConfigError
from raylm.stages import parse, report
from tests.serving import ROOT


def test_the_shipped_configuration_is_read() -> None:
    served = read_serve_file(ROOT / "configs" / "llama.yaml")
    (config,) = served.configs()
    assert config.model == "embedded"
    assert served.url("/") == "http://127.0.0.1:8000"


def test_the_70b_over_four_gpus_is_read() -> None:
    (config,) = read_serve_file(ROOT / "configs" / "llama-3.3-70b-tp4.yaml").configs()
    assert (config.model_name, config.device, config.engine.tensor_parallel_size) == ("llama-3.3-70b", "cuda", 4)


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda file: file.stem)
def test_serves_controller_is_asked_for_haproxy(file: Path) -> None:
    data = yaml.safe_load(file.read_text())
    shipped = yaml.safe_load((ROOT / "configs" / "llama.yaml").read_text())["controller_options"]
    assert data["controller_options"] == shipped
    assert data["controller_options"]["runtime_env"]["env_vars"]["RAY_SERVE_ENABLE_HA_PROXY"] == "1"


def test_a_route_prefix_and_a_wildcard_host_give_the_url_of_this_machine(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "applications: [{import_path: 'raylm:build_app', route_prefix: /llm}]\nhttp_options: {host: 0.0.0.0, port: 81}"
    )
    served = read_serve_file(file)
    (application,) = served.ours
    assert application.route_prefix == "/llm"
    assert served.url("/llm") == "http://127.0.0.1:81/llm"
    assert served.url("/", "head") == "http://head:81"


def test_a_file_with_certificates_is_served_by_https(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "applications: [{import_path: 'raylm:build_app'}]\nhttp_options: {host: '::1', ssl_keyfile: k, ssl_certfile: c}"
    )
    assert read_serve_file(file).url("/") == "https://[::1]:8000"


def test_two_models_and_an_application_of_somebody_else_are_read(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "applications:\n- {name: a, import_path: 'raylm:build_app', route_prefix: /a, args: {served_model_name: A}}\n"
        "- {name: b, import_path: 'raylm:build_app', route_prefix: /b, args: {dtype: float32}}\n"
        "- {name: c, import_path: 'other:app', route_prefix: null}\n"
    )
    served = read_serve_file(file)
    assert [(app.name, app.route_prefix) for app in served.ours] == [("a", "/a"), ("b", "/b")]
    assert [config.model_name for config in served.configs()] == ["A", "embedded"]
    assert [(app.name, app.route_prefix, app.config is None) for app in served.applications][2] == ("c", None, True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("applications: []", "must have an application whose import_path is raylm:build_app"),
        ("- 1", "must have an application whose import_path is raylm:build_app"),
        ("applications: [{import_path: 'other:app'}]", "must have an application whose import_path is raylm:build_app"),
        (
            "applications: [{import_path: 'raylm:build_app'}, {import_path: 'a:b', route_prefix: /b}]",
            "applications: several have the name 'default'",
        ),
        (
            "applications: [{import_path: 'raylm:build_app'}, {import_path: 'a:b', name: b}]",
            "applications: several have the route_prefix '/'",
        ),
        ("applications: [{import_path: 'raylm:build_app', route_prefix: null}]", "route_prefix: RayLM serves HTTP"),
        ("applications: [{import_path: 'raylm:build_app', name: ''}]", "name: String should have at least 1"),
        ("a: [", "cannot be read"),
        ("applications: 5", "applications: Input should be a valid list"),
        ("applications: [x]", "applications.0: Input should be a valid dict"),
        ("applications: [{import_path: 'raylm:build_ap'}]", "it must be 'raylm:build_app'"),
        ("applications: [{import_path: 'raylm:build_app', arg: {}}]", "did you mean 'args'"),
        ("applications: [{import_path: 'raylm:build_app', args: x}]", "args: Input should be a valid dict"),
        ("applications: [{import_path: 'raylm:build_app', route_prefix: llm}]", "route_prefix: String should match"),
        ("applications: [{import_path: 'raylm:build_app', route_prefix: /a b}]", "route_prefix: String should match"),
        ("applications: [{import_path: 'raylm:build_app', route_prefix: /é}]", "route_prefix: String should match"),
        ("applications: [{import_path: 'raylm:build_app', route_prefix: /a/}]", "route_prefix: String should match"),
        ("{applications: [{import_path: 'raylm:build_app'}], controller_options: x}", "controller_options: Input"),
        (
            "{applications: [{import_path: 'raylm:build_app'}], controller_options: {runtime_env: {env_vars: {A: 1}}}}",
            "controller_options.runtime_env.env_vars.A: Input should be a valid string",
        ),
        (
            "{applications: [{import_path: 'raylm:build_app'}], http_options: {ssl_certfile: 5}}",
            "http_options.ssl_certfile: Input should be a valid string",
        ),
        (
            "{applications: [{import_path: 'raylm:build_app'}], http_options: {ssl_keyfile: k, ssl_certfile: c}, "
            "controller_options: {runtime_env: {env_vars: {RAY_SERVE_ENABLE_HA_PROXY: '1'}}}}",
            "http_options.ssl_certfile: HAProxy does not serve TLS; put TLS in front",
        ),
        ("applications: [{import_path: 'raylm:build_app', args: {cache: {memory_gib: .inf}}}]", "memory_gib: Input"),
        ("{applications: [{import_path: 'raylm:build_app'}], http_option: {port: 1}}", "did you mean 'http_options'"),
        ("{applications: [{import_path: 'raylm:build_app'}], http_options: {prot: 1}}", "did you mean 'port'"),
        (
            "{applications: [{import_path: 'raylm:build_app'}], http_options: {port: x}}",
            "http_options.port: Input should",
        ),
        ("{applications: [{import_path: 'raylm:build_app'}], http_options: {port: 65536}}", "http_options.port: Input"),
        ("{applications: [{import_path: 'raylm:build_app'}], http_options: [1]}", "http_options: Input should be"),
        ("applications: [{import_path: 'raylm:build_app', args: {dtype: int3}}]", "dtype: Input should be"),
        (
            "applications: [{import_path: 'raylm:build_app', args: {cache: {blocksize: 16}}}]",
            "did you mean 'block_size'",
        ),
        (
            "applications: [{import_path: 'raylm:build_app', args: {engine: {executor: local, "
            "tensor_parallel_size: 2}}}]",
            "engine: tensor_parallel_size: each rank is a process",
        ),
        (
            "applications: [{import_path: 'raylm:build_app', args: {scheduler: {share_drafts: true}}}]",
            "scheduler: share_drafts needs speculative_tokens",
        ),
        (
            "applications: [{import_path: 'raylm:build_app', args: {scheduler: {max_num_batched_tokens: 32}}}]",
            "scheduler: max_num_batched_tokens: 32 tokens in a step are fewer than its sequences (max_num_seqs: 64)",
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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from pydantic, in Ray's schema
def test_the_keys_of_a_file_are_those_that_serve_knows() -> None:
    from ray.serve.schema import HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema

    for ours, serves in (
        (DeployFile, ServeDeploySchema),
        (ApplicationEntry, ServeApplicationSchema),
        (HTTPOptions, HTTPOptionsSchema),
    ):
        assert ours.model_fields.keys() == serves.model_fields.keys()


def test_a_closed_health_is_asked_with_a_key(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("probe: sk-1\n")
    keys = {"api_keys_file": str(tmp_path / "keys")}
    assert launcher._key_header(IngressConfig.model_validate(keys)) == {}
    assert launcher._key_header(IngressConfig.model_validate(keys | {"open_paths": []})) == {"x-api-key": "sk-1"}
    assert launcher._key_header(IngressConfig.model_validate({"open_paths": []})) == {}


def test_what_an_actor_says_is_found_behind_rays_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    report("stage", "kv", "64 blocks\nof 16 tokens")
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


def test_where_nobody_can_listen_is_told_from_where_somebody_does() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.77:81"):
        port_is_free("192.0.2.77", 81)  # an address of the block reserved for documentation
    with pytest.raises(ConfigError, match="cannot listen on no such host:81"):
        port_is_free("no such host", 81)


def test_servers_that_start_together_take_different_ports() -> None:
    first, claims = serve_ports()
    second, others = serve_ports()
    try:
        assert first.keys() == second.keys()
        assert not set(first.values()) & set(second.values())
        assert claim_port(int(first["RAY_SERVE_HAPROXY_METRICS_PORT"])) is None
    finally:
        for claim in claims + others:
            claim.close()
    again = claim_port(int(first["RAY_SERVE_HAPROXY_METRICS_PORT"]))
    assert again is not None
    again.close()


def test_a_lost_raylet_ends_the_process_and_a_lost_log_monitor_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    dead, ended = ["log_monitor"], threading.Event()
    watch = main.end_with_ray(lambda: dead, lambda status: ended.set(), period_s=0.01)
    assert not ended.wait(0.1)
    dead.append("raylet")
    watch.join(timeout=300)
    assert ended.is_set()
    assert parse(capsys.readouterr().out) == (
        "error", "ray", "Ray's raylet was lost, so all served applications have ended."
    )  # fmt: skip


def test_config_prints_every_knob_with_its_default() -> None:
    printed = CliRunner().invoke(main.app, ["config"]).output.splitlines()
    assert [line.split()[0] for line in printed] == [name for name, _, _ in knobs()]
    assert any(line.startswith("scheduler.max_num_seqs") and " 64 " in line for line in printed)


class Answers(BaseHTTPRequestHandler):
    """Answers 200 to every request."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        return


class Child:
    """The attributes of a ServeProcess that the launcher reads. It writes no more output."""

    def __init__(self) -> None:
        self.lines: queue.Queue[str] = queue.Queue()


@pytest.fixture
def answering() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    server.server_close()
    thread.join()


def watching(port: int, tmp_path: Path, settings: launcher.Settings, args: str = "") -> launcher.Launcher:
    """A launcher for a file with a model and another application."""
    file = tmp_path / "serve.yaml"
    file.write_text(
        f"applications: [{{{args}import_path: 'raylm:build_app'}}, "
        "{name: c, route_prefix: /c, import_path: 'a:b'}]\n"
        f"http_options: {{host: 127.0.0.1, port: {port}}}"
    )
    return launcher.Launcher(read_serve_file(file), settings)


def test_ready_is_when_ours_answer_and_others_run_after_they_were_deployed(
    answering: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "_ENGINE_LINES_S", 0)
    watched, child = watching(answering, tmp_path, launcher.Settings()), Child()
    for line in ("", "[raylm stage] deploy   default, c", "[raylm stage] running  c at http://127.0.0.1/c"):
        assert "ready" not in capsys.readouterr().out
        watched._handle_line(line)
        watched._look_for_answers(child)  # type: ignore[arg-type]
    written = capsys.readouterr().out
    assert f"ready    embedded at http://127.0.0.1:{answering}/v1" in written
    (request,) = (line.partition(" try ")[2].split() for line in written.splitlines() if " try " in line)
    assert request[:2] == ["curl", f"http://127.0.0.1:{answering}/v1/chat/completions"]
    assert f"console  http://127.0.0.1:{answering}/console" in written


def test_proxies_of_the_environment_are_not_asked_for_this_machine(
    answering: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setattr("urllib.request._opener", None)  # a cached opener has the proxies of its time
    watched = watching(answering, tmp_path, launcher.Settings())
    assert watched._is_healthy(watched._served.ours[0])


def test_a_server_under_nohup_ignores_the_end_of_its_terminal(tmp_path: Path) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    watched = watching(81, tmp_path, launcher.Settings())
    try:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        watched._take_signals()
        assert {signal.getsignal(number) for number in numbers} == {watched._on_signal}
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        watched._take_signals()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_what_the_encoding_of_the_terminal_lacks_is_replaced() -> None:
    words = ("serve", "embedded", "--served-model-name", "日本", "--print-config")
    done = subprocess.run(
        [sys.executable, "-m", "raylm.cli.main", *words],
        env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "served_model_name: ??" in done.stdout


def test_the_home_of_an_unknown_user_is_no_model() -> None:
    for find in (resolve, lambda model: served([model], Place())):
        with pytest.raises(ConfigError, match="the home directory in ~nobody-of-this-name/model is unknown"):
            find("~nobody-of-this-name/model")


def test_waiting_for_ready_is_bounded_and_says_for_what(
    answering: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    watched = watching(answering, tmp_path, launcher.Settings(ready_timeout_s=0))
    watched._handle_line("[raylm stage] deploy   default, c")
    watched._handle_line("(proxy) it is slow")
    watched._look_for_answers(Child())  # type: ignore[arg-type]
    assert watched._failure == "c did not answer within 0 s (--ready-timeout)"
    assert "it is slow" in capsys.readouterr().out


def test_what_the_user_must_change_is_the_refusal_and_nothing_else_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    watched = watching(81, tmp_path, launcher.Settings())
    watched._handle_line("[raylm error] config   RAY_ADDRESS: wrong")
    watched._handle_line("[raylm error] serve    ConnectionError: gone")
    assert watched._refusal == "RAY_ADDRESS: wrong"
    assert capsys.readouterr().out == ""


def test_as_json_every_line_is_an_object(
    answering: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "_ENGINE_LINES_S", 0)
    for verbose in (False, True):
        watched = watching(answering, tmp_path, launcher.Settings(verbose=verbose), "args: {log_format: json}, ")
        of_engine = '{"ts": "2026-11-22T16:45:12.123Z", "process": "engine", "event": "stage.kv", "message": "m"}'
        of_request = of_engine.replace("stage.kv", "request.slow")
        for line in ("[raylm stage] deploy   default, c", "[raylm stage] running  c at http://127.0.0.1/c"):
            watched._handle_line(line)
        watched._look_for_answers(Child())  # type: ignore[arg-type]
        for line in (of_engine, of_request, "Warning: plain"):
            watched._handle_line(f"(ServeReplica:default:Engine pid=7) {line}")
        watched._handle_line("(raylet) hidden")
        watched._fail("it ended")
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [(line["process"], line["event"]) for line in lines if line["event"] != "output"] == [
            ("launcher", "stage.deploy"), ("launcher", "stage.running"), ("launcher", "stage.ready"),
            ("launcher", "stage.try"), ("launcher", "stage.console"), ("engine", "stage.kv"),
            ("engine", "request.slow"),
        ]  # fmt: skip
        outputs = [(line["by"], line["message"]) for line in lines if line["event"] == "output"]
        assert ("ServeReplica:default:Engine", "Warning: plain") in outputs
        assert ("raylet", "hidden") in outputs


def test_the_request_to_copy_names_the_key_where_one_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("applications: [{import_path: 'raylm:build_app', args: {ingress: {api_keys_env: KEYS}}}]")
    (application,) = read_serve_file(file).ours
    assert launcher._curl(application, {"default": "http://h"}).endswith(' -H "Authorization: Bearer $KEY"')


def test_the_reason_of_a_failed_deployment_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    from raylm.cli.driver import _fault

    deployments = {
        "A": {
            "status": "DEPLOY_FAILED",
            "message": "It failed to start. Error:\nTraceback\nRuntimeError: its reason\n",
        },
        "B": {"status": "HEALTHY", "message": "fine"},
    }
    found = {"a": {"status": "DEPLOY_FAILED", "message": "Failed to update ['A'].", "deployments": deployments}}
    assert _fault("a", found, was_running=False) == "a: RuntimeError: its reason"
    assert "Failed to update ['A']" in capsys.readouterr().err
    assert _fault("a", {"a": found["a"] | {"deployments": {}}}, was_running=False) == "a: Failed to update ['A']."


NO_ROOM = """
import os, resource, signal, sys
from raylm.cli.terminal import Terminal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
terminal = Terminal()
for _ in range(2000):
    terminal.output("a line of a server")
terminal.close()
"""


def test_a_line_that_cannot_be_written_does_not_end_serving(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        done = subprocess.run([sys.executable, "-c", NO_ROOM], stdout=log, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "log").read_text() == "a line of "


def test_a_closed_pipe_does_not_end_serving() -> None:
    code = "from raylm.cli.terminal import JSONTerminal as T; t = T(); t.stage('stage', 'a', 'b'); t.close()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stderr is not None
        writer.stdout.close()
        assert (writer.stderr.read(), writer.wait()) == (b"", 0)


def test_a_line_beyond_the_encoding_of_the_log_is_written_in_escapes() -> None:
    code = "from raylm.cli.terminal import Terminal; Terminal().output('\u4f60 hello')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONIOENCODING": "ascii"}
    )
    assert (done.returncode, done.stdout) == (0, "\\u4f60 hello\n")
