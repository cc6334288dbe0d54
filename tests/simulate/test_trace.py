"""Traces: the meaning of lines, and errors in them."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from raylm.errors import ConfigError
from raylm.simulate import Fleet, Replay, read_trace, simulate

GOOD = {"arrival": 1.5, "prompt_tokens": 40, "output_tokens": 3}


def written(path: Path, *lines: dict[str, Any] | str) -> Path:
    file = path / "trace.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return file


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", r"line 2: .*Expecting"),
        ("[]", "line 2"),
        (GOOD | {"arrival": -1}, "arrival: .*greater"),
        (GOOD | {"output_tokens": 0}, "output_tokens: .*greater"),
        (GOOD | {"prompt_token": 3}, "'prompt_token'; did you mean 'prompt_tokens'"),
        ({"arrival": 1, "output_tokens": 3}, "set either prompt_tokens or prompt"),
        (GOOD | {"prompt": [1]}, "set either prompt_tokens or prompt"),
        (GOOD | {"blocks": ["xyz"]}, "blocks: 'xyz' is not a hexadecimal"),
        (GOOD | {"blocks": ["1" * 17]}, "64 bits"),
        (GOOD | {"block_size": 1}, "block_size: .*greater"),
    ],
)
def test_a_wrong_line_is_named_with_its_field(tmp_path: Path, line: dict[str, Any] | str, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as error:
        read_trace([written(tmp_path, GOOD, line)], 16)
    assert "trace.jsonl, line 2: " in error.value.message


def test_an_empty_trace_and_none_at_all_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no request"):
        read_trace([written(tmp_path, "", '{"kind": "update"}')], 16)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace([tmp_path / "none"], 16)


def test_requests_come_in_the_order_of_arrival_and_begin_at_0(tmp_path: Path) -> None:
    found = list(read_trace([written(tmp_path, GOOD | {"arrival": 9}, GOOD | {"key": "a"})], 16))
    assert [(one.at, one.key, len(one.prompt)) for one in found] == [(0, "a", 40), (7.5, "", 40)]
    assert not set(found[0].prompt) & set(found[1].prompt), "without blocks no prompts share tokens"


def test_blocks_of_prompt_and_answer_are_found_by_who_comes_later(tmp_path: Path) -> None:
    first = GOOD | {"prompt_tokens": 40, "output_tokens": 30, "blocks": ["a", "b", "c", "d"]}
    later = {"arrival": 60, "prompt_tokens": 80, "output_tokens": 1, "blocks": ["a", "b", "c", "d", "e"]}
    other = {"arrival": 120, "prompt_tokens": 80, "output_tokens": 1, "blocks": ["a", "b", "f", "d", "e"]}
    fleet = Fleet.of({}, "test")
    served = simulate(fleet, Replay(read_trace([written(tmp_path, first, later, other)], 16))).served
    assert [one.cached_tokens for one in served] == [0, 64, 32]


def test_different_blocks_of_a_trace_share_no_smaller_block_of_the_fleet(tmp_path: Path) -> None:
    first = {"arrival": 0, "prompt_tokens": 1100, "output_tokens": 1, "blocks": [1, 2], "block_size": 512}
    other = {"arrival": 60, "prompt_tokens": 1100, "output_tokens": 1, "blocks": [1, 3], "block_size": 512}
    for size in (16, 64):
        fleet = Fleet.of({"config": {"cache": {"block_size": size}}}, "test")
        served = simulate(fleet, Replay(read_trace([written(tmp_path, first, other)], size))).served
        assert [one.cached_tokens for one in served] == [0, 512], size
    small = [one | {"block_size": 16, "blocks": [*range(1, 35), 100 + n]} for n, one in enumerate((first, other))]
    fleet = Fleet.of({"config": {"cache": {"block_size": 64}}}, "test")
    served = simulate(fleet, Replay(read_trace([written(tmp_path, *small)], 64))).served
    assert [one.cached_tokens for one in served] == [0, 512]


def test_a_turn_waits_for_the_answer_before_it_and_thinks(tmp_path: Path) -> None:
    """Only the first recorded time counts, because answers take longer here than in the trace."""
    turns: list[dict[str, Any]] = [
        {"arrival": 1 + n, "prompt_tokens": 64 * (n + 1), "output_tokens": 100, "blocks": list(range(1, n + 2))}
        | {"block_size": 64, "session": "s", "think_s": 0.25 * n}
        for n in range(4)
    ]
    alone = {"arrival": 0, "prompt_tokens": 10, "output_tokens": 1}
    fleet = Fleet.of({"costs": {"base_s": 0.05}}, "test")
    served = simulate(fleet, Replay(read_trace([written(tmp_path, alone, *turns)], 16))).served[1:]
    assert served[0].at == 1
    assert [later.at - earlier.last_s for earlier, later in pairwise(served)] == pytest.approx([0.25, 0.5, 0.75])
    assert [one.prompt_tokens for one in served] == [64, 128, 192, 256]
    assert [one.cached_tokens for one in served] == [0, 64, 128, 192]


def test_a_pause_without_a_session_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="line 1: think_s: needs a session"):
        read_trace([written(tmp_path, GOOD | {"think_s": 1})], 16)
