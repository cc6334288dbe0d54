"""Log lines of all processes, as text or JSON, and the stage lines that `raylm serve` shows at start."""

from __future__ import annotations

import json
import logging
import re
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["stage", "error"]
Format = Literal["text", "json"]

_LOGGER = "raylm"  # parent of all loggers of the package
_LINE = re.compile(r"\[raylm (stage|error)\] (\S+)\s+(.*)")
_JSON_BEGINS = '{"ts": '


@dataclass(frozen=True, slots=True)
class LogSource:
    """The origin of a line: the kind of process, and its application and engine, if any."""

    process: str
    application: str = ""
    engine: str = ""


def about(event: str, request_id: str = "", **values: object) -> dict[str, object]:
    """The ``extra`` argument of a logger call: the event, the id of the request, and additional JSON fields."""
    return {"event": event, "request_id": request_id, "values": values}


class LineFormatter(logging.Formatter):
    """Formats a line with ts (UTC), level, process, application, engine, request_id, event and message.

    The traceback of a request's error omits the exception messages, because they may contain part of a prompt.
    """

    def __init__(self, kind: Format, source: LogSource, request_id: Callable[[], str] = str) -> None:
        """``request_id`` returns the id of the current request, for logger calls that do not give one."""
        super().__init__()
        self.is_json = kind == "json"
        self._source = source
        self._request_id = request_id

    def format(self, record: logging.LogRecord) -> str:
        """Format a record; fields from ``about`` are included."""
        given = record.__dict__
        milliseconds = int(record.created * 1000)
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(milliseconds // 1000))
        fields: dict[str, Any] = {
            "ts": f"{at}.{milliseconds % 1000:03}Z",
            "level": record.levelname,
            "process": self._source.process,
            "application": self._source.application,
            "engine": self._source.engine,
            "request_id": given.get("request_id") or self._request_id(),
            "event": given.get("event") or record.name.removeprefix(f"{_LOGGER}."),
            "message": " ".join(record.getMessage().split()),
        }
        error = record.exc_info[1] if record.exc_info else None
        told = "" if error is None else _traceback(error, with_messages=not fields["request_id"])
        if self.is_json:
            return json.dumps(fields | given.get("values", {}) | ({"traceback": told} if told else {}), default=str)
        who = "/".join(filter(None, (fields["process"], fields["application"], fields["engine"])))
        request = f" request={fields['request_id']}" if fields["request_id"] else ""
        line = f"{fields['ts']} {fields['level']} {who} {fields['event']}{request}: {fields['message']}"
        return f"{line}\n{told}" if told else line


def _traceback(error: BaseException, *, with_messages: bool) -> str:
    if with_messages:
        return "".join(traceback.format_exception(error)).rstrip()
    found: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        found = [*traceback.format_tb(cause.__traceback__), f"{type(cause).__qualname__}\n", *found]
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return "".join(found).rstrip()


class _Lines(logging.Handler):
    """Writes to this process's stdout. Ray forwards it to the driver with a prefix."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), flush=True)
        except Exception:  # like the handlers of logging
            self.handleError(record)


def configure_logs(kind: Format, source: LogSource, request_id: Callable[[], str] = str) -> None:
    """Set up the loggers of this process. An actor calls it when it starts."""
    logger = logging.getLogger(_LOGGER)
    for handler in [handler for handler in logger.handlers if isinstance(handler, _Lines)]:
        logger.removeHandler(handler)
    lines = _Lines()
    lines.setFormatter(LineFormatter(kind, source, request_id))
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def report(kind: Kind, stage: str, text: str, request_id: str = "") -> None:
    """Write one line for the terminal: a decision of an actor at start, or the reason why it cannot start."""
    text = " ".join(text.split())
    for handler in logging.getLogger(_LOGGER).handlers:
        if isinstance(handler.formatter, LineFormatter) and handler.formatter.is_json:
            level = logging.ERROR if kind == "error" else logging.INFO
            names = {"name": _LOGGER, "levelno": level, "levelname": logging.getLevelName(level)}
            handler.handle(logging.makeLogRecord(names | {"msg": text} | about(f"{kind}.{stage}", request_id)))
            return
    with suppress(OSError):  # on a full disk the line is lost, and the process goes on
        print(f"[raylm {kind}] {stage:8} {text}", flush=True)


def parse(line: str) -> tuple[Kind, str, str] | None:
    """(kind, stage, text) if ``line`` contains a line that ``report`` wrote, else None. A prefix is allowed."""
    if (fields := parse_json(line)) is not None:
        kind, _, stage = str(fields["event"]).partition(".")
        return (kind, stage, str(fields["message"])) if kind in ("stage", "error") and stage else None  # type: ignore[return-value]
    found = _LINE.search(line)
    return (found[1], found[2], found[3]) if found else None  # type: ignore[return-value]


def parse_json(line: str) -> dict[str, Any] | None:
    """The fields if ``line`` contains a JSON line of LineFormatter, else None. A prefix is allowed."""
    at = line.find(_JSON_BEGINS)
    if at < 0:
        return None
    try:
        found = json.loads(line[at:])
    except ValueError:
        return None
    return found if isinstance(found, dict) and "event" in found and "message" in found else None
