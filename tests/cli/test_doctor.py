"""`raylm doctor`: it finds planted problems and their solutions, and its forecast equals a worker's behaviour."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from raylm.checkpoint import EMBEDDED, resolve
from raylm.cli.examination import CHECKS, Finding, Subject, check_gpus, check_kernels, check_packages
from raylm.cli.main import app
from raylm.cli.options import Place, served
from raylm.config import Config
from raylm.native import build, kernels
from raylm.worker import forecast_pool
from tests.serving import ROOT, free_port


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels()  # compile them, as on a machine that has served before
    monkeypatch.setattr(tempfile, "tempdir", None)
    for name in ("RAY_ADDRESS", "RAY_TMPDIR", "RAY_AUTH_MODE", "RAY_SERVE_HAPROXY_BINARY_PATH"):
        monkeypatch.delenv(name, raising=False)


def examined(*words: str, status: int) -> dict[str, dict[str, str]]:
    """The last finding of each name."""
    port = [] if "--port" in words else ["--port", str(free_port())]
    found = CliRunner().invoke(app, ["doctor", *words, *port, "--json"])
    assert found.exit_code == status, found.output
    said = json.loads(found.stdout)
    assert said["ok"] == (status == 0)
    return {finding["name"]: finding for finding in said["findings"]}


def problem(name: str, *words: str) -> str:
    """The text and the solution of the only problem, which must have this name."""
    found = examined(*words, status=1)
    assert [finding["name"] for finding in found.values() if finding["state"] == "problem"] == [name]
    return f"{found[name]['text']} | {found[name]['cure']}"


def test_a_machine_that_serves_has_no_problem_and_all_is_told() -> None:
    found = examined("--max-model-len", "1024", status=0)
    assert "sequences of up to 1,024 tokens" in found["KV pool"]["text"]
    assert "attention by cpu" in found["worker"]["text"]
    assert len(found) >= len(CHECKS)
    said = CliRunner().invoke(app, ["doctor", "embedded", "--port", str(free_port())])
    assert said.output.splitlines()[-1] == "no problems found"


@pytest.mark.parametrize(
    "args",
    [
        {"dtype": "float32", "scheduler": {"max_num_seqs": 4}, "max_model_len": 100},
        pytest.param(
            {"cache": {"memory_gib": 0.05, "block_size": 32}, "engine": {"threads": 2}}, marks=pytest.mark.long
        ),
    ],
)
def test_what_is_foretold_is_what_a_worker_does(args: dict[str, Any]) -> None:
    from raylm.worker.startup import start_runner

    config = Config.model_validate(args)
    _, info = start_runner(config)
    found = forecast_pool(config, resolve("embedded"), "auto")
    assert (found.pool.num_blocks, found.pool.max_model_len, found.block_size) == (
        info.num_blocks, info.max_model_len, info.block_size,
    )  # fmt: skip
    assert found.pool.num_blocks * found.pool.block_bytes == info.kv_cache_bytes
    assert (found.device, found.dtype, found.attention_backend, found.threads, found.weights_bytes) == (
        info.device, info.dtype, info.attention_backend, info.threads, info.weights_bytes,
    )  # fmt: skip


def test_a_taken_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"port {port}" in problem("ports", "--port", port)


def test_a_word_that_is_no_knob_and_a_pool_that_does_not_fit() -> None:
    assert "did you mean 'max_num_seqs'" in problem("configuration", "--max-num-seq", "4")
    assert "GiB are free" in problem("model", "--memory-gib", "100000")


def test_a_checkpoint_whose_weights_were_cut_off(tmp_path: Path) -> None:
    shutil.copytree(EMBEDDED, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "the file may be incomplete" in problem("model", str(tmp_path / "model"))


def test_a_long_tmpdir_and_a_haproxy_that_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("RAY_TMPDIR", "/tmp/" + "x" * 80)
        assert "| set it to a shorter directory" in problem("ray")
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", str(tmp_path / "none"))
    assert "cannot be executed | unset it" in problem("haproxy")


def test_a_certificate_that_is_not_there_and_a_model_larger_than_the_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = yaml.safe_load((ROOT / "configs" / "llama.yaml").read_text())
    file["http_options"] |= {"ssl_certfile": "/no/such/cert.pem", "ssl_keyfile": "/no/such/key.pem"}
    file["controller_options"]["runtime_env"]["env_vars"]["RAY_SERVE_ENABLE_HA_PROXY"] = "0"
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(file))
    assert "ssl_certfile: /no/such/cert.pem cannot be read" in problem("certificates", str(tmp_path / "serve.yaml"))
    monkeypatch.setattr("raylm.cli.examination.available_memory", lambda: 1000)
    assert "of weights, but only 0.00 GiB are free" in problem("model")


def test_no_ray_at_its_address_and_no_file_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "api_keys_file" in problem("keys", "--api-keys-file", "/no/such/file")
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port()}")
    assert "no Ray answers" in problem("ray")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--tool-parser", "none-of-these"), "tool_parser: 'none-of-these' is not known"),
        (("--reasoning-parser", "none-of-these"), "reasoning_parser: 'none-of-these' is not known"),
        (("--lora.root", "/no/such/folder"), "lora.root: /no/such/folder is not a directory"),
        (("--record-dir", "/dev/null/steps"), "engine.record_dir: /dev/null/steps cannot be written"),
    ],
)
def test_a_knob_that_would_end_the_start_is_a_problem(words: tuple[str, ...], said: str) -> None:
    assert said in problem("knobs", *words)


def test_on_a_cluster_a_port_in_use_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as gcs, socket.socket() as serve:
        for one in (gcs, serve):
            one.bind(("127.0.0.1", 0))
            one.listen()
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{gcs.getsockname()[1]}")
        found = examined("--port", str(serve.getsockname()[1]), status=0)
    assert (found["ports"]["state"], "which is joined" in found["ports"]["cure"]) == ("note", True)


def test_a_model_that_is_not_here_is_no_problem_and_not_downloaded(tmp_path: Path) -> None:
    found = examined("somebody/some-model-that-nobody-has", status=0)["model"]
    assert (found["state"], found["cure"]) == (
        "note",
        "`hf download somebody/some-model-that-nobody-has` does it before",
    )


def test_without_a_compiler_it_serves_and_says_that_it_is_slower(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = examined(status=0)["kernels"]
    assert (found["state"], "apt install g++" in found["cure"]) == ("note", True)


def test_the_kernels_of_a_wheel_need_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = (build.SOURCES / "cpu.cpp", "-o", tmp_path / "raylm-cpu-plain-0123456789abcdef.so")
    subprocess.run([build.find_compiler(), "-shared", "-fPIC", *source], check=True)
    shutil.copy(build.build(build.instruction_set()), tmp_path)
    monkeypatch.setattr(build, "PACKAGED", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    (found,) = check_kernels(Subject(served(["embedded"], Place())))
    assert (found.state, found.text) == ("ok", "part of the package, so that no compiler is needed")


def test_kernels_that_are_not_compiled_are_left_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = examined(status=0)
    assert "at the first start" in found["kernels"]["text"]
    assert found["KV pool"]["cure"] == "raylm doctor --compile"
    assert list(tmp_path.iterdir()) == []


def gpu(folder: Path, *knobs: str) -> Finding:
    (folder / "gpus" / "0000:01:00.0").mkdir(parents=True, exist_ok=True)
    (folder / "gpus" / "0000:01:00.0" / "information").write_text("Model: \t\t NVIDIA H100 PCIe\nIRQ:   16\n")
    (folder / "version").write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build")
    (found,) = check_gpus(Subject(served(["embedded", *knobs], Place()), nvidia=folder))
    return found


def test_a_gpu_beside_a_torch_without_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("torch.version.cuda", None)
    found = gpu(tmp_path)
    assert (found.state, found.cure) == ("problem", "install torch with CUDA, or serve with --device cpu")
    assert "NVIDIA H100 PCIe, driver 570.86.15" in found.text
    assert gpu(tmp_path, "--device", "cpu").state == "ok"


def test_more_ranks_than_gpus_and_no_kernels_for_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("torch.version.cuda", "12.8")
    found = gpu(tmp_path, "--tensor-parallel-size", "2")
    assert (found.state, found.cure) == ("problem", "--engine.tensor-parallel-size 1, or --device cpu")
    monkeypatch.setattr("raylm.cli.examination.find_spec", lambda name: None)
    assert (gpu(tmp_path).state, gpu(tmp_path).cure) == ("note", "pip install 'raylm[gpu]'")


def test_a_requirement_that_is_missing_or_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["typer>=999", "no-such-package-here>=1", "pytest; extra == 'dev'"]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: wanted)
    found = [(finding.state, finding.cure) for finding in check_packages(Subject(served(["embedded"], Place())))]
    assert found[:2] == [
        ("note", "pip install 'typer>=999'"), ("problem", "pip install 'no-such-package-here>=1'"),
    ]  # fmt: skip


def test_the_store_of_responses_is_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "store"
    found = examined("embedded", "--ingress.store", str(path), status=0)["store"]
    assert (found["state"], str(path) in found["text"], path.exists()) == ("ok", True, False)
    path.write_bytes(b"no database" * 99)
    found = examined("embedded", "--ingress.store", str(path), status=0)["store"]
    assert (found["state"], "file is not a database" in found["text"]) == ("note", True)
    assert "ingress.store" in problem("store", "embedded", "--ingress.store", str(path / "x"))


def test_a_store_in_postgres_is_looked_at() -> None:
    found = examined("embedded", "--ingress.store", f"postgresql://me:secret@127.0.0.1:{free_port()}/x", status=0)[
        "store"
    ]
    assert (found["state"], "refused" in found["text"], "secret" in found["text"]) == ("note", True, False)
    assert "not a valid URL" in problem("store", "embedded", "--ingress.store", "postgresql://h:port/x")
