"""Serves a checkpoint over HTTP with Ray Serve LLM. Runs in an environment with the packages of Ray Serve LLM only.

    PYTHON benchmarks/compare/ray_serve_llm.py MODEL_DIR NAME PORT CORES

CORES are the cores of the engine, such as 0,1. With RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING=1 and
RAY_SERVE_ENABLE_HA_PROXY=1 in the environment, tokens bypass the ingress. SIGTERM ends it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

PASSED = ("VLLM_CPU_KVCACHE_SPACE", "RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING", "HF_HUB_OFFLINE", "DO_NOT_TRACK")


def serve_model(model: str, name: str, port: int, environment: Mapping[str, str]) -> None:
    """Serve until this process ends. ``environment`` is set for the engine and the ingress."""
    import ray
    from ray import serve
    from ray.serve.llm import LLMConfig, build_openai_app

    config = LLMConfig(
        model_loading_config={"model_id": name, "model_source": model},
        deployment_config={"num_replicas": 1, "ray_actor_options": {"num_cpus": 0.1}},
        placement_group_config={"bundles": [{"CPU": 1}]},
        accelerator_type=None,
        engine_kwargs={"dtype": "bfloat16", "max_model_len": 4096, "max_num_seqs": 64},
        runtime_env={"env_vars": dict(environment)},
    )
    ray.init("local", num_cpus=8, include_dashboard=False, runtime_env={"env_vars": dict(environment)})
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(build_openai_app({"llm_configs": [config]}), blocking=True, name="llm", route_prefix="/")


def main() -> None:
    """Serve the checkpoint given on the command line."""
    model, name, port, cores = sys.argv[1:]
    environment = {key: os.environ[key] for key in PASSED if key in os.environ}
    serve_model(model, name, int(port), environment | {"VLLM_CPU_OMP_THREADS_BIND": cores})


if __name__ == "__main__":
    main()
