"""The Helm chart creates the RayServices of deploy/*.yaml, and reports wrong values by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from raylm.version import VERSION
from tests.test_deploy import faults

ROOT = Path(__file__).parent.parent
CHART = ROOT / "deploy" / "helm"
GPU = CHART / "values-gpu.yaml"
HELM = Path(sys.executable).with_name("helm")  # from the package helm-binary
pytestmark = pytest.mark.skipif(not HELM.exists(), reason="no helm: helm-binary has none for this platform")


def helm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([HELM, *arguments], capture_output=True, text=True, check=False)


def rendered(name: str, *options: str | Path) -> list[dict[str, Any]]:
    done = helm("template", name, CHART, *options)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def values(tmp_path: Path, **given: Any) -> tuple[str, Path]:
    """The options for a file with these values."""
    (tmp_path / "values.yaml").write_text(json.dumps(given))
    return "-f", tmp_path / "values.yaml"


def read(service: dict[str, Any]) -> dict[str, Any]:
    """The service without labels, with its Serve configuration parsed."""
    service["metadata"].pop("labels", None)
    service["spec"]["serveConfigV2"] = yaml.safe_load(service["spec"]["serveConfigV2"])
    return service


def group(service: dict[str, Any]) -> dict[str, Any]:
    (found,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    return dict(found)


@pytest.mark.parametrize(
    ("name", "options", "file"),
    [("raylm-cpu", (), "rayservice-cpu.yaml"), ("raylm", ("-f", GPU), "rayservice.yaml")],
)
def test_it_makes_the_services_of_the_files(name: str, options: tuple[str | Path, ...], file: str) -> None:
    (service,) = rendered(name, *options)
    assert faults(service) == []
    assert read(service) == read(yaml.safe_load((ROOT / "deploy" / file).read_text()))


def test_it_is_well_formed_and_of_this_version() -> None:
    done = helm("lint", "--strict", CHART, "-f", GPU)
    assert done.returncode == 0, done.stdout
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (VERSION, VERSION)


def test_a_redis_makes_the_head_replaceable_as_the_patch_does() -> None:
    (service,) = rendered("raylm", "--set", "redis.address=redis:6379")
    assert faults(service) == []
    patch = yaml.safe_load((ROOT / "deploy" / "gcs-fault-tolerance.yaml").read_text())
    assert patch["spec"]["rayClusterConfig"].items() <= service["spec"]["rayClusterConfig"].items()


def test_it_makes_the_claim_of_the_models() -> None:
    claim, service = rendered("raylm", "-f", GPU, "--set", "models.create=true")
    expected = yaml.safe_load((ROOT / "deploy" / "models.yaml").read_text())
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert (claim["kind"], claim["metadata"]["name"]) == (expected["kind"], expected["metadata"]["name"])
    assert claim["spec"] == expected["spec"]
    assert service["kind"] == "RayService"


@pytest.mark.parametrize(
    ("engine", "pods"),
    [
        ({}, (1, 1, 1)),
        ({"replicas": 3}, (3, 3, 3)),
        ({"replicas": {"min": 0, "max": 4}}, (0, 0, 4)),
        ({"replicas": 2, "pipeline_parallel_size": 2}, (4, 4, 4)),
    ],
)
def test_there_are_pods_for_the_engines(tmp_path: Path, engine: dict[str, Any], pods: tuple[int, int, int]) -> None:
    (service,) = rendered("raylm", *values(tmp_path, args={"model": "m", "engine": engine}))
    found = group(service)
    assert faults(service) == []
    assert (found["replicas"], found["minReplicas"], found["maxReplicas"]) == pods
    assert service["spec"]["rayClusterConfig"].get("enableInTreeAutoscaling", False) == (pods[0] < pods[2])


def test_a_pod_has_the_gpus_of_its_engine(tmp_path: Path) -> None:
    args = {"model": "m", "device": "cuda", "engine": {"tensor_parallel_size": 4}}
    (service,) = rendered("raylm", *values(tmp_path, args=args))
    (container,) = group(service)["template"]["spec"]["containers"]
    assert {kind: found["nvidia.com/gpu"] for kind, found in container["resources"].items()} == {
        "requests": "4", "limits": "4",
    }  # fmt: skip


def test_knobs_arrive_as_they_were_given(tmp_path: Path) -> None:
    args = {"model": "m", "max_model_len": 1_000_000, "ingress": {"replicas": 2, "open_paths": ["/metrics", "/health"]}}
    (service,) = rendered("raylm", *values(tmp_path, args=args, keysSecret="keys", env=[{"name": "A", "value": "1"}]))
    arrived = read(service)["spec"]["serveConfigV2"]["applications"][0]["args"]
    assert arrived == args | {"ingress": args["ingress"] | {"api_keys_env": "RAYLM_KEYS"}}
    cluster = service["spec"]["rayClusterConfig"]
    for one in (cluster["headGroupSpec"], group(service)):
        (container,) = one["template"]["spec"]["containers"]
        assert {"name": "A", "value": "1"} in container["env"]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"argz": {}}, "argz"),
        ({"image": ""}, "image"),
        ({"models": {"create": True}}, "models.claim"),
        ({"worker": {"gpus": 1}}, "gpus"),
        ({"args": {"model": "m", "engine": {"replicas": {"min": 2}}}}, "args.engine.replicas.max"),
        ({"args": {"model": "m", "engine": {"replicas": {"max": 2}}}}, "args.engine.replicas.min"),
        ({"args": {"model": ""}}, "args.model"),
    ],
)
def test_a_wrong_value_is_named(tmp_path: Path, given: dict[str, Any], named: str) -> None:
    done = helm("template", "raylm", CHART, *values(tmp_path, **given))
    assert done.returncode != 0
    assert named in done.stderr
