"""The commands against `raylm serve`: chat, a load, and a simulation of its trace with the engine's recorded steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from raylm.simulate import read_lines
from tests.serving import ARGS, Server, free_port, serve_file

pytestmark = [pytest.mark.ray, pytest.mark.long]


def raylm(*words: str | Path, entered: str = "", status: int = 0) -> str:
    command = [sys.executable, "-m", "raylm.cli.main", *map(str, words)]
    done = subprocess.run(command, input=entered, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def test_chat_bench_simulate_and_doctor(tmp_path: Path) -> None:
    port, steps = free_port(), tmp_path / "steps"
    steps.mkdir()
    path = serve_file(tmp_path / "serve.yaml", port, ARGS | {"engine": {"threads": 2, "record_dir": str(steps)}})
    with Server(path, port) as server:
        said = raylm("chat", server.url, entered="What is a KV cache?\n/set max_tokens 4\nAnd what is a block?\n")
        assert said.startswith("A KV cache keeps the attention keys")
        out, record = tmp_path / "out.json", tmp_path / "asked.jsonl"
        prompts = ("--prompt-tokens", "40:90", "--prefix-tokens", "128", "--prefixes", "2", "--output-tokens", "8")
        raylm("bench", server.url, "--rate", "6", "--requests", "24", *prompts, "--json", out, "--record", record)
        tools = ("--tools", "2", "--tool-choice", "required", "--output-tokens", "200")
        called = tmp_path / "called.json"
        raylm("bench", server.url, "--concurrency", "2", "--requests", "4", *tools, "--json", called)
        found = json.loads(raylm("doctor", path, "--json", status=1))
        bad = [finding["name"] for finding in found["findings"] if finding["state"] == "problem"]
    assert bad == ["ports"]
    (load,) = json.loads(out.read_text())["loads"]
    assert (load["requests"], load["errors"], load["output_tokens"]) == (24, {}, 24 * 8)
    assert load["cached_tokens"] >= 20 * 112  # prefixes, except in first requests and partial blocks
    asked = [line.prompt_tokens for line in read_lines([record])]
    assert all(abs(tokens - 128 - 65) <= 25 + 25 for tokens in asked)  # about the requested lengths
    (calls,) = json.loads(called.read_text())["loads"]
    assert calls["tool_calls"] >= 4
    assert calls["broken_tool_calls"] == 0

    (recorded,) = steps.glob("engine-*.jsonl")
    simulated = tmp_path / "simulated.json"
    raylm("simulate", "--trace", record, "--steps", recorded, "--json", simulated)
    figures = json.loads(simulated.read_text())
    assert (figures["requests"], figures["output_tokens"]) == (24, 24 * 8)
    assert abs(figures["hit_rate"] - load["cached_tokens"] / load["prompt_tokens"]) < 0.1
