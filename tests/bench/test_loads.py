"""Loads against a server that counts words: the requests, their times, errors, and the recorded figures."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from raylm.bench import LoadResult
from raylm.bench.loops import open_loop, poisson
from raylm.bench.prompts import PromptSettings, Question, Scale, block_hashes, drawn
from raylm.cli.main import app
from raylm.client import Answer
from raylm.simulate import Targets, read_lines
from raylm.simulate.virtual_time import VirtualLoop
from raylm.simulate.virtual_time import run as run_virtual
from tests.openai_server import OVERHEAD, PER_WORD, OpenAIServer


def run(*words: str, status: int = 0) -> str:
    found = CliRunner().invoke(app, ["bench", *words])
    assert found.exit_code == status, found.output
    return found.output


def figures(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["loads"]


def prompts(bodies: list[dict[str, Any]]) -> list[str]:
    """The prompts of the loads, without the warm-up."""
    return [body["prompt"] if "prompt" in body else body["messages"][-1]["content"] for body in bodies[4:]]


def test_a_closed_loop_keeps_so_many_open_and_tokens_are_the_servers(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    with OpenAIServer(pause_s=0.001) as server:
        said = run(server.url, "--concurrency", "1,4", "--requests", "8", "--output-tokens", "5", "--json", str(out))
    one, four = figures(out)
    assert json.loads(out.read_text())["settings"]["model"] == "fake"
    assert server.most_open == 4
    assert (one["load"], four["load"]) == ("concurrency 1", "concurrency 4")
    # The load asks for 128 tokens. With the tokens that the server adds, whole words come this close.
    words = {len(prompt.split()) for prompt in prompts(server.bodies)}
    assert words == {round((128 - OVERHEAD) / PER_WORD)}
    assert four["prompt_tokens"] == 8 * (OVERHEAD + PER_WORD * words.pop())
    assert (four["output_tokens"], four["errors"], four["requests"]) == (40, {}, 8)
    assert 0 < four["ttft_ms"]["p50"] <= four["e2e_ms"]["p50"]
    assert "TTFT, ms" in said
    assert all(body["ignore_eos"] and body["max_tokens"] == 5 for body in server.bodies[4:])


def test_chunks_that_hold_several_tokens_are_not_counted_as_one() -> None:
    answer = Answer()
    for text in ("a", "b c d"):
        answer.take({"choices": [{"delta": {"content": text}}]})
    answer.take({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}})
    assert (answer.chunks, answer.tokens) == (2, 5)
    assert answer.itl == (answer.last - answer.ttft) / 4


@pytest.mark.parametrize("event", ["null", "5", '{"choices": [null]}', '{"usage": {"prompt_tokens": "many"}}'])
def test_an_event_of_another_form_is_an_error_of_its_request_alone(tmp_path: Path, event: str) -> None:
    out = tmp_path / "out.json"
    with OpenAIServer(*[""] * 4, event) as server:
        run(server.url, "--concurrency", "1", "--requests", "2", "--json", str(out), status=1)
    (found,) = figures(out)
    assert (found["requests"], found["errors"]) == (2, {"stream": 1})


def test_errors_are_counted_by_kind_and_the_status_tells(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    with OpenAIServer(*[""] * 4, 429, 503, "stream", "cut", "short", "silent", "json", 429) as server:
        said = run(server.url, "--concurrency", "1", "--requests", "9", "--json", str(out), status=1)
    (found,) = figures(out)
    assert found["errors"] == {"429": 2, "503": 1, "stream": 2, "cut off": 1, "length": 1, "usage": 1}
    assert found["output_tokens"] == 64  # tokens of the one good answer
    assert "429 refused with 429" in said


def test_an_open_loop_sends_at_its_times_whatever_is_open(tmp_path: Path) -> None:
    """No answer ends before all 40 are open, and all requests are recorded."""
    record = tmp_path / "asked.jsonl"
    with OpenAIServer(open_first=40) as server:
        run(server.url, "--rate", "200", "--requests", "40", "--output-tokens", "4", "--record", str(record))
    assert server.most_open == 40
    assert len(read_lines([record])) == 40


def test_an_open_loop_is_never_early_and_says_how_late_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """In virtual time each request takes an hour, and the loop stalls for a second before the eighth request."""
    times, sent = poisson(200, 40, 0), list[float]()

    async def ask(number: int) -> int:
        sent.append(now())
        if number == 7:
            loop().advance(1.0)
        await asyncio.sleep(3600)
        return number

    def loop() -> VirtualLoop:
        running = asyncio.get_running_loop()
        assert isinstance(running, VirtualLoop)
        return running

    def now() -> float:
        return loop().time()

    monkeypatch.setattr("raylm.bench.loops.time.perf_counter", now)
    answers, late = run_virtual(open_loop([partial(ask, number) for number in range(40)], times, lambda: None))
    assert answers == list(range(40))
    assert sent[:8] == pytest.approx(times[:8])
    held_up = times[7] + 1.0
    assert sent == pytest.approx([max(at, held_up) if number > 7 else at for number, at in enumerate(times)])
    assert late == pytest.approx([there - at for there, at in zip(sent, times, strict=True)], abs=1e-9)


def test_a_turn_of_a_session_is_sent_after_the_answer_before_it(tmp_path: Path) -> None:
    """Without sessions all requests are open at once.

    With two sessions only two are, whatever the trace's times say.
    """
    trace, record = tmp_path / "trace.jsonl", tmp_path / "asked.jsonl"
    lines = [{"arrival": 0.0, "prompt_tokens": 40, "output_tokens": 4} for _ in range(8)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    with OpenAIServer(open_first=8) as server:
        run(server.url, "--trace", str(trace))
    assert server.most_open == 8
    turns = [line | {"session": f"s{n % 2}", "think_s": 0.02} for n, line in enumerate(lines)]
    trace.write_text("\n".join(map(json.dumps, turns)))
    with OpenAIServer(open_first=2) as server:
        run(server.url, "--trace", str(trace), "--speed", "2", "--record", str(record))
    assert server.most_open == 2
    found = read_lines([record])
    assert sorted((line.session, line.think_s) for line in found) == [("s0", 0.01)] * 4 + [("s1", 0.01)] * 4
    for name in ("s0", "s1"):
        mine = [line for line in found if line.session == name]
        pauses = [later.arrival - one.arrival - one.duration_s for one, later in pairwise(mine)]
        assert min(pauses) > 0.0099


def test_prefixes_are_shared_and_recorded_as_equal_blocks(tmp_path: Path) -> None:
    record, again = tmp_path / "asked.jsonl", tmp_path / "again.jsonl"
    words = ("--prefix-tokens", "320", "--prefixes", "3", "--prompt-tokens", "20:60", "--output-tokens", "2")
    with OpenAIServer() as server:
        run(server.url, "--concurrency", "2", "--requests", "30", *words, "--record", str(record))
        asked = prompts(server.bodies)
        server.bodies.clear()
        run(server.url, "--trace", str(record), "--speed", "20", "--record", str(again))
    shared = Counter(" ".join(prompt.split()[:150]) for prompt in asked)
    assert len(shared) == 3
    lines = read_lines([record])
    blocks = 150 * PER_WORD // 16
    assert len({line.blocks[:blocks] for line in lines}) == 3
    assert len({line.blocks for line in lines}) == 30
    replayed = read_lines([again])
    assert [line.blocks for line in replayed] == [line.blocks for line in lines]
    assert [line.output_tokens for line in replayed] == [2] * 30
    assert all(abs(one.prompt_tokens - two.prompt_tokens) <= PER_WORD for one, two in zip(lines, replayed, strict=True))
    assert len({" ".join(prompt.split()[:150]) for prompt in prompts(server.bodies)}) == 3


def test_two_loads_have_no_prefix_in_common() -> None:
    settings = PromptSettings(prefix_tokens=32)
    first, second = (next(drawn(settings, Scale(), load)).prompt for load in (0, 1))
    assert first[:32] != second[:32]
    assert first == next(drawn(settings, Scale(), 0)).prompt


def test_blocks_are_equal_up_to_the_first_word_that_differs() -> None:
    one, two = ["river"] * 64, ["river"] * 64
    two[40] = "stone"
    found = [block_hashes(Question(tuple(words), 1), Scale(per_word=2.0)) for words in (one, two)]
    assert [left == right for left, right in zip(*found, strict=True)] == [True] * 5 + [False] * 3


def test_token_ids_go_to_completions_and_arrive_as_they_are(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"arrival": 3, "prompt": [5, 6, 7], "output_tokens": 2}))
    with OpenAIServer() as server:
        run(server.url, "--trace", str(trace))
        said = run(server.url, "--trace", str(trace), "--endpoint", "chat", status=2)
    assert prompts(server.bodies)[0] == [5, 6, 7]
    assert "--endpoint: chat takes no token ids" in said


def test_tools_are_offered_and_their_arguments_looked_at(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    with OpenAIServer() as server:
        server.arguments = '{"place": "here"'
        words = ("--tools", "3", "--tool-choice", "required", "--concurrency", "1", "--requests", "2")
        run(server.url, *words, "--json", str(out))
    body = server.bodies[-1]
    assert (len(body["tools"]), body["tool_choice"], "ignore_eos" in body) == (3, "required", False)
    (found,) = figures(out)
    assert (found["tool_calls"], found["broken_tool_calls"]) == (2, 2)


def test_goodput_counts_what_keeps_both_targets() -> None:
    def answer(ttft: float, last: float) -> tuple[Question, Answer]:
        return Question(("a",), 11), Answer(ttft=ttft, last=last, total=last, tokens=11, chunks=11, prompt_tokens=1)

    asked = [answer(0.1, 0.6), answer(0.5, 1.0), answer(0.1, 1.2)]  # good, late, slow
    found = LoadResult("", 2.0, [*asked, (Question(("a",), 1), Answer(kind="429", error="429"))]).figures(
        Targets(200, 60)
    )
    assert (found["goodput_per_s"], found["good_share"]) == (0.5, 0.25)


@pytest.mark.long
def test_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "ttft.svg"
    with OpenAIServer() as server:
        run(server.url, "--concurrency", "1", "--plot", str(picture))
    assert picture.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--concurrency 0", "--concurrency 0: numbers must be above 0"),
        ("--rate x", "--rate x: must be one number"),
        ("--rate nan", "--rate nan: numbers must be above 0, and finite"),
        ("--rate 2,inf", "--rate 2,inf: numbers must be above 0, and finite"),
        ("--rate 2 --concurrency 3", "Set only one of --trace"),
        ("--prompt-tokens 9:3", "--prompt-tokens 9:3"),
        ("--prefixes 0", "--prefixes: "),
        ("--endpoint talk", "--endpoint: "),
        ("--speed 0", "--speed: "),
        ("--tools 2 --endpoint completions", "--tools needs --endpoint chat"),
        ("--tool-choice maybe", "--tool_choice: "),
        ("--body [1]", "--body [1]: must be a JSON object"),
        ("--json no/such/folder/out.json", "--json no/such/folder/out.json: it cannot be written"),
        ("--trace nowhere.jsonl", "nowhere.jsonl: it cannot be read"),
    ],
)
def test_what_is_wrong_is_named(words: str, named: str) -> None:
    assert named in " ".join(run("localhost:1", *words.split(), status=2).split())


def test_without_a_server_it_says_how_to_start_one() -> None:
    assert "no server answers at http://127.0.0.1:1" in run("127.0.0.1:1", status=1)


def test_a_key_is_sent_and_a_wrong_one_is_named() -> None:
    with OpenAIServer(key="sesame") as server:
        assert "a wrong key (--api-key" in run(server.url, "--model", "fake", status=1)
        run(server.url, "--api-key", "sesame", "--concurrency", "1")
