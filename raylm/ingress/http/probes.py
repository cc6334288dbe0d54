"""The paths of probes, and the answer to one. HAProxy, Serve's proxies and the app have the same."""

from __future__ import annotations

PROBES = frozenset({"/health", "/ready", "/ping"})
READY = {"status": "ok"}
