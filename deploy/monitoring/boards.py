"""Prometheus rules and Grafana dashboards, made of the table in raylm/metrics.py.

    python -m deploy.monitoring.boards          # writes rules.yaml and the dashboards beside this file

A query names a Metric and labels that it has, else this ends with an error; so no query asks for a series that is not
there. ``$model`` and ``$__rate_interval`` are Grafana's variables.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from grafana_foundation_sdk.builders import common, prometheus, timeseries
from grafana_foundation_sdk.builders.dashboard import (
    Dashboard,
    DashboardLink,
    DatasourceVariable,
    QueryVariable,
    Row,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as values
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    VariableRefresh,
)

from raylm import metrics
from raylm.metrics import Metric

FOLDER = Path(__file__).parent
MADE = "# Made by `python -m deploy.monitoring.boards` (make boards); change that file."
PARTS = {"gauge": ("",), "counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
OF_PROCESSES = {  # prometheus_client's, of each ingress replica
    "cpu": Metric("counter", "process_cpu_seconds", "CPU seconds."),
    "memory": Metric("gauge", "process_resident_memory_bytes", "Memory."),
}
_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_WIDTH, _HEIGHT = 12, 8  # of a panel; a board is 24 wide
_IN_ALERTS, _IN_BOARDS = "", 'model_name=~"$model"'


# ---------------------------------------------------------------- PromQL


def select(metric: Metric, *matchers: str, part: str = "", among: str = _IN_BOARDS) -> str:
    """The series of a metric; ``part`` is how its name ends, ``among`` what holds for all queries of a place."""
    part = part or PARTS[metric.kind][0]
    if part not in PARTS[metric.kind]:
        raise ValueError(f"{metric.name}: a {metric.kind} has no {part}")
    for matcher in matchers:
        _check(metric, [matcher.partition("=")[0].rstrip("!")])
    own = [among] if among and not metric.name.startswith("process_") else []
    inner = ", ".join([*own, *matchers])
    return f"{metric.name}{part}{{{inner}}}" if inner else f"{metric.name}{part}"


def _check(metric: Metric, labels: Iterable[str]) -> None:
    known = {"model_name", *metric.labels}
    if metric.kind == "gauge" and "engine" not in known:
        known.add("replica")
    if metric.name.startswith("process_"):
        known = {"replica"}
    if unknown := set(labels) - known - {"le"}:
        raise ValueError(f"{metric.name} has no label {', '.join(sorted(unknown))}")


def over(function: str, metric: Metric, expression: str, by: Iterable[str]) -> str:
    """An aggregation that keeps some labels."""
    _check(metric, by)
    kept = f" by ({', '.join(by)})" if by else ""
    return f"{function}{kept} ({expression})"


def per_second(
    metric: Metric, *matchers: str, by: tuple[str, ...] = (), part: str = "", among: str = _IN_BOARDS,
    window: str = "$__rate_interval",
) -> str:  # fmt: skip
    """The rate of a counter, or of a part of a histogram, summed."""
    return over("sum", metric, f"rate({select(metric, *matchers, part=part, among=among)}[{window}])", by)


def quantile(q: float, metric: Metric, by: tuple[str, ...] = ()) -> str:
    return f"histogram_quantile({q}, {per_second(metric, part='_bucket', by=(*by, 'le'))})"


def mean(metric: Metric, by: tuple[str, ...] = ()) -> str:
    return f"{per_second(metric, part='_sum', by=by)} / {per_second(metric, part='_count', by=by)}"


def restarts(metric: Metric, label: str, window: str = "15m") -> str:
    """How many more owners of a gauge there were in a time than there were at once."""
    by_owner = ("model_name", label)
    ever = over("count", metric, f"last_over_time({select(metric, among=_IN_ALERTS)}[{window}])", by_owner)
    now = over("count", metric, select(metric, among=_IN_ALERTS), by_owner)
    at_once = f"max_over_time(count by (model_name) ({now})[{window}:30s])"
    return f"count by (model_name) ({ever}) - {at_once}"


# ---------------------------------------------------------------- boards


@dataclass(frozen=True)
class Panel:
    """A graph; ``queries`` are pairs of PromQL and the name of each line, ``unit`` is Grafana's."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    about: str = ""
    most: float | None = None
    stacked: bool = False


def _percentiles(title: str, metric: Metric, by: tuple[str, ...] = ()) -> Panel:
    lines = tuple((quantile(q, metric, by), f"p{100 * q:g}") for q in (0.5, 0.95, 0.99))
    return Panel(title, "s", lines, metric.help)


def _rates(
    title: str, lines: dict[str, Metric], unit: str = "short", by: tuple[str, ...] = (), about: str = ""
) -> Panel:
    legend = "".join(f" {{{{{label}}}}}" for label in by)
    return Panel(
        title, unit, tuple((per_second(metric, by=by), name + legend) for name, metric in lines.items()), about
    )


def _by_engine(title: str, unit: str, metric: Metric, *, most: float | None = None, stacked: bool = False) -> Panel:
    query = over("max", metric, select(metric), ("engine",))
    return Panel(title, unit, ((query, "{{engine}}"),), metric.help, most, stacked)


def _hit_rate(by: tuple[str, ...] = ()) -> str:
    return f"{per_second(metrics.PREFIX_HITS, by=by)} / {per_second(metrics.PREFIX_QUERIES, by=by)}"


_TOKENS = {"generated": metrics.GENERATION_TOKENS, "prompt": metrics.PROMPT_TOKENS}

OVERVIEW = {
    "What clients see": (
        _rates("Tokens per second", _TOKENS),
        Panel(
            "Ended sequences per second", "reqps",
            ((per_second(metrics.SUCCESS, by=("finished_reason",)), "{{finished_reason}}"),), stacked=True,
        ),
        _percentiles("Time to first token", metrics.TTFT),
        _percentiles("Time between tokens", metrics.ITL),
        _percentiles("Whole answers", metrics.E2E),
        Panel(
            "HTTP answers per second, by status", "reqps",
            ((per_second(metrics.HTTP_ANSWERS, by=("status",)), "{{status}}"),), stacked=True,
        ),
    ),
    "What limits them": (
        Panel("Queue: sequences without a token yet", "short", (
            (over("sum", metrics.QUEUED_REQUESTS, select(metrics.QUEUED_REQUESTS), ("replica",)), "{{replica}}"),
            (over("min", metrics.QUEUED_REQUESTS_LIMIT, select(metrics.QUEUED_REQUESTS_LIMIT), ()), "limit of each"),
        ), "Beyond the limit requests get 429."),
        Panel("Queue: prompt tokens", "short", (
            (over("sum", metrics.QUEUED_TOKENS, select(metrics.QUEUED_TOKENS), ("replica",)), "{{replica}}"),
            (over("min", metrics.QUEUED_TOKENS_LIMIT, select(metrics.QUEUED_TOKENS_LIMIT), ()), "limit of each"),
        ), "Beyond the limit requests get 429."),
        Panel("Engines", "short", (
            (over("min", metrics.ENGINES, select(metrics.ENGINES), ()), "ready"),
            (over("max", metrics.ENGINES_WANTED, select(metrics.ENGINES_WANTED), ()), "asked for, at least"),
        ), "Ready: as the ingress replica with the fewest sees it."),
        _by_engine("KV blocks held by sequences", "percentunit", metrics.KV_USAGE, most=1),
        Panel("Prompt tokens found in the prefix cache", "percentunit", ((_hit_rate(), "share"),), most=1),
        _rates("Preemptions per second", {"preemptions": metrics.PREEMPTIONS}, about=metrics.PREEMPTIONS.help),
    ),
    "Ingress replicas": (
        Panel("CPU", "short", (
            (per_second(OF_PROCESSES["cpu"], by=("replica",)), "{{replica}}"),
        ), "Cores that each process uses; one is all that its event loop can have."),
        Panel("Memory", "bytes", (
            (over("max", OF_PROCESSES["memory"], select(OF_PROCESSES["memory"]), ("replica",)), "{{replica}}"),
        )),
    ),
}  # fmt: skip

ENGINES = {
    "Load": (
        _by_engine("Running sequences", "short", metrics.RUNNING, stacked=True),
        _by_engine("Waiting sequences", "short", metrics.WAITING, stacked=True),
        _by_engine("KV blocks held by sequences", "percentunit", metrics.KV_USAGE, most=1),
        _rates("Preemptions per second", {"": metrics.PREEMPTIONS}, by=("engine",), about=metrics.PREEMPTIONS.help),
    ),
    "Work": (
        _rates("Generated tokens per second", {"": metrics.GENERATION_TOKENS}, by=("engine",)),
        _rates("Prompt tokens per second", {"": metrics.PROMPT_TOKENS}, by=("engine",), about="Cached ones too."),
        Panel("Steps per second", "short", (
            (per_second(metrics.STEP_TOKENS, part="_count", by=("engine",)), "{{engine}}"),
        )),
        Panel("Tokens in a step", "short", (
            (mean(metrics.STEP_TOKENS, by=("engine",)), "mean {{engine}}"),
            (quantile(0.99, metrics.STEP_TOKENS, by=("engine",)), "p99 {{engine}}"),
        ), metrics.STEP_TOKENS.help),
    ),
    "What is saved": (
        Panel("Prompt tokens found in the prefix cache", "percentunit", (
            (_hit_rate(("engine",)), "{{engine}}"),
        ), most=1),
        _rates("Draft tokens per second", {
            "verified": metrics.DRAFTED_TOKENS, "accepted": metrics.ACCEPTED_TOKENS,
        }, by=("engine",), about="Of speculation (scheduler.speculative_tokens); 0 without."),
    ),
}  # fmt: skip

_KEY = ("key",)
TENANTS = {
    "Keys by name; one without a name is: no key was needed": (
        Panel("HTTP answers per second", "reqps", (
            (per_second(metrics.HTTP_ANSWERS, by=_KEY), "{{key}}"),
        ), stacked=True),
        Panel("Refused per second (429)", "reqps", (
            (per_second(metrics.HTTP_ANSWERS, 'status="429"', by=_KEY), "{{key}}"),
        ), "By the key's limits, its share of the queue, or a full replica."),
        Panel("Generated tokens per second", "short", (
            (per_second(metrics.KEY_TOKENS, 'kind="generation"', by=_KEY), "{{key}}"),
        ), "Of requests that have ended.", stacked=True),
        Panel("Prompt tokens per second", "short", (
            (per_second(metrics.KEY_TOKENS, 'kind="prompt"', by=_KEY), "{{key}}"),
        ), "Of requests that have ended, cached ones too.", stacked=True),
        Panel("Time to first token, mean", "s", (
            (f"{per_second(metrics.KEY_TTFT, by=_KEY)} / {per_second(metrics.KEY_REQUESTS, by=_KEY)}", "{{key}}"),
        ), "Of requests that have ended."),
        Panel("Share of generated tokens", "percentunit", (
            (f"""{per_second(metrics.KEY_TOKENS, 'kind="generation"', by=_KEY)} / on () group_left () """
             f"""{per_second(metrics.KEY_TOKENS, 'kind="generation"')}""", "{{key}}"),
        ), "Beside the keys' weights.", most=1, stacked=True),
    ),
}  # fmt: skip

BOARDS = {"overview": OVERVIEW, "engines": ENGINES, "tenants": TENANTS}


def _graph(panel: Panel, number: int) -> timeseries.Panel:
    graph = (
        timeseries.Panel().id(number).title(panel.title).description(panel.about).datasource(_SOURCE)
        .span(_WIDTH).height(_HEIGHT).unit(panel.unit).min(0).fill_opacity(20 if panel.stacked else 0)
        .show_points(values.VisibilityMode.NEVER)
        .tooltip(common.VizTooltipOptions().mode(values.TooltipDisplayMode.MULTI))
        .legend(common.VizLegendOptions().display_mode(values.LegendDisplayMode.LIST).show_legend(True)
                .placement(values.LegendPlacement.BOTTOM).calcs([]))
    )  # fmt: skip
    if panel.most is not None:
        graph = graph.max(panel.most)
    if panel.stacked:
        graph = graph.stacking(common.StackingConfig().mode(values.StackingMode.NORMAL).group("A"))
    for place, (query, name) in enumerate(panel.queries):
        graph = graph.with_target(
            prometheus.Dataquery().ref_id("ABCDEF"[place]).expr(query).legend_format(name.strip()).range()
        )
    return graph


def dashboard(name: str) -> dict[str, Any]:
    """A board as Grafana imports it."""
    built = (
        Dashboard(f"RayLM {name}").uid(f"raylm-{name}").tags(["raylm"]).refresh("10s").time("now-1h", "now")
        .timezone("browser").tooltip(DashboardCursorSync.CROSSHAIR)
        .link(DashboardLink("RayLM").type(DashboardLinkType.DASHBOARDS).tags(["raylm"]).keep_time(True)
              .include_vars(True))
        .with_variable(DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(
            QueryVariable("model").label("Model").datasource(_SOURCE).refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .query(f"label_values({metrics.BUILD.name}_info, model_name)").multi(True).include_all(True)
            .all_value(".*")
        )
    )  # fmt: skip
    number = 0
    for title, panels in BOARDS[name].items():
        number += 1
        built = built.with_row(Row(title).id(number))
        for panel in panels:
            number += 1
            built = built.with_panel(_graph(panel, number))
    found: dict[str, Any] = json.loads(json.dumps(built.build(), cls=JSONEncoder))
    return found


# ---------------------------------------------------------------- alerts


@dataclass(frozen=True)
class Alert:
    """``expr`` must hold for ``wait``; ``says`` is Prometheus's template."""

    name: str
    expr: str
    wait: str
    severity: str
    says: str
    cure: str


def _of(metric: Metric, function: str = "max", by: tuple[str, ...] = ("model_name",)) -> str:
    return over(function, metric, select(metric, among=_IN_ALERTS), by)


def _full(queued: Metric, limit: Metric) -> str:
    return f"{select(queued, among=_IN_ALERTS)} / {select(limit, among=_IN_ALERTS)} > 0.9"


def _answers(*matchers: str) -> str:
    return per_second(metrics.HTTP_ANSWERS, *matchers, by=("model_name",), among=_IN_ALERTS, window="5m")


ALERTS = (
    Alert(
        "RayLMAway", 'up{job="raylm"} == 0', "1m", "critical", "{{ $labels.instance }} does not answer Prometheus.",
        "Is the server there, and may Prometheus read /metrics (a key)?",
    ),
    Alert(
        "RayLMNoEngine", f"{_of(metrics.ENGINES)} == 0 and {_of(metrics.ENGINES_WANTED)} > 0", "1m", "critical",
        "{{ $labels.model_name }} has no engine: nothing is answered.",
        "Look at the lines `engine` and `lost` of the server, and at /console.",
    ),
    Alert(
        "RayLMEngineAway", f"{_of(metrics.ENGINES, 'min')} < {_of(metrics.ENGINES_WANTED)}", "2m", "warning",
        "{{ $labels.model_name }} has {{ $value }} engines, fewer than the configuration asks for.",
        "Is there room for another one (GPUs, memory), and does it start?",
    ),
    Alert(
        "RayLMRestartLoop",
        f"{restarts(metrics.KV_USAGE, 'engine')} >= 3 or {restarts(metrics.QUEUED_REQUESTS, 'replica')} >= 3",
        "0m", "critical", "{{ $labels.model_name }}: {{ $value }} engines or ingress replicas were lost in 15 minutes.",
        "The lines `lost` of the server say of what they die.",
    ),
    Alert(
        "RayLMQueueFull",
        over("max", metrics.QUEUED_REQUESTS,
             f"{_full(metrics.QUEUED_REQUESTS, metrics.QUEUED_REQUESTS_LIMIT)} or "
             f"{_full(metrics.QUEUED_TOKENS, metrics.QUEUED_TOKENS_LIMIT)}", ("model_name", "replica")),
        "1m", "warning", "{{ $labels.model_name }}: {{ $value | humanizePercentage }} of a replica's queue are taken.",
        "More engines; until then requests get 429.",
    ),
    Alert(
        "RayLMKVFull",
        over("max", metrics.KV_USAGE, f"avg_over_time({select(metrics.KV_USAGE, among=_IN_ALERTS)}[5m])",
             ("model_name", "engine")) + " > 0.95",
        "5m", "warning", "{{ $labels.engine }}: {{ $value | humanizePercentage }} of the KV blocks are held.",
        "Sequences wait or are preempted: more blocks, more engines, or fewer at once (scheduler.max_num_seqs).",
    ),
    Alert(
        "RayLMServerErrors", f"""{_answers('status=~"5.."')} / {_answers()} > 0.05""", "5m", "critical",
        "{{ $labels.model_name }}: {{ $value | humanizePercentage }} of all answers are 5xx.",
        "`GET /v1/requests` and the server's lines say which and why.",
    ),
)  # fmt: skip


def rules() -> dict[str, Any]:
    """The rules file of Prometheus."""
    return {"groups": [{"name": "raylm", "rules": [
        {"alert": alert.name, "expr": alert.expr, "for": alert.wait, "labels": {"severity": alert.severity},
         "annotations": {"summary": alert.says, "description": alert.cure}}
        for alert in ALERTS
    ]}]}  # fmt: skip


def files() -> dict[str, str]:
    """What stands in this folder, by name."""
    made = {"rules.yaml": f"{MADE}\n{yaml.safe_dump(rules(), sort_keys=False, width=1000)}"}
    return made | {f"{name}.json": json.dumps(dashboard(name), indent=1, sort_keys=True) + "\n" for name in BOARDS}


def main() -> None:
    for name, text in files().items():
        (FOLDER / name).write_text(text)
        print(f"{name}: {len(text):,} bytes")


if __name__ == "__main__":
    main()
