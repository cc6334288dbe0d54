"""deploy/monitoring: files match boards.py and query only series in /metrics; promtool tests the alerts."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.monitoring import boards
from raylm import metrics
from raylm.config import Config
from raylm.frontend.state.series import merge
from raylm.frontend.telemetry import Telemetry
from raylm.frontend.timelines.record import Part, Record
from raylm.ingress.http.ops import HTTPMetrics
from raylm.messages import Counters, EngineStats
from tests.ingress.fake_llm import FakeAsyncLLM

FOLDER = Path(__file__).parents[1] / "deploy" / "monitoring"
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="there is no promtool: install the package prometheus")
_PROMETHEUS_OWN = {"up": {"job", "instance"}}
_SELECTOR = re.compile(r"(?<![\w:$\"])([a-zA-Z_][\w]*:[\w]+|process_\w+|up)\b(?:\{([^}]*)\})?")
_KEPT = re.compile(r"\bby \(([^)]*)\)")


def queries() -> list[tuple[str, str]]:
    """(place, PromQL) of every query in the files, with the same syntax as Grafana and Prometheus use."""
    found = []
    for path in sorted(FOLDER.glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            found += [(f"{path.stem}: {panel['title']}", target["expr"]) for target in panel.get("targets", ())]
    for group in yaml.safe_load((FOLDER / "rules.yaml").read_text())["groups"]:
        found += [(rule["alert"], rule["expr"]) for rule in group["rules"]]
    return found


def expanded(query: str, window: str = "1m", model: str = ".*") -> str:
    """A query without Grafana's variables."""
    return query.replace("$__rate_interval", window).replace("$model", model)


def reported_labels() -> dict[str, set[str]]:
    """The labels of each series that a server with two replicas reports, by the full name of the series."""
    record, part = Record("r", "alice", "/v1/completions", lambda: 1.0), Part("r", lambda: 1.0)
    part.prompt_tokens, part.drawn, part.first_token = 7, [[1, 2]], 1.5
    record.parts.append(part)
    told = {}
    for replica in ("a", "b"):
        telemetry = Telemetry("m", lambda: {"e.0": EngineStats(counters=Counters())})
        telemetry.ended(record)
        http = HTTPMetrics(FakeAsyncLLM(), Config())  # type: ignore[arg-type]
        http.answers[200, "alice"] += 1
        told[replica] = (*telemetry.collect(), *http.collect())
    found: dict[str, set[str]] = {}
    for family in merge(told["a"], "a", told, []).collect():
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def promtool(*words: str, cwd: Path) -> None:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *words], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_files_are_what_the_table_makes() -> None:
    made = boards.files()
    assert {path.name for path in FOLDER.iterdir() if path.suffix in (".json", ".yaml")} == {*made, "prometheus.yaml"}
    stale = [name for name, text in made.items() if (FOLDER / name).read_text() != text]
    assert stale == [], "run `make boards` to generate them again"


@pytest.mark.parametrize(("where", "query"), queries(), ids=lambda value: value)
def test_a_query_asks_for_series_and_labels_that_are_there(where: str, query: str) -> None:
    known = reported_labels() | _PROMETHEUS_OWN
    named = _SELECTOR.findall(expanded(query))
    assert named
    for name, inner in named:
        assert name in known, f"{where} asks for {name}"
        used = {matcher.partition("=")[0].strip(" !") for matcher in inner.split(",") if matcher}
        assert used <= known[name], f"{where}: {name} has no label {used - known[name]}"
    kept = {label.strip() for inner in _KEPT.findall(query) for label in inner.split(",")} - {""}
    assert kept <= set().union(*(known[name] for name, _ in named)), where


OF_VLLMS_DASHBOARDS = {
    f"vllm:request_{name}"
    for name in (
        "prompt_tokens", "generation_tokens", "max_num_generation_tokens", "params_n", "params_max_tokens",
        "queue_time_seconds", "prefill_time_seconds", "decode_time_seconds", "inference_time_seconds",
        "time_per_output_token_seconds",
    )
}  # fmt: skip


def test_every_metric_is_shown_somewhere() -> None:
    shown = "\n".join(query for _, query in queries())
    unseen = [m.name for m in vars(metrics).values() if isinstance(m, metrics.Metric) and m.name not in shown]
    assert metrics.BUILD.name in unseen  # the dashboards' list of models uses it
    assert set(unseen) - {metrics.BUILD.name, metrics.CACHE_CONFIG.name} <= OF_VLLMS_DASHBOARDS
    assert {m.name for m in vars(metrics).values() if isinstance(m, metrics.Metric)} >= OF_VLLMS_DASHBOARDS


def test_what_a_metric_lacks_cannot_be_asked_for() -> None:
    with pytest.raises(ValueError, match="raylm:http_answers has no label engine"):
        boards.per_second(metrics.HTTP_ANSWERS, by=("engine",))
    with pytest.raises(ValueError, match="has no label kind"):
        boards.select(metrics.HTTP_ANSWERS, 'kind="prompt"')
    with pytest.raises(ValueError, match="a gauge has no _bucket"):
        boards.select(metrics.RUNNING, part="_bucket")


@pytest.mark.parametrize("name", boards.BOARDS)
def test_a_board_fills_its_rows(name: str) -> None:
    panels: list[dict[str, Any]] = json.loads((FOLDER / f"{name}.json").read_text())["panels"]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)
    assert len({panel["id"] for panel in panels}) == len(panels)


@needs_promtool
def test_promtool_takes_rules_and_scrape_configuration() -> None:
    promtool("check", "rules", "rules.yaml", cwd=FOLDER)
    promtool("check", "config", "prometheus.yaml", cwd=FOLDER)


@needs_promtool
def test_promtool_reads_every_query(tmp_path: Path) -> None:
    rules = [{"record": f"query:{place}", "expr": expanded(query)} for place, (_, query) in enumerate(queries())]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "boards", "rules": rules}]}))
    promtool("check", "rules", "rules.yaml", cwd=tmp_path)


@needs_promtool
def test_alerts_are_raised_by_what_they_are_named_after(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "rules.yaml", tmp_path)
    shutil.copy(Path(__file__).parent / "data" / "alerts.yaml", tmp_path)
    promtool("test", "rules", "alerts.yaml", cwd=tmp_path)
