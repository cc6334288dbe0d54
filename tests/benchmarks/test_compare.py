"""The pure parts of the comparison: pairs and marks of samples, tables, bounds, and the parts of a step."""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import plot, rows
from benchmarks.compare import __main__ as compare
from benchmarks.compare import limits, report
from benchmarks.compare.limits import Limits, Shape
from benchmarks.compare.peers import Contender, Field, Starter
from benchmarks.compare.report import OURS, Sample
from benchmarks.compare.workloads import SERVED, ChatClient, Prompts, Words
from raylm.checkpoint import EMBEDDED
from raylm.client import Connection
from tests.checkpoints import make_checkpoint
from tests.gguf_files import make_gguf

FIELD = Field(Contender(OURS, []), [])


def sample(engine: str, repeat: int, others: float = 0.0, peer: str = "peer", **figures: float) -> Sample:
    return Sample("W1", engine, peer, repeat, figures or {"out_tok_s": 1.0}, others)


def test_ratios_pair_the_rounds_whatever_their_order() -> None:
    taken = [sample("peer", n, out_tok_s=theirs) for n, theirs in enumerate((10.0, 20.0, 40.0))]
    taken += [sample(OURS, n, out_tok_s=ours) for n, ours in enumerate((20.0, 30.0, 80.0))]
    random.Random(0).shuffle(taken)
    (row,) = report.rows(taken)
    assert sorted(row.ratios) == [1.5, 2.0, 2.0]
    assert report.spread(row) == "2.00 (1.50 to 2.00)"


def test_a_round_that_one_side_lacks_gives_no_ratio() -> None:
    (row,) = report.rows([sample("peer", 0), sample(OURS, 0), sample(OURS, 1)])
    assert (row.ratios, row.ours) == ([1.0], [1.0, 1.0])


def test_alone_there_are_figures_and_no_ratio() -> None:
    (row,) = report.rows([sample(OURS, n, peer=OURS) for n in range(3)])
    assert (row.ours, row.theirs, row.ratios) == ([1.0] * 3, [], [])
    assert report.spread(row) == "-"
    assert "(alone)" in report.table([row])[-1]


@pytest.mark.parametrize(("others", "marked"), [(0.4, False), (0.41, True)])
@pytest.mark.parametrize("disturbed", [OURS, "peer"])
def test_a_row_is_marked_if_either_side_was_disturbed(others: float, marked: bool, disturbed: str) -> None:
    taken = [sample(name, 0, others if name == disturbed else 0.0) for name in (OURS, "peer")]
    found = report.rows(taken)
    assert found[0].disturbed is marked
    assert ("*" in report.table(found)[-1]) is marked
    assert report.summary(found, {}, [])["disturbed"] == (["W1 out_tok_s peer"] if marked else [])


def test_the_best_peer_is_the_fastest_in_rates_and_the_shortest_in_times() -> None:
    taken = []
    for peer, rate, first in (("slow", 10.0, 900.0), ("fast", 40.0, 100.0)):
        taken.append(sample(peer, 0, peer=peer, out_tok_s=rate, ttft_ms=first))
        taken.append(sample(OURS, 0, peer=peer, out_tok_s=20.0, ttft_ms=300.0))
    assert report.best_ratio(report.rows(taken)) == {"W1 out_tok_s": ("fast", 0.5), "W1 ttft_ms": ("fast", 3.0)}


def test_serving_stands_beside_our_own_offline_rate_which_is_no_peer() -> None:
    served = [Sample("HTTP", OURS, peer, 0, {"out_tok_s at 8": 90.0, "itl_p50_ms at 8": 5.0}, 0.0) for peer in "ab"]
    offline = Sample("HTTP", report.OWN_OFFLINE, report.OWN_OFFLINE, 0, {"out_tok_s at 8": 100.0}, 0.0)
    found = report.rows(report.with_own_rate([offline, *served]))
    own = [row for row in found if row.peer == report.OWN_OFFLINE]
    assert [(row.figure, row.ratios) for row in own] == [("out_tok_s at 8", [0.9])]
    assert report.best_ratio(found) == {}


def test_the_summary_is_one_line_of_json() -> None:
    found = report.rows([sample("peer", 0, out_tok_s=2.0), sample(OURS, 0, out_tok_s=3.0)])
    line = json.dumps(report.summary(found, {"other": "not given"}, []))
    assert "\n" not in line
    assert json.loads(line)["ratios"] == {"W1 out_tok_s": {"peer": 1.5}}
    assert json.loads(line)["missing"] == {"other": "not given"}


def test_the_share_of_the_limit_stands_in_the_table() -> None:
    """A round's share is relative to the limit measured just before it. The table has the median of the shares."""
    taken = [
        replace(sample(OURS, n, out_tok_s=50.0, ttft_ms=400.0), bounds={"out_tok_s": bound, "ttft_ms": 100.0})
        for n, bound in enumerate((100.0, 200.0, 62.5))
    ]
    taken += [replace(sample("peer", n, out_tok_s=9.0), bounds={"out_tok_s": 1.0}) for n in range(3)]
    table = report.table(report.rows(taken))
    assert [re.findall(r"(\d+)%", line) for line in table[2:]] == [["50"], ["25"]]


# ---------------------------------------------------------------- served chats


def options(*words: str) -> argparse.Namespace:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["compare", *words])
        return compare.parse()


def test_ray_serve_llm_is_two_peers_with_ports_and_files_apart_from_ours(tmp_path: Path) -> None:
    args = options("--ray-serve-llm-python", "env/bin/python", "--port", "7000")
    field = Starter(args, EMBEDDED, tmp_path).field()
    assert [peer.name for peer in field.peers] == ["Ray Serve LLM", "Ray Serve LLM, direct streaming"]
    assert set(field.missing) == {"vllm", "llama.cpp", "openvino"}
    assert field.ours.serve is not None
    ours = field.ours.serve().command
    for peer in field.peers:
        assert peer.serve is not None
        server = peer.serve()
        assert server.url == "http://127.0.0.1:7003"
        own = {name: value for name, value in server.command.environment.items() if name.endswith(("PORT", "FILE"))}
        assert not set(own.values()) & set(ours.environment.values())
        assert server.command.environment.get("RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING") == (
            "1" if "," in peer.name else None
        )


async def test_a_chat_asks_for_the_same_text_as_a_completion(tmp_path: Path) -> None:
    serve = Starter(options(), EMBEDDED, tmp_path).field().ours.serve
    assert serve is not None
    async with Connection("http://127.0.0.1:1") as connection:
        prompts = (Prompts(Words(EMBEDDED), "seed") for _ in range(2))
        plain, chat = (kind(connection, serve(), next(prompts)).body() for kind in (SERVED["HTTP"], ChatClient))
    assert chat.pop("messages") == [{"role": "user", "content": plain.pop("prompt")}]
    assert chat == plain


def test_each_sample_is_a_row_by_engine_and_clients_as_soon_as_it_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    run = compare.Comparison(options("--rows", str(path), "--model", "/models/m"), EMBEDDED, FIELD)
    for clients in (1, 8):
        figures = {"out_tok_s": 10.0 * clients, "ttft_p50_ms": 5.0, "itl_p50_ms": 2.0}
        run.keep(compare.Place("chat", OURS, "vllm", 0, clients), figures, others=0.25)
    rates = [row for row in rows.read(path) if row.metric == "output"]
    assert [(row.question, row.case, row.value, row.unit) for row in rates] == [
        ("compare_chat", "RayLM, 1 client", 10.0, "tok/s"), ("compare_chat", "RayLM, 8 clients", 80.0, "tok/s"),
    ]  # fmt: skip
    assert [row.value for row in rows.read(path) if row.metric == "other processes"] == [0.25, 0.25]
    assert plot.table_by_clients(rows.read(path)) == [
        "|  | output, tok/s, at 1, 8 clients | TTFT p50, ms, at 1, 8 clients |",
        "| --- | --- | --- |",
        "| RayLM | 10, 80 | 5, 5 |",
    ]
    plot.draw(rows.read(path), tmp_path / "rows.svg")
    drawn = (tmp_path / "rows.svg").read_text()
    assert [text in drawn for text in ("RayLM", "8 clients", ">80<")] == [True] * 3


# ---------------------------------------------------------------- parts of a step

MEASURED = {"wall": 0.1, "step": 0.09, "forward": 0.08, "scheduler": 0.001, "messages": 0.002}


def test_without_a_profile_a_step_has_the_parts_that_were_measured() -> None:
    step = report.step_times(8, MEASURED)
    assert step.worker == pytest.approx({"forward": 0.08, "sampling": 0.01, "rest of the step": 0.0, "idle": 0.01})
    assert step.core == pytest.approx({"scheduler": 0.001, "messages": 0.002, "waiting": 0.097})
    assert step.idle_share == pytest.approx(0.1)


@given(
    shares=st.lists(st.floats(0.01, 1.0), min_size=5, max_size=5),
    idle=st.floats(0.0, 1.0),
    hidden=st.floats(0.0, 0.2),
)
def test_the_parts_of_a_profile_fill_the_wall(shares: list[float], idle: float, hidden: float) -> None:
    linear, attention, rest, sampling, after = shares
    forward = linear + attention + rest
    step = forward + sampling + after
    measured = {"wall": step + idle, "step": step, "forward": forward, "scheduler": hidden, "messages": hidden}
    found = report.step_times(1, measured, {"linear": linear, "attention": attention, "sampling": sampling})
    assert sum(found.worker.values()) == pytest.approx(step + idle)
    assert found.worker["forward"] == pytest.approx(rest)
    assert found.worker["rest of the step"] == pytest.approx(after)
    if 2 * hidden <= step + idle:
        assert sum(found.core.values()) == pytest.approx(step + idle)


def test_the_step_table_leaves_out_what_nobody_has() -> None:
    lines = report.step_table([report.step_times(1, MEASURED), report.step_times(8, MEASURED | {"others": 1.0})])
    assert not any("linear" in line for line in lines)
    assert "| worker | forward | 80.00 (80.0%) | 80.00 (80.0%) |" in lines
    assert lines[-1] == "| both | step | 100.00 | 100.00 * |"


def test_the_picture_is_drawn_with_and_without_peers(tmp_path: Path) -> None:
    found = report.rows([sample("peer", n, out_tok_s=2.0 + n) for n in range(2)] + [sample(OURS, n) for n in range(2)])
    for name, steps, table in (("all", [report.step_times(8, MEASURED)], found), ("none", [], [])):
        report.plot(tmp_path / f"{name}.png", "title", steps, table)
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


# ---------------------------------------------------------------- bounds

SHAPE = Shape(layer_weights=1000, head_weights=500, attention_size=4, kv_size=8)


def test_one_token_costs_its_weights_and_the_keys_before_it() -> None:
    slow_memory = Limits(read=1.0, gemm=1e30)
    assert limits.step_seconds(slow_memory, SHAPE, 1, 1, 10, 10) == 2 * (1000 + 500) + 2 * 8 * 10
    slow_cores = Limits(read=1e30, gemm=1.0)
    assert limits.step_seconds(slow_cores, SHAPE, 3, 1, 10, 10) == 2 * 3 * 1000 + 2 * 500 + 4 * 3 * 10 * 4


def test_a_causal_prompt_attends_to_half_of_itself() -> None:
    tokens = 64
    operations = sum(2 * 1000 + 4 * (place + 0.5) * 4 for place in range(tokens)) + 2 * 500
    assert limits.prefill_seconds(Limits(1e30, 1.0), SHAPE, 1, tokens) == pytest.approx(operations)


def test_decoding_reads_the_shared_prefix_once() -> None:
    memory = Limits(1.0, 1e30)
    apart = limits.decode_seconds(memory, SHAPE, 4, 100, 2)
    shared = limits.decode_seconds(memory, SHAPE, 4, 100, 2, shared=90)
    assert apart - shared == pytest.approx(2 * 2 * 8 * 3 * 90)


def test_the_shape_of_the_embedded_model_is_read_from_its_files() -> None:
    config = json.loads((EMBEDDED / "config.json").read_text())
    hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    attention = hidden * config["head_dim"] * 2 * (heads + kv_heads)
    layer = attention + 3 * hidden * config["intermediate_size"]
    shape = limits.read_shape(EMBEDDED)
    assert shape.layer_weights == config["num_hidden_layers"] * layer
    assert shape.head_weights == config["vocab_size"] * hidden
    found = limits.bounds(Limits(50e9, 1e12), shape, [1])
    assert found["W1", "out_tok_s"] > found["HTTP", "out_tok_s at 1"] > 0


def test_the_shape_of_a_gguf_file_has_the_bytes_of_its_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    checkpoint = make_checkpoint(tmp_path / "model")
    found = limits.read_shape(make_gguf(checkpoint, tmp_path / "model.gguf", "Q8_0"))
    assert found == replace(limits.read_shape(checkpoint), bytes_each=34 / 32)
