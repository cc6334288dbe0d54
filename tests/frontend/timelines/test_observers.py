"""Observers of ended requests: the log line of a slow request, and an error if spans cannot be sent."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from itertools import count

import pytest

from raylm.config import Config
from raylm.errors import ConfigError, OverloadedError
from raylm.frontend import check_observers, open_observers
from raylm.frontend.timelines import observers
from raylm.frontend.timelines.ring import Timelines
from tests.frontend.noted import noted


def ticking() -> Callable[[], float]:
    """A clock that advances by one at each read."""
    return map(float, count()).__next__


def slow(limit_s: float) -> Timelines:
    timelines = Timelines(clock=ticking())
    config = Config.model_validate({"ingress": {"slow_request_s": limit_s}})
    timelines.observers = open_observers(config, "app", "replica", str)
    assert len(timelines.observers) == 1
    return timelines


def test_a_slow_request_has_a_line_with_its_phases(caplog: pytest.LogCaptureFixture) -> None:
    timelines = slow(3.5)
    with noted(timelines, "slow-one", "", "/") as record:
        record.mark("body")
        record.mark("template")
        record.mark("tokenize")
    (line,) = caplog.records
    assert line.getMessage() == (
        "request slow-one took 4.000 s, mostly for text: admission 1.000, body 1.000, template 1.000, tokenize 1.000"
    )
    told = line.__dict__
    assert (told["event"], told["request_id"]) == ("request.slow", "slow-one")
    assert told["values"] == {
        "seconds": 4.0, "cause": "text", "phases": {"admission": 1.0, "body": 1.0, "template": 1.0, "tokenize": 1.0},
    }  # fmt: skip


def test_others_have_none(caplog: pytest.LogCaptureFixture) -> None:
    timelines = slow(1.5)
    with noted(timelines, "quick", "", "/"):
        pass
    assert caplog.records == []
    assert open_observers(Config(), "app", "replica", str) == ()


def test_a_refused_request_may_be_slow_too(caplog: pytest.LogCaptureFixture) -> None:
    timelines = slow(0.5)

    def refused() -> None:
        with noted(timelines, "refused", "", "/"):
            raise OverloadedError("full")

    with pytest.raises(OverloadedError):
        refused()
    (line,) = caplog.records
    assert "request refused took 1.000 s" in line.getMessage()


def test_without_the_package_spans_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config.model_validate({"ingress": {"otlp_endpoint": "http://localhost:4318"}})
    check_observers(Config())
    for missing in (None, ModuleNotFoundError()):

        def find(name: str, missing: object = missing) -> None:
            assert name == "opentelemetry.exporter.otlp.proto.http"
            if missing is not None:
                raise ModuleNotFoundError(name)

        monkeypatch.setattr(observers, "find_spec", find)
        with pytest.raises(ConfigError, match=r"^ingress.otlp_endpoint: .*pip install 'raylm\[otel\]'"):
            check_observers(config)
    monkeypatch.setattr(observers, "OBSERVERS", {})
    monkeypatch.setattr(observers, "find_spec", importlib.util.find_spec)
    with pytest.raises(ConfigError, match=r"raylm\.frontend\.tracing"):
        check_observers(config)
