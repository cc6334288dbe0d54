"""The board of policies on traces: finished cells are kept and skipped later, terms are removed and restored."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import rows
from benchmarks.fleet import board, board_pictures
from benchmarks.fleet.ablations import ABLATIONS, without
from raylm.engine.queues import fair
from raylm.frontend.engines import routed_engine
from raylm.simulate import LOADS, Fleet, LoadSettings, Replay, Trace, TraceLine, simulate


def lines(number: int, **fields: Any) -> list[TraceLine]:
    return [
        TraceLine(arrival=0.5 * n, prompt_tokens=300, output_tokens=4, blocks=(1, n), block_size=128, **fields)
        for n in range(number)
    ]


def written(path: Path, given: list[TraceLine]) -> Path:
    path.write_text("\n".join(line.model_dump_json(exclude_unset=True) for line in given))
    return path


def filled(monkeypatch: pytest.MonkeyPatch, trace: Path, out: Path, *words: str) -> dict[board.Cell, dict[str, float]]:
    given = [str(trace), "--costs", "gpu", "--engines", "2", "--ingresses", "2", "--requests", "6", *words]
    monkeypatch.setattr(sys, "argv", ["board", *given, "--out", str(out)])
    board.main()
    return board.kept(rows.read(out))


def test_cells_are_kept_one_by_one_and_only_missing_ones_are_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, out = written(tmp_path / "small.jsonl", lines(30)), tmp_path / "board.jsonl"
    words = ["--loads", "80", "--policies", "RayLM", "random"]
    found = filled(monkeypatch, trace, out, *words)
    assert [(cell.load, cell.policy) for cell in found] == [(0, "RayLM"), (80, "RayLM"), (80, "random")]
    full, ours, others = found.values()
    assert ours["speed"] == others["speed"]
    whole = out.read_text()
    out.write_text("".join(whole.splitlines(keepends=True)[:-2]))  # as if interrupted in the third cell
    monkeypatch.setattr(board, "capacity", lambda cell, lines: pytest.fail("it is known"))
    again = filled(monkeypatch, trace, out, *words)
    assert list(again) == list(found)
    assert list(again.values())[:2] == [full, ours]
    assert {name: value for name, value in list(again.values())[2].items() if name != "CPU"} == {
        name: value for name, value in others.items() if name != "CPU"
    }
    before = out.read_bytes()
    filled(monkeypatch, trace, out, *words)
    assert out.read_bytes() == before


def test_a_load_is_a_share_of_the_measured_capacity() -> None:
    cell = board.Cell("t", "gpu", 2, 1, 0, "RayLM", 1)
    given = lines(600)
    most = board.capacity(cell, given)
    slow, fast = (board.run(cell, given, share * 2 * most / board.rate(given)).end_s for share in (0.5, 2.0))
    assert slow == pytest.approx(600 / most, rel=0.05), "half the capacity: arrivals determine the end"
    assert fast == pytest.approx(300 / most, rel=0.25), "twice the capacity: engines determine the end"


def test_sessions_are_whole_but_for_their_later_turns() -> None:
    given = [one for name in "abc" for one in lines(30, session=name)]
    found = board.chosen(given, board.Cell("t", "gpu", 2, 1, 80, "RayLM", 25))
    assert [sum(line.session == name for line in found) for name in "abc"] == [20, 20, 10]
    second = board.chosen(given, board.Cell("t", "gpu", 1, 1, 80, "RayLM", 25, 2))
    assert [sum(line.session == name for line in second) for name in "abc"] == [0, 15, 10]
    with pytest.raises(SystemExit, match=r"t has 60 requests, and .* needs 75"):
        board.chosen(given, board.Cell("t", "gpu", 1, 1, 80, "RayLM", 25, 3))
    faster = board.faster(lines(2, session="a", think_s=3.0), 2.0)
    assert [(line.arrival, line.think_s) for line in faster] == [(0.0, 3.0), (0.25, 3.0)]
    turns = [*lines(40, session="a"), *lines(1, session="b")]
    turns[-1] = turns[-1].model_copy(update={"arrival": 4.1})
    assert board.rate(turns) == 41 / 4.1, "one session begins at 0 s, the other at 4.1 s"


@pytest.mark.parametrize("name", [name for names in ABLATIONS.values() for name in names])
def test_a_term_is_taken_out_for_a_while(name: str) -> None:
    before = {owner: dict(vars(owner)) for owner in (routed_engine, routed_engine.RoutedEngine, fair, fair.FairQueue)}
    fleet = Fleet.of({"engines": [{"count": 3, "num_blocks": 2000}], "ingresses": 2, "staleness_s": 0.1}, "test")
    with without(name) as queue:
        load = LOADS["bursts"](LoadSettings(requests=32, rate=20, output_tokens=(2, 9), keys=2))
        served = simulate(fleet, load, 1, queue=queue).served
    assert sum(not one.error for one in served) == 32
    assert {owner: dict(vars(owner)) for owner in before} == before


def test_without_a_term_choices_differ() -> None:
    """Loads in which one term each changes the choices."""
    shared = [
        TraceLine(arrival=0.02 * n, prompt_tokens=2100, output_tokens=30, blocks=(n // 6,), block_size=2048)
        for n in range(120)
    ]

    def engines(name: str) -> list[str]:
        fleet = Fleet.of({"engines": [{"count": 3}], "ingresses": 2, "staleness_s": 0.2}, "test")
        with without(name):
            return [one.engine for one in simulate(fleet, Replay(Trace(shared, 16)), 1).served]

    usual = engines("no look ahead")  # a term of the queue, which needs no key in this load
    for name in ("no expected blocks", "no delay of the next", "no distance", "no rendezvous"):
        assert engines(name) != usual, name


def test_pictures_and_the_ratio_to_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    units = {"mean": "ms", "p99": "ms", "ITL p99": "ms", "good": "%", "hit rate": "%", "CPU": "s"}
    file = tmp_path / "board.jsonl"
    for policy, mean in {"RayLM": 10.0, "random": 30.0, "SMG": 8.0, "first come, first served": 11.0}.items():
        for part in (1, 2):
            figures = {"mean": mean * part, "p99": 20.0, "ITL p99": 5.0, "good": 90.0, "hit rate": 50.0, "CPU": 1.0}
            rows.append(file, "board", board.Cell("t", "gpu", 4, 4, 80, policy, 3, part).case, figures, units)
    figures |= {"mean": 1.0}
    rows.append(file, "board", board.Cell("t", "gpu", 4, 4, 80, "llm-d", 3).case, figures, units)  # in one part only
    monkeypatch.setattr(sys, "argv", ["pictures", str(file), "--to", str(tmp_path)])
    board_pictures.main()
    assert "| t | gpu | 4 | 4 | 80 | 12 | 1.25 | 1.00 | 1.00 | +0.0 | SMG |" in capsys.readouterr().out
    for name in ("policies", "goodput", "terms"):
        assert (tmp_path / f"board_{name}.svg").stat().st_size > 1000
