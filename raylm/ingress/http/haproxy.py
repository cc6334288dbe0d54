"""What RayLM changes in the HAProxy that Serve starts; Serve itself has no settings for it."""

from __future__ import annotations

from typing import Any

import orjson

from raylm import ray_private
from raylm.errors import EngineUnavailableError
from raylm.ingress.http.errors import envelope
from raylm.ingress.http.middleware import MAX_HEADER_BYTES, PROBES
from raylm.ingress.http.ops import READY

_BUFSIZE = MAX_HEADER_BYTES * 3 // 2  # so that it is the ingress that answers when there are too many headers
_HEAD_S = 10  # for the head of a request; HAProxy itself answers 408
_READER_S = 120  # in which a client that has something to read must read some of it
_NO_SPLICING = "-dS"  # with splice(), HAProxy does not see that a client hangs up while it waits for an answer

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

    Ray gives no limit in time to heads, and an hour to who does not read: 4,096 connections on which nothing comes or
    goes are all that HAProxy takes, and would keep everybody out so long. Where no replica answers, Ray's answer is 500
    in plain text. Ours is for all paths: clients of OpenAI's API read its "error", those of Anthropic's "type" too.
    """
    error = EngineUnavailableError("No replica of the server could answer; try again shortly.")
    body = b'{"type":"error",' + envelope(error, "/")[1:]
    head = (
        f"HTTP/1.1 {error.status} Service Unavailable\r\n"
        f"content-type: application/json\r\nretry-after: {error.retry_after_s}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    ray_private.extend_haproxys_template(_FORWARD_CLIENT, _PROBES, _ASKED)
    ray_private.configure_haproxy(manager, head.encode() + body, _BUFSIZE, _HEAD_S, _READER_S, _NO_SPLICING)


class HAProxyManager(ray_private.haproxy_manager()):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        configure(self)


def configure_controller() -> None:
    """What RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH names: Serve's controller calls it before it starts HAProxy."""
    ray_private.replace_haproxy_manager(HAProxyManager)
