"""build_app accepts arguments from a Serve file or from a program, and reports an error in one line."""

from __future__ import annotations

from typing import Any

import pytest

from raylm.config import Config
from raylm.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray Serve warns when it is imported


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"schedular": {}}, "unknown key 'schedular'; did you mean 'scheduler'?"),
        ({"scheduler": {"max_num_seqs": 0}}, "scheduler.max_num_seqs: Input should be greater than or equal to 1"),
        ({"dtype": "float8", "device": "tpu"}, "dtype: Input should be"),
        ({"model": "/no/such/place"}, "model: the directory /no/such/place does not exist"),
        (5, "Input should be a valid dictionary"),
        (None, "Input should be a valid dictionary"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(given: Any, said: str) -> None:
    from raylm.app import build_app

    with pytest.raises(ConfigError) as caught:
        build_app(given)
    assert caught.value.message.startswith(said)
    assert "\n" not in caught.value.message
    assert "pydantic" not in caught.value.message


@pytest.mark.parametrize("given", [Config(device="cpu"), {"device": "cpu"}, {"model": "embedded", "device": "cpu"}])
def test_a_config_and_its_dict_make_the_same(monkeypatch: pytest.MonkeyPatch, given: Any) -> None:
    from raylm import app

    monkeypatch.setattr(app.ray, "nodes", list)
    built = app.build_app(given)
    assert built._bound_deployment.init_args[0] == Config(device="cpu")


def test_workers_that_fit_no_node_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from raylm import app

    nodes = [{"Alive": True, "Resources": {"CPU": cpus}} for cpus in (2.0, 4.0)]
    nodes.append({"Alive": False, "Resources": {"CPU": 64.0}})
    monkeypatch.setattr(app.ray, "nodes", lambda: nodes)
    engine = {"tensor_parallel_size": 4, "num_cpus": 1}
    with pytest.raises(ConfigError, match=r"^engine.tensor_parallel_size: an engine of 4 workers \(engine.num_cpus"):
        app.build_app({"device": "cpu", "engine": engine})
    app.build_app({"device": "cpu", "engine": engine | {"tensor_parallel_size": 3}})
    nodes[:2] = []  # no node with a GPU has joined yet
    app.build_app({"device": "cpu", "engine": engine})


def test_with_postgres_there_is_no_actor_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    from raylm import app

    monkeypatch.setattr(app.ray, "nodes", list)
    monkeypatch.setattr(app, "head_resource", lambda: "node:head")
    for store, actors in (("/var/lib/store", {"response_store"}), ("postgresql://db/raylm", set())):
        built = app.build_app({"device": "cpu", "ingress": {"replicas": 2, "store": store}})
        assert set(built._bound_deployment.init_kwargs) == actors


def test_stages_are_spread_and_refused_where_they_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    from raylm import app

    nodes = [{"Alive": True, "Resources": {"CPU": cpus}} for cpus in (2.0, 4.0)]
    monkeypatch.setattr(app.ray, "nodes", lambda: nodes)
    engine: dict[str, Any] = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "num_cpus": 1}
    built = app.build_app({"device": "cpu", "engine": engine})
    options = built._bound_deployment.init_args[1]._bound_deployment._replica_config
    assert options.placement_group_strategy == "SPREAD"
    assert options.placement_group_bundles == [{"CPU": 2.2}, {"CPU": 2.0}]
    alone = app.build_app({"device": "cpu"})._bound_deployment.init_args[1]._bound_deployment._replica_config
    assert alone.placement_group_strategy == "STRICT_PACK"
    said = r"^engine.pipeline_parallel_size: a stage \(engine.num_cpus: 2, .*\) needs 4.2 CPUs on one node; no node has"
    with pytest.raises(ConfigError, match=said):
        app.build_app({"device": "cpu", "engine": engine | {"num_cpus": 2}})
    said = r"^engine.pipeline_parallel_size: 3 stages \(.*\) need 6.2 CPUs; all nodes together have 6\."
    with pytest.raises(ConfigError, match=said):
        app.build_app({"device": "cpu", "engine": engine | {"pipeline_parallel_size": 3}})
    nodes.append({"Alive": True, "Resources": {"CPU": 8.0, "GPU": 2.0}})
    with pytest.raises(ConfigError, match=r"^engine.pipeline_parallel_size: several stages are served on CPUs only"):
        app.build_app({"engine": engine})


def test_a_range_of_engines_is_serves_autoscaling_by_our_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    from raylm import app

    monkeypatch.setattr(app.ray, "nodes", list)
    replicas = {"min": 0, "max": 3, "target_ttft_s": 1.5, "target_itl_ms": 50, "downscale_delay_s": 7}
    built = app.build_app({"device": "cpu", "engine": {"replicas": replicas}})
    engine = built._bound_deployment.init_args[1]._bound_deployment
    found = engine._deployment_config.autoscaling_config
    assert (found.min_replicas, found.max_replicas, found.initial_replicas, found.downscale_delay_s) == (0, 3, 1, 7)
    assert found.policy.policy_kwargs == {"min": 0, "max": 3, "target_ttft_s": 1.5, "target_itl_s": 0.05}
    assert engine._deployment_config.max_surge_percent == 100
    assert found.metrics_interval_s == 0.2, "a request that waits for the first engine waits for this interval too"
    built = app.build_app({"device": "cpu", "engine": {"replicas": replicas | {"min": 1}}})
    engine = built._bound_deployment.init_args[1]._bound_deployment
    assert engine._deployment_config.autoscaling_config.metrics_interval_s == 1


@pytest.mark.parametrize(
    ("replicas", "said"),
    [
        ({"min": 3, "max": 2}, "min: 3 is more than max: 2"),
        ({"min": 1}, "max: Field required"),
        ({"min": 0, "max": 2, "targets": 1}, "unknown key 'targets'"),
        ({"min": 0, "max": 2, "target_ttft_s": 0}, "target_ttft_s: Input should be greater than 0"),
        (0, "Input should be greater than or equal to 1"),
        ("two", "Input should be a valid integer"),
    ],
)
def test_a_wrong_number_of_engines_is_named(replicas: Any, said: str) -> None:
    from raylm.app import build_app

    with pytest.raises(ConfigError) as caught:
        build_app({"engine": {"replicas": replicas}})
    assert caught.value.message.startswith("engine.replicas")
    assert said in caught.value.message
    assert caught.value.message.count("Input") <= 1
