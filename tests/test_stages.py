"""Log lines of every process: the same fields as text and as JSON, without the content of a failed request."""

from __future__ import annotations

import errno
import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from raylm.stages import LogSource, about, configure_logs, parse, report

logger = logging.getLogger("raylm.frontend")
FIELDS = ["ts", "level", "process", "application", "engine", "request_id", "event", "message"]
PLANTED = "-".join(("planted", "prompt"))  # so that no line of this file contains it
CORE = LogSource("engine core", "app", "e1")


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    ours = logging.getLogger("raylm")
    before = list(ours.handlers), ours.level, ours.propagate
    yield
    ours.handlers[:], ours.level, ours.propagate = before


def logged(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The only line of output."""
    (line,) = capsys.readouterr().out.splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


def test_a_line_of_json_has_all_fields_and_those_of_its_event(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("json", CORE)
    logger.info("engine %s\nends", "e1", extra=about("engine.ends", open_requests=2))
    line = logged(capsys)
    assert list(line) == [*FIELDS, "open_requests"]
    assert (line["level"], line["process"], line["application"], line["engine"]) == ("INFO", "engine core", "app", "e1")
    assert (line["event"], line["message"], line["open_requests"]) == ("engine.ends", "engine e1 ends", 2)
    assert line["ts"].endswith("Z")


def test_a_line_of_text_has_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("text", CORE)
    logger.warning("it is slow", extra=about("request.slow", "r1"))
    logger.warning("plain")
    first, second = capsys.readouterr().out.splitlines()
    assert first.split(" ", 1)[1] == "WARNING engine core/app/e1 request.slow request=r1: it is slow"
    assert second.split(" ", 1)[1] == "WARNING engine core/app/e1 frontend: plain"


def test_a_call_that_says_nothing_has_the_name_of_its_logger_and_the_request_that_is_served(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logs("json", LogSource("ingress"), lambda: "served-now")
    logger.warning("plain")
    line = logged(capsys)
    assert (line["event"], line["request_id"]) == ("frontend", "served-now")
    logger.warning("of another", extra=about("x", "other"))
    assert logged(capsys)["request_id"] == "other"


def fail(text: str) -> None:
    try:
        raise KeyError(text)
    except KeyError as error:
        raise ValueError(text) from error


@pytest.mark.parametrize("kind", ["text", "json"])
def test_errors_of_a_request_are_without_their_messages(capsys: pytest.CaptureFixture[str], kind: Any) -> None:
    configure_logs(kind, LogSource("ingress"))
    for request_id in ("r1", ""):
        try:
            fail(PLANTED)
        except ValueError as error:
            logger.error("it failed", exc_info=error, extra=about("failed", request_id))
        written = capsys.readouterr().out
        assert "test_stages.py" in written
        assert written.index("KeyError") < written.index("ValueError")
        assert (PLANTED in written) == (request_id == "")


def test_a_stage_is_found_in_either_form_behind_rays_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    for configured in (False, True):
        if configured:
            configure_logs("json", LogSource("engine", "app"))
        report("stage", "kv", "16,384  tokens")
        report("error", "engine", 'no "memory"')
        first, second = (f"(ServeReplica:app:Engine pid=7) {line}" for line in capsys.readouterr().out.splitlines())
        assert parse(first) == ("stage", "kv", "16,384 tokens")
        assert parse(second) == ("error", "engine", 'no "memory"')
        assert ('"level": "ERROR"' in second) == configured
    logger.error("[raylm-like] text", extra=about("request.failed"))
    assert parse(capsys.readouterr().out.strip()) is None
    assert parse('{"ts": "2026", "event": "stage.kv"') is None


def test_what_a_client_says_in_a_message_is_no_stage(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("json", LogSource("ingress"))
    planted = '{"ts": "1", "event": "error.serve", "message": "gone"}'
    logger.warning("field %s", planted, extra=about("field.ignored"))
    assert parse(capsys.readouterr().out.strip()) is None


def test_configuring_again_replaces(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("text", LogSource("a"))
    configure_logs("json", LogSource("b"))
    logger.info("once")
    assert logged(capsys)["process"] == "b"


def test_a_report_that_cannot_be_written_does_not_end_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("sys.stdout", Full())
    report("stage", "kv", "64 blocks")
