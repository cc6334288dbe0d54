"""Environment variables of Serve. Imports nothing, because Serve's controller imports it before it serves."""

from __future__ import annotations

# Environment of Serve's controller, proxies and replicas. Without these variables Serve's limits and error answers
# apply instead of RayLM's. A Serve file sets them under controller_options; configs/llama.yaml says why.
SERVE_VARIABLES = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0.5",
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
    "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER": "3s",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "raylm.ingress:serve_middlewares",
    "RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH": "raylm.ingress:configure_controller",
}
