"""`raylm simulate`: from options to figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raylm.cli.main import app
from raylm.config import Config, EngineConfig
from raylm.simulate import LOADS, Fleet, LoadSettings, simulate

FLEET = """
engines:
- {count: 2, num_blocks: 4000}
- {count: 1, slowness: 2.0}
ingresses: 2
staleness_s: 0.05
costs: {base_s: 0.005}
config: {scheduler: {max_num_seqs: 32}}
"""


def run(*words: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["simulate", *words])
    return found.exit_code, found.output


def test_a_fleet_a_trace_and_figures_as_json(tmp_path: Path) -> None:
    fleet, trace, out = tmp_path / "fleet.yaml", tmp_path / "trace.jsonl", tmp_path / "out.json"
    fleet.write_text(FLEET)
    lines = [{"arrival": 0.1 * n, "prompt_tokens": 90, "output_tokens": 4, "key": f"k{n % 2}"} for n in range(8)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    status, said = run(str(fleet), "--trace", str(trace), "--json", str(out))
    assert status == 0, said
    assert "TTFT, ms" in said
    found = json.loads(out.read_text())
    assert found["requests"] == 8
    assert set(found["keys"]) == {"k0", "k1"}


def test_a_load_and_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "ttft.svg"
    words = ["--engines", "2", "--load", "bursts", "--requests", "32", "--rate", "9", "--output-tokens", "3"]
    status, said = run(*words, "--plot", str(picture))
    assert status == 0, said
    assert picture.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--load storms", "--load storms: unknown load"),
        ("--requests 0", "--requests: "),
        ("--prompt-tokens 9:3", "--prompt-tokens 9:3"),
        ("--prompt-tokens a", "--prompt-tokens a"),
        ("--engines 0", "engines.0.count"),
        ("--trace nowhere.jsonl", "nowhere.jsonl: it cannot be read"),
        ("nowhere.yaml", "nowhere.yaml: it cannot be read"),
        ("--steps nowhere.jsonl", "nowhere.jsonl: it cannot be read"),
    ],
)
def test_what_is_wrong_is_named(words: str, named: str) -> None:
    status, said = run(*words.split())
    assert status == 2
    assert named in said


def test_a_recorded_fleet_needs_no_other_words(tmp_path: Path) -> None:
    config = Config(engine=EngineConfig(record_dir=str(tmp_path)))
    fleet = Fleet.of({"config": config.model_dump(exclude_defaults=True)}, "test")
    simulate(fleet, LOADS["hot"](LoadSettings(requests=40, rate=20, output_tokens=(2, 9))))
    (path,) = tmp_path.glob("*.jsonl")
    status, said = run("--recorded", str(path))
    assert status == 0, said
    assert f"{path.name}: costs of a step: base_s 0.006, token_s 6e-05, sequence_s 6e-05" in said
    simulated, lived = (
        next(line for line in said.splitlines() if line.startswith(f"{name}TTFT")) for name in ("", "recorded ")
    )
    assert simulated.split()[-4:] == lived.split()[-4:]
    status, said = run("--recorded", str(path), "--engines", "2")
    assert (status, "--recorded cannot be combined with --engines" in said) == (2, True), said


def test_a_wrong_fleet_is_named(tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.yaml"
    for text, named in (
        ("engine: 3", "unknown key 'engine'; did you mean 'engines'"),
        ("[1]", "a fleet is a mapping"),
        (
            "config: {scheduler: {speculative_tokens: 2}}",
            "config.scheduler.speculative_tokens: not simulated",
        ),
    ):
        fleet.write_text(text)
        status, said = run(str(fleet))
        assert (status, named in said) == (2, True), said
