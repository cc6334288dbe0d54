"""What RayLM changes in the HAProxy that Serve starts; Serve itself has no settings for it."""

from __future__ import annotations

import os
from typing import Any

import orjson

from raylm import ray_private
from raylm.errors import EngineUnavailableError
from raylm.ingress.http.errors import envelope
from raylm.ingress.http.haproxy_start import (
    connections_per_address,
    explain_start,
    is_free,
    max_connections,
    own_directories,
)
from raylm.ingress.http.middleware import MAX_HEADER_BYTES, PROBES
from raylm.ingress.http.ops import READY
from raylm.stages import report

_BUFSIZE = MAX_HEADER_BYTES * 3 // 2  # so that it is the ingress that answers when there are too many headers
_HEAD_S = 10  # for the head of a request; HAProxy itself answers 408
_KEPT_S = 10  # for a connection without a request; longer than the 5 s for which OpenAI's clients use it again
_LAST_PLACES = 1024  # are left for addresses that have few connections, as probes have
_FEW = 8
_READER_S = 120  # in which a client that has something to read must read some of it
_NO_SPLICING = "-dS"  # with splice(), HAProxy does not see that a client hangs up while it waits for an answer

_MONITOR_VARIABLE = "RAYLM_HAPROXY_MONITOR_HOST"
_FALLBACK_VARIABLE = "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"

# IPv4 addresses stand in such a table as IPv6 ones. Who has more than its share is not let in, and who has more than a
# few while few places are left.
_CONNECTIONS_OF_ADDRESSES = """    stick-table type ipv6 size 100k expire 10m store conn_cur
    tcp-request connection track-sc0 src
    tcp-request connection reject if {{ sc0_conn_cur gt {per_address} }}
    tcp-request connection reject if {{ fe_conn gt {crowded} }} {{ sc0_conn_cur gt {few} }}
"""

_FORWARD_CLIENT = (
    "    option forwardfor\n"  # names its client in X-Forwarded-For, behind what that has sent there itself
)

# HAProxy answers probes itself while a replica has told it in the last seconds that it is ready: a replica to which a
# crowd has just come would take its turn. Where none has, as in the beginning, it asks replicas, which say why.
_OURS = f"""
{{%- set ready, probes, fresh_s = {orjson.dumps(READY).decode()!r}, {sorted(PROBES)!r}, 3 %}}
{{%- for backend in backends if backend.ingress_deployment_name == "Ingress" %}}
{{%- set asked, at = backend.name ~ "-asked", backend.path_prefix.rstrip("/") %}}
{{%- set told = "proc.ready_" ~ backend.name.encode().hex() %}}
"""
_PROBES = (
    _OURS
    + """    http-request return status 200 content-type application/json string '{{ ready }}' if METH_GET \
{ path{% for probe in probes %} {{ at }}{{ probe }}{% endfor %} } !{ req.hdr(origin) -m found } \
{ nbsrv({{ asked }}) gt 0 } { date,sub({{ told }}) lt {{ fresh_s }} }
{%- endfor %}
"""
)
_ASKED = (
    _OURS
    + """backend {{ asked }}
    timeout check 2s
    default-server check inter 1s fall 1 rise 1
    option httpchk
    http-check send meth GET uri {{ at }}/ready ver HTTP/1.1 hdr host haproxy
    http-check expect status 200
    http-check expect string '{{ ready }}'
    http-check set-var({{ told }}) date
{%- for server in backend.servers %}
    server {{ server.name }} {{ server.host }}:{{ server.port }}
{%- endfor %}
{%- endfor %}
"""
)


def configure(manager: object) -> None:
    """Set up HAProxy for a manager that has just been made and has not started it yet.

    Ray gives no limit in time to heads, an hour to who does not read, and 90 s to connections without a request: all
    the connections that HAProxy takes could be such ones, and would keep everybody out so long. Where no replica
    answers, Ray's answer is 500 in plain text. Ours is for all paths: clients of OpenAI's API read its "error", those
    of Anthropic's "type" too.
    """
    error = EngineUnavailableError("No replica of the server could answer; try again shortly.")
    body = b'{"type":"error",' + envelope(error, "/")[1:]
    head = (
        f"HTTP/1.1 {error.status} Service Unavailable\r\n"
        f"content-type: application/json\r\nretry-after: {error.retry_after_s}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    most = max_connections()
    connections = _CONNECTIONS_OF_ADDRESSES.format(
        per_address=connections_per_address(most), crowded=most - min(_LAST_PLACES, most // 4), few=_FEW
    )
    monitor = os.environ.get(_MONITOR_VARIABLE) or None
    ray_private.edit_haproxys_template(
        ray_private.HAProxyLines(_FORWARD_CLIENT, connections, _PROBES, _ASKED, _KEPT_S, monitor)
    )
    settings = (head.encode() + body, _BUFSIZE, most, _HEAD_S, _READER_S, (_NO_SPLICING,))
    ray_private.configure_haproxy(manager, ray_private.HAProxySettings(*settings))


class HAProxyManager(ray_private.haproxy_manager()):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        own_directories(kwargs["node_id"])
        super().__init__(*args, **kwargs)
        configure(self)

    async def ready(self) -> str:
        """Serve's, but it says in a line of its own which port is taken."""
        try:
            return str(await super().ready())
        except Exception as error:
            if said := explain_start(error, self._http_options.port):
                report("error", "port", said)
            raise


def configure_controller() -> None:
    """What RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH names: Serve's controller calls it before it starts HAProxy."""
    ray_private.replace_haproxy_manager(HAProxyManager)
    port = ray_private.fallback_proxys_port()
    if ray_private.is_first_start() and not is_free(port):
        report(
            "error",
            "port",
            f"Serve's own proxy cannot listen on port {port}, which is taken; {_FALLBACK_VARIABLE} moves it.",
        )
