"""A served model with JSON log lines, and spans sent to a collector: two ingresses, HAProxy, an orderly shutdown."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving import Server, chat, free_port, serve_file

pytestmark = [pytest.mark.ray, pytest.mark.long]

PLANTED = "planted-prompt"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_every_line_is_json_without_prompts_and_the_last_spans_arrive(tmp_path: Path) -> None:
    from tests.frontend.tracing.collector import Collector, values

    port = free_port()
    with Collector().running() as collector:
        ingress = {"replicas": 2, "slow_request_s": 0, "access_log": True, "otlp_endpoint": collector.url}
        path = serve_file(tmp_path / "serve.yaml", port, {"log_format": "json", "ingress": ingress})
        with Server(path, port, ready='"stage.ready"') as server:
            headers = {"x-request-id": "asked-first", "traceparent": f"00-{TRACE}-{PARENT}-01"}
            first = httpx.post(
                f"{server.url}/v1/chat/completions", json=chat(PLANTED, max_tokens=8), headers=headers, timeout=300
            )
            assert first.status_code == 200
            wrong = httpx.post(f"{server.url}/v1/chat/completions", json=chat(PLANTED, max_tokens=-8), timeout=300)
            assert wrong.status_code == 400
            last = httpx.post(f"{server.url}/v1/chat/completions", json=chat(PLANTED, max_tokens=4), timeout=300)
            assert last.status_code == 200
            server.wait_until(lambda: '"request.slow"' in server.log.read_text(), "tells of no slow request")
            assert server.stop(signal.SIGINT) == 0
            written = server.log.read_text()
        roots = sorted(collector.roots, key=lambda span: span.start_time_unix_nano)
    assert PLANTED not in written
    lines: list[dict[str, Any]] = [json.loads(line) for line in written.splitlines() if line.strip()]
    assert {"launcher", "ingress", "engine"} <= {line["process"] for line in lines}
    assert {"stage.config", "stage.kv", "stage.ready", "stage.access", "request.slow", "stage.stopped"} <= {
        line["event"] for line in lines
    }
    (slow,) = [line for line in lines if line["event"] == "request.slow" and line["request_id"] == "asked-first"]
    assert slow["application"] == "default"
    assert {"prefill", "decode"} <= slow["phases"].keys()
    assert [values(root.attributes)["http.response.status_code"] for root in roots] == [200, 400, 200]
    assert (roots[0].trace_id.hex(), roots[0].parent_span_id.hex()) == (TRACE, PARENT)
    assert {"prefill", "decode"} <= {span.name for span in collector.children(roots[-1])}
