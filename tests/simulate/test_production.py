"""Converters of production traces: extracts of real files, damaged lines, sessions, and bounded reading."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from raylm.cli.main import app
from raylm.errors import ConfigError
from raylm.simulate import Fleet, Replay, TraceLine, production, read_trace, simulate
from raylm.simulate.production import Selection

SLICES = Path(__file__).parent.parent / "data" / "traces"
MOONCAKE, AGENTS, AZURE = SLICES / "mooncake.jsonl", SLICES / "agents.json", SLICES / "azure_code.csv"
SERVEGEN = SLICES / "chunk-34-trace.csv"
Lines = Iterator[dict[str, Any]]
CONVERTERS: dict[str, Callable[[list[Path], Selection, Callable[[int], object]], Lines]] = {
    "mooncake": production.mooncake,
    "azure": production.azure,
    "agents": lambda paths, chosen, advance: production.agents(paths, chosen, advance, 60.0),
    "servegen": lambda paths, chosen, advance: production.servegen(paths, chosen, advance, 71_400, 1800),
}
FILES = {"mooncake": MOONCAKE, "azure": AZURE, "agents": AGENTS, "servegen": SERVEGEN}


def converted(name: str, *paths: Path, **chosen: Any) -> list[dict[str, Any]]:
    return list(CONVERTERS[name](list(paths) or [FILES[name]], Selection(**chosen), lambda read: None))


def test_mooncake_keeps_times_lengths_and_whole_blocks() -> None:
    found, given = converted("mooncake"), [json.loads(line) for line in MOONCAKE.read_text().splitlines()]
    assert len(found) == 40
    for line, one in zip(found, given, strict=True):
        assert line["arrival"] == one["timestamp"] / 1000
        assert (line["prompt_tokens"], line["output_tokens"]) == (one["input_length"], one["output_length"])
        assert line["blocks"] == one["hash_ids"][: len(line["blocks"])]
        assert len(line["blocks"]) == one["input_length"] // 512, "a hash of a partial block is never shared"


def test_azure_counts_from_the_first_request() -> None:
    with AZURE.open() as file:
        given = list(csv.DictReader(file))
    found = converted("azure")
    assert [(line["prompt_tokens"], line["output_tokens"]) for line in found] == [
        (int(one["ContextTokens"]), int(one["GeneratedTokens"])) for one in given
    ]
    assert (given[0]["TIMESTAMP"][-10:], given[1]["TIMESTAMP"][-10:]) == ("03.9799600", "04.0319600")
    assert (found[0]["arrival"], found[1]["arrival"]) == (0, 0.052)


def test_agents_are_sessions_with_their_think_times() -> None:
    (found, given) = converted("agents"), json.loads(AGENTS.read_text())["requests"]
    assert [line["think_s"] for line in found] == [0.0, 4.0, 3058.0]
    assert {line["session"] for line in found} == {"trace_0504"}
    shared = [len(set(first["blocks"]) & set(second["blocks"])) for first, second in pairwise(found)]
    assert shared == [len(set(a["hash_ids"]) & set(b["hash_ids"])) for a, b in pairwise(given)]
    faster = converted("agents", speed=2)
    assert [line["think_s"] for line in faster] == [0.0, 2.0, 1529.0]


def test_sessions_of_agents_share_no_block(tmp_path: Path) -> None:
    """Each file counts its hashes from 1."""
    other = tmp_path / "trace_2.json"
    other.write_text(AGENTS.read_text().replace("trace_0504", "trace_2"))
    found = converted("agents", AGENTS, other)
    assert not set(found[0]["blocks"]) & set(found[3]["blocks"])
    assert found[3]["arrival"] > 0, "sessions begin one after another"


@pytest.mark.parametrize(("duration_ms", "think_s"), [(20_000, 8), (None, 28)])
def test_subagents_are_turns_of_their_session_and_their_time_is_no_thought(
    tmp_path: Path, duration_ms: int | None, think_s: int
) -> None:
    """If the duration is missing, the agent did not wait for the subagent."""

    def one(at: float, think_s: float) -> dict[str, Any]:
        return {"type": "n", "t": at, "in": 100, "out": 5, "hash_ids": [1], "api_time": 2.0, "think_time": think_s}

    inner = {"type": "subagent", "t": 3.0, "duration_ms": duration_ms, "requests": [one(0.0, 0.0), one(9.0, 7.0)]}
    file = tmp_path / "one.json"
    file.write_text(json.dumps({"id": "a", "block_size": 64, "requests": [one(0.0, 0.0), inner, one(30.0, 28.0)]}))
    found = converted("agents", file)
    assert [(line["arrival"], line["think_s"]) for line in found] == [(0, 0), (3, 0), (12, 7), (30, think_s)]


def test_servegen_draws_the_rate_and_the_burstiness_of_the_client() -> None:
    found = converted("servegen")
    assert {line["key"] for line in found} == {"chunk-34"}
    rates = [float(row[1]) for row in csv.reader(SERVEGEN.read_text().splitlines())][:3]
    counts = np.histogram([line["arrival"] for line in found], bins=[0, 600, 1200, 1800])[0]
    assert counts == pytest.approx([600 * rate for rate in rates], rel=0.06)
    gaps = np.diff([line["arrival"] for line in found if 600 <= line["arrival"] < 1200])
    assert gaps.std() / gaps.mean() == pytest.approx(0.9556, abs=0.06), "the CV of the second window"
    assert converted("servegen", seed=1) == found != converted("servegen", seed=2)
    assert len(converted("servegen", share=0.25)) == pytest.approx(len(found) / 4, rel=0.1)


def test_a_bursty_client_stays_bursty(tmp_path: Path) -> None:
    (tmp_path / "chunk-7-dataset.json").write_text('{"0": {"input_tokens": "{9: 1.0}", "output_tokens": "{3: 1.0}"}}')
    trace = tmp_path / "chunk-7-trace.csv"
    for name, shape in (("Gamma", 0.05324), ("Weibull", 0.35)):
        trace.write_text(f"0,20,4.3,{name},{shape},1.07\n")
        found = list(production.servegen([trace], Selection(), lambda read: None, 0, 600))
        gaps = np.diff([line["arrival"] for line in found])
        assert gaps.std() / gaps.mean() > 2.5, name
        assert {(line["prompt_tokens"], line["output_tokens"]) for line in found} == {(9, 3)}


@pytest.mark.parametrize("name", CONVERTERS)
def test_each_line_is_a_line_of_a_trace_and_can_be_simulated(name: str, tmp_path: Path) -> None:
    out = tmp_path / "trace.jsonl"
    extra = ["--begin", "71400", "--seconds", "20"] if name == "servegen" else []
    done = CliRunner().invoke(app, ["trace", name, str(FILES[name]), "--requests", "30", *extra, "--to", str(out)])
    assert done.exit_code == 0, done.output
    lines = [TraceLine.model_validate_json(line) for line in out.read_text().splitlines()]
    assert 0 < len(lines) <= 30
    served = simulate(Fleet.of({}, "test"), Replay(read_trace([out], 16))).served
    assert sorted(one.prompt_tokens for one in served) == sorted(line.prompt_tokens or 0 for line in lines)
    assert not any(one.error for one in served)


@pytest.mark.parametrize("name", ["mooncake", "azure", "agents"])
def test_files_are_read_as_the_lines_are_taken(name: str, tmp_path: Path) -> None:
    """Memory is bounded: after the first line most bytes are unread."""
    file = tmp_path / FILES[name].name
    head, *rest = FILES[name].read_text().splitlines(keepends=True)
    if name == "agents":
        paths = [AGENTS] * 50
    else:
        paths = [file]
        file.write_text(head + "".join(rest) * 50)
    read = list[int]()
    lines = CONVERTERS[name](paths, Selection(), read.append)
    next(lines)
    size = sum(path.stat().st_size for path in paths)
    assert sum(read) < size / 20
    assert len(list(lines)) > 40
    assert sum(read) == size, "all bytes are reported at the end"


@pytest.mark.parametrize(
    ("name", "before", "after", "named"),
    [
        ("mooncake", '"input_length": 7322', '"input_length": -1', "mooncake.jsonl, line 2: input_length: .*greater"),
        ("mooncake", '"output_length": 490, ', "", "mooncake.jsonl, line 2: output_length: Field required"),
        ("mooncake", "[0, 14, 15", "[0, 1.5, 15", "line 2: hash_ids.1: "),
        ("mooncake", '{"timestamp": 0, "input_length": 7322', '"input_length": 7322', "line 2: "),
        ("mooncake", '"timestamp": 0, "input_length": 7322', '"timestamp": NaN, "input_length": 7322', "line 2: time"),
        ("azure", "04.0319600,3180", "04.0319600,many", "azure_code.csv, line 3: ContextTokens: "),
        ("azure", "2023-11-16 18:17:04.0319600", "yesterday", "line 3: TIMESTAMP: "),
        ("azure", "2023-11-16 18:17:04.0319600", "2022-11-16 18:17:04", "line 3: TIMESTAMP: .* before the first"),
        ("azure", "04.0319600,3180,8", "04.0319600,3180", "line 3: must have 3 columns; it has 2"),
        ("azure", "04.0319600,3180,8", "04.0319600Z,3180,8", "line 3: TIMESTAMP: .* must both have a zone, or none"),
        ("azure", "04.0319600,3180,8", f"04.0319600,3180,{'8' * 200_000}", "line 3: field larger than field limit"),
        ("azure", "TIMESTAMP,", "", "line 1: must have the columns TIMESTAMP, "),
        ("agents", '"in":11300', '"in":0', r"agents.json: requests.1.n.in: .*greater"),
        ("agents", '"hash_ids":[1,2,3', '"hash_ids":["x",2,3', "agents.json: requests.0.n.hash_ids.0: "),
        ("agents", '"block_size":64,', "", "agents.json: block_size: Field required"),
        ("agents", '"t":13.0', '"t":', "agents.json, line 1: "),
        ("servegen", "8.008333333333333", "often", "chunk-34-trace.csv, line 2: rate: "),
        ("servegen", "0.9556475450578585,Gamma", "0.9,Pareto", "line 2: pattern: "),
        ("servegen", "0.9556475450578585,Gamma,", "Gamma,", "line 2: must have the columns timestamp, "),
    ],
)
def test_a_damaged_record_is_named_with_its_field(
    tmp_path: Path, name: str, before: str, after: str, named: str
) -> None:
    text = FILES[name].read_text()
    assert before in text
    (file := tmp_path / FILES[name].name).write_text(text.replace(before, after))
    (tmp_path / "chunk-34-dataset.json").write_text((SLICES / "chunk-34-dataset.json").read_text())
    with pytest.raises(ConfigError, match=named):
        converted(name, file)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[]", "chunk-34-dataset.json: must be an object of seconds"),
        ("{", "chunk-34-dataset.json: Expecting"),
        ('{"64800": {"input_tokens": "{1: 1.0}"}}', "dataset.json, 64800: output_tokens: Field required"),
        ('{"64800": {"input_tokens": "{1: 1.0}", "output_tokens": "f()"}}', "64800: output_tokens: must be a dict"),
        ('{"64800": {"input_tokens": "{1: 0.0}", "output_tokens": "{1: 1}"}}', "64800: input_tokens: .*shares"),
    ],
)
def test_a_damaged_histogram_is_named(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "chunk-34-dataset.json").write_text(text)
    (file := tmp_path / SERVEGEN.name).write_text(SERVEGEN.read_text())
    with pytest.raises(ConfigError, match=named):
        converted("servegen", file)


def test_what_cannot_be_read_or_is_not_valid_is_refused(tmp_path: Path) -> None:
    def refused(*words: str) -> str:
        done = CliRunner().invoke(app, ["trace", *words])
        assert done.exit_code == 2, done.output
        return done.output

    assert "nowhere.jsonl: it cannot be read" in refused("mooncake", "nowhere.jsonl")
    assert "nowhere.json: it cannot be read" in refused("agents", "nowhere.json")
    assert "must be a file chunk-N-trace.csv" in refused("servegen", str(AZURE))
    assert "--speed: " in refused("azure", str(AZURE), "--speed", "0")
    assert "--share: " in refused("azure", str(AZURE), "--share", "1.5")
    assert "--gap 0: must be above 0" in refused("agents", str(AGENTS), "--gap", "0")
    assert "--seconds 0: must be above 0" in refused("servegen", str(SERVEGEN), "--seconds", "0")
    assert "no request is left" in refused("azure", str(AZURE), "--longest", "2")
    assert "--to " in refused("azure", str(AZURE), "--to", str(tmp_path / "none" / "file"))
    (file := tmp_path / "azure.csv").write_text(AZURE.read_text())
    assert "it is read; choose another file" in refused("azure", str(file), "--to", f"{tmp_path}/./azure.csv")
    assert file.read_text() == AZURE.read_text()


def test_a_full_disk_is_told() -> None:
    done = CliRunner().invoke(app, ["trace", "azure", str(AZURE), "--to", "/dev/full"])
    assert (done.exit_code, "--to /dev/full: No space left on device" in done.output) == (1, True)


def test_speed_share_and_length_choose() -> None:
    whole = converted("mooncake")
    assert [line["arrival"] for line in converted("mooncake", speed=4)] == [
        round(line["arrival"] / 4, 6) for line in whole
    ]
    half = converted("mooncake", share=0.5)
    assert 10 < len(half) < 30
    assert all(line in whole for line in half)
    short = converted("mooncake", longest=9000)
    assert short == [line for line in whole if line["prompt_tokens"] + line["output_tokens"] <= 9000] != whole
    assert len(converted("agents", longest=11_300)) == 1, "a session ends before its first request that is too long"
