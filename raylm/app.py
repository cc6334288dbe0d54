"""build_app: connects the deployments of a served model. No other module does."""

from __future__ import annotations

import functools
from dataclasses import asdict
from typing import Any

import ray
from pydantic import ValidationError
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from raylm import checkpoint
from raylm.config import Config, EngineConfig, ReplicaRange, faults
from raylm.engine import (
    LOAD_PERIOD_S,
    SUPERVISOR_CPUS,
    UPSCALE_DELAY_S,
    Engine,
    EnginePolicy,
    ScalingTargets,
    drain_limit_s,
    placement_bundles,
)
from raylm.errors import ConfigError
from raylm.frontend import check_observers
from raylm.ingress import SHARED_ACTORS, Ingress, is_postgres, read_keys
from raylm.ray_private import head_resource

INGRESS_CPUS = 0.1
_ANY = 0.001  # of a resource, the least that Ray knows
STOP_POLL_S = 0.1
DRAIN_MARGIN_S = 3.0
HEALTH_PERIOD_S = 0.25  # time after which a killed replica is replaced
NEW_BEFORE_OLD = 100  # percent: an update starts all new replicas before it stops an old one
_WAITING_PERIOD_S = 0.2  # LOAD_PERIOD_S if engines scale to zero: ingress replicas then report waiting requests
_SHARED_ACTOR_REQUESTS = 16_384  # each background response occupies one request


def build_app(config: Config | dict[str, Any]) -> Application:
    """Build the Serve application of one model, to be served or bound to another deployment.

    Raises:
        ConfigError: a knob is unknown or invalid, or the model, the API keys or the device do not exist.
    """
    config = _checked(config)
    checkpoint.resolve(config.model, config.revision)
    read_keys(config.ingress, config.scheduler.policy)
    check_observers(config)
    gpus = _gpus(config)
    deployment = functools.partial(
        serve.deployment,
        graceful_shutdown_wait_loop_s=STOP_POLL_S,
        max_constructor_retry_count=1,
        max_surge_percent=NEW_BEFORE_OLD,
    )
    engine = deployment(
        Engine,
        **_number(config.engine),
        graceful_shutdown_timeout_s=drain_limit_s(config) + DRAIN_MARGIN_S,
        placement_group_bundles=placement_bundles(config, gpus),
        placement_group_strategy="STRICT_PACK" if config.engine.pipeline_parallel_size == 1 else "SPREAD",
        ray_actor_options={"num_cpus": SUPERVISOR_CPUS},
        health_check_period_s=HEALTH_PERIOD_S,
    )
    ingress = deployment(
        serve.ingress()(Ingress),
        num_replicas=config.ingress.replicas,
        graceful_shutdown_timeout_s=config.ingress.shutdown_grace_s + DRAIN_MARGIN_S,
        max_ongoing_requests=2 * config.ingress.max_ongoing_requests,
        ray_actor_options={"num_cpus": INGRESS_CPUS},
    )
    shared_actors = {}
    if config.ingress.replicas > 1 and not is_postgres(config.ingress.store):
        options: dict[str, Any] = {
            "max_ongoing_requests": _SHARED_ACTOR_REQUESTS,
            "ray_actor_options": {"num_cpus": 0, "resources": {head_resource(): _ANY}},  # its file is there
            "health_check_period_s": HEALTH_PERIOD_S,
        }
        shared_actors = {name: serve.deployment(actor, **options).bind(config) for name, actor in SHARED_ACTORS.items()}
    return ingress.bind(config, engine.bind(config, gpus), **shared_actors)


def _number(engine: EngineConfig) -> dict[str, Any]:
    """Serve's deployment options for the number of engines."""
    if not isinstance(engine.replicas, ReplicaRange):
        return {"num_replicas": engine.replicas}
    least, most, itl_ms = engine.replicas.min, engine.replicas.max, engine.replicas.target_itl_ms
    targets = ScalingTargets(least, most, engine.replicas.target_ttft_s, None if itl_ms is None else itl_ms / 1000)
    period_s = LOAD_PERIOD_S if least else _WAITING_PERIOD_S
    autoscaling = AutoscalingConfig(
        min_replicas=least,
        max_replicas=most,
        initial_replicas=max(1, least),
        metrics_interval_s=period_s,
        look_back_period_s=3 * period_s,
        upscale_delay_s=UPSCALE_DELAY_S,
        downscale_delay_s=engine.replicas.downscale_delay_s,
        policy=AutoscalingPolicy(policy_function=EnginePolicy, policy_kwargs=asdict(targets)),
    )
    return {"autoscaling_config": autoscaling}


def _checked(config: Config | dict[str, Any]) -> Config:
    """Validate a configuration. Serve passes the ``args`` of an application as an unchecked dict."""
    try:
        return Config.model_validate(config)
    except ValidationError as error:
        raise ConfigError(faults(error)) from None


def _gpus(config: Config) -> int:
    """Number of GPUs of each worker, 0 or 1."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    most = max((int(node.get("GPU", 0)) for node in nodes), default=0)
    if config.device == "cpu" or (config.device == "auto" and not most):
        _check_cpus(config, [node.get("CPU", 0.0) for node in nodes])
        return 0
    if not most:
        raise ConfigError("device: 'cuda' is set, but the cluster has no GPU.")
    if config.engine.pipeline_parallel_size > 1:
        raise ConfigError("engine.pipeline_parallel_size: several stages are served on CPUs only; set device: cpu.")
    ranks = config.engine.tensor_parallel_size
    if ranks > most:
        raise ConfigError(
            f"engine.tensor_parallel_size: {ranks} workers need a GPU each on one node; no node has more than {most}."
        )
    return 1


def _check_cpus(config: Config, nodes: list[float]) -> None:
    """``nodes`` are the CPUs of each node; none may have joined the cluster yet."""
    if config.engine.pipeline_parallel_size > 1:
        _check_stages(config, nodes)
        return
    most, ranks = max(nodes, default=0.0), config.engine.tensor_parallel_size
    needed = sum(bundle["CPU"] for bundle in placement_bundles(config, 0))
    if 0 < most < needed:
        raise ConfigError(
            f"engine.tensor_parallel_size: an engine of {ranks} workers (engine.num_cpus: {config.engine.num_cpus:g}) "
            f"needs {needed:g} CPUs on one node; no node has more than {most:g}."
        )


def _check_stages(config: Config, nodes: list[float]) -> None:
    """Each stage must fit a node, and all stages the cluster."""
    needed, engine = [bundle["CPU"] for bundle in placement_bundles(config, 0)], config.engine
    what = f"(engine.num_cpus: {engine.num_cpus:g}, engine.tensor_parallel_size: {engine.tensor_parallel_size})"
    if 0 < max(nodes, default=0.0) < max(needed):
        raise ConfigError(
            f"engine.pipeline_parallel_size: a stage {what} needs {max(needed):g} CPUs on one node; no node has more "
            f"than {max(nodes):g}."
        )
    if 0 < sum(nodes) < sum(needed):
        raise ConfigError(
            f"engine.pipeline_parallel_size: {engine.pipeline_parallel_size} stages {what} need {sum(needed):g} CPUs; "
            f"all nodes together have {sum(nodes):g}."
        )
