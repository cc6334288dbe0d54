"""RayLM's changes to the HAProxy that Serve starts. Serve has no settings for them."""

from __future__ import annotations

import os
from typing import Any

import orjson

from raylm import ray_private
from raylm.errors import EngineUnavailableError
from raylm.ingress.http.errors import envelope
from raylm.ingress.http.haproxy_limits import connections_per_address, max_connections
from raylm.ingress.http.haproxy_start import explain_limit, explain_start, is_free, own_directories
from raylm.ingress.http.middleware import MAX_HEADER_BYTES
from raylm.ingress.http.probes import PROBES, READY
from raylm.stages import report

# more than RayLM's limit, so that the ingress answers a request with too many headers
_BUFSIZE = MAX_HEADER_BYTES * 3 // 2
_HEAD_S = 10  # time limit of a request's head, after which HAProxy answers 408
_KEPT_S = 20  # time limit of a connection without a request; clients reuse one for 5 s (httpx) or 15 s (aiohttp)
_LAST_PLACES = 1024  # connections reserved for addresses that have few connections, such as probes
_FEW = 8
_CONNECT_S = 2  # time limit to connect to a replica; then HAProxy takes another replica
_IDLE_S, _PROBE_S, _LOST_PROBES = 5, 2, 3  # TCP keep-alive: seconds without data, seconds between probes, lost probes
_READER_S = 120  # a client that reads nothing for this time is disconnected
_NO_SPLICING = "-dS"  # with splice(), HAProxy does not notice that a client disconnects while it waits for an answer

_SPREAD = frozenset({"Ingress", "Engine"})  # deployments whose replicas are spread over the nodes
_MONITOR_VARIABLE = "RAYLM_HAPROXY_MONITOR_HOST"
_FALLBACK_VARIABLE = "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"

# The table holds IPv4 addresses in the form of IPv6 addresses. HAProxy refuses an address above its share. While few
# connections are left, HAProxy also refuses an address with more than a few connections.
_CONNECTIONS_OF_ADDRESSES = """    stick-table type ipv6 size 100k expire 10m store conn_cur
    tcp-request connection track-sc0 src
    tcp-request connection reject if {{ sc0_conn_cur gt {per_address} }}
    tcp-request connection reject if {{ fe_conn gt {crowded} }} {{ sc0_conn_cur gt {few} }}
"""

# adds the client's address to X-Forwarded-For, after the values that the client sent
_FORWARD_CLIENT = "    option forwardfor\n"

# Cuts the connections to a replica whose node is silent, for example without power. The kernel of the node answers
# keep-alive probes for a live replica, even a stopped one, so an idle stream is not cut. _CUT_UNHEARD is the same limit
# for sent data that is not acknowledged; HAProxy 2.8 takes it from the line of a server, not from default-server.
_CUT_SILENT = f"""    option srvtcpka
    srvtcpka-idle {_IDLE_S}s
    srvtcpka-intvl {_PROBE_S}s
    srvtcpka-cnt {_LOST_PROBES}
"""
_CUT_UNHEARD = f" tcp-ut {_IDLE_S + _LOST_PROBES * _PROBE_S}s"

# HAProxy answers probes itself if a replica reported readiness in the last few seconds. A replica with many new
# connections would answer a probe late. Without such a report, for example at the start, HAProxy asks the replicas,
# whose answers name the cause.
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
    """Configure HAProxy for a new manager before the manager starts it.

    Ray has no time limit for request heads, a limit of an hour for clients that do not read, and a limit of 90 s for
    connections without a request. Such connections could use up all connections of HAProxy for that time.

    If no replica answers, Ray answers 500 in plain text. RayLM's answer is JSON for all paths: clients of OpenAI's API
    read its "error" field, and clients of Anthropic's API also read its "type" field.
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
    sections = _FORWARD_CLIENT + _CUT_SILENT, connections, _PROBES, _ASKED, _CUT_UNHEARD
    ray_private.edit_haproxys_template(ray_private.HAProxyLines(*sections, _KEPT_S, monitor))
    settings = (head.encode() + body, _BUFSIZE, most, _CONNECT_S, _HEAD_S, _READER_S, (_NO_SPLICING,))
    ray_private.configure_haproxy(manager, ray_private.HAProxySettings(*settings))


class HAProxyManager(ray_private.haproxy_manager()):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        own_directories(kwargs["node_id"])
        super().__init__(*args, **kwargs)
        configure(self)
        ray_private.connect_where_replicas_listen(self)

    async def ready(self) -> str:
        """Call Serve's method. If a port is in use or open files lack, a line says so."""
        try:
            return str(await super().ready())
        except Exception as error:
            if said := explain_start(error, self._http_options.port):
                report("error", "port", said)
            if said := explain_limit(error):
                report("error", "limits", said)
            raise


def configure_controller() -> None:
    """Configure HAProxy in Serve's controller (RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH), before it starts HAProxy."""
    ray_private.replace_haproxy_manager(HAProxyManager)
    ray_private.spread_over_nodes(_SPREAD)
    port = ray_private.fallback_proxys_port()
    if ray_private.is_first_start() and not is_free(port):
        report(
            "error",
            "port",
            f"Serve's own proxy cannot listen on port {port}, which is taken; {_FALLBACK_VARIABLE} moves it.",
        )
