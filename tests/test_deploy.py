"""deploy/*.yaml are valid for KubeRay's RayService, and their Serve configuration starts Serve as configs/ do."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import yaml

from raylm.cli.serve_file import read_serve_file

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "deploy").glob("rayservice*.yaml"))
SCHEMA = json.loads((ROOT / "tests" / "data" / "rayservice_schema.json").read_text())


def faults(document: dict[str, Any]) -> list[str]:
    return [error.json_path for error in jsonschema.Draft202012Validator(SCHEMA).iter_errors(document)]


@pytest.fixture(params=FILES, ids=lambda file: file.name)
def service(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(yaml.safe_load(request.param.read_text()))


def test_there_is_one_for_gpus_and_one_for_cpus() -> None:
    assert [file.name for file in FILES] == ["rayservice-cpu.yaml", "rayservice.yaml"]


def test_it_is_a_rayservice(service: dict[str, Any]) -> None:
    assert faults(service) == []


def test_the_patch_for_fault_tolerance_makes_a_rayservice(service: dict[str, Any]) -> None:
    patch = yaml.safe_load((ROOT / "deploy" / "gcs-fault-tolerance.yaml").read_text())
    (changed,) = patch["spec"].values()
    assert list(patch["spec"]) == ["rayClusterConfig"]
    assert not changed.keys() & service["spec"]["rayClusterConfig"].keys()
    service["spec"]["rayClusterConfig"] |= changed
    assert faults(service) == []


def test_pods_have_the_volume_and_the_keys_that_the_file_names() -> None:
    claim = yaml.safe_load((ROOT / "deploy" / "models.yaml").read_text())
    assert (claim["apiVersion"], claim["kind"]) == ("v1", "PersistentVolumeClaim")
    service = yaml.safe_load((ROOT / "deploy" / "rayservice.yaml").read_text())
    cluster = service["spec"]["rayClusterConfig"]
    args = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"][0]["args"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        assert [one["persistentVolumeClaim"]["claimName"] for one in pod["volumes"]] == [claim["metadata"]["name"]]
        (container,) = pod["containers"]
        names = {one["name"]: one for one in container["env"]}
        assert "secretKeyRef" in names[args["ingress"]["api_keys_env"]]["valueFrom"]
        assert [one["mountPath"] for one in container["volumeMounts"]] == [names["HF_HOME"]["value"]]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "rayClusterConfig", "headGroupSpec", "rayStartParams", "num-cpus"), 0),
        (("spec", "rayClusterConfig", "workerGroupSpecs", 0, "replicas"), "1"),
        (("spec", "rayClusterConfig", "workerGroupSpecs", 0, "template", "spec", "containers", 0, "images"), "x"),
        (("spec", "rayClusterConfig", "authOptions", "mode"), "password"),
        (("spec", "serveConfig"), ""),
        (("kind",), "RayCluster"),
    ],
)
def test_a_fault_is_found(service: dict[str, Any], path: tuple[str | int, ...], value: object) -> None:
    broken: Any = copy.deepcopy(service)
    *parents, last = path
    place = broken
    for key in parents:
        place = place[key]
    place[last] = value
    assert len(faults(broken)) == 1


def test_the_head_asks_its_nodes_as_often_as_the_docs_say(service: dict[str, Any]) -> None:
    (container,) = service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"]
    given = {one["name"]: one["value"] for one in container["env"] if one["name"].startswith("RAY_health_check_")}
    docs = (ROOT / "docs" / "deploying.md").read_text()
    assert dict(re.findall(r"(RAY_health_check_\w+)=(\d+)", docs)) == given
    server = (Path(ray.__file__).parent / "core/src/ray/gcs/gcs_server").read_bytes()
    assert len(given) == 4
    assert {name for name in given if name.removeprefix("RAY_").encode() not in server} == set()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from pydantic, in Ray's schema
def test_its_serve_configuration_is_one(service: dict[str, Any], tmp_path: Path) -> None:
    from ray.serve.schema import ServeDeploySchema

    text = service["spec"]["serveConfigV2"]
    ServeDeploySchema.model_validate(yaml.safe_load(text))
    (tmp_path / "serve.yaml").write_text(text)
    served = read_serve_file(tmp_path / "serve.yaml")
    assert (served.host, served.port) == ("0.0.0.0", 8000)
    usual = yaml.safe_load((ROOT / "configs" / "llama.yaml").read_text())
    for key in ("controller_options", "logging_config"):
        assert yaml.safe_load(text)[key] == usual[key]


def test_the_cluster_has_what_the_engine_asks_for(service: dict[str, Any]) -> None:
    args = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"][0]["args"]
    (group,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    gpus = int(container["resources"]["limits"].get("nvidia.com/gpu", 0))
    assert gpus == (args.get("device") == "cuda")
    engines = args.get("engine", {}).get("replicas", 1)
    least, most = (engines["min"], engines["max"]) if isinstance(engines, dict) else (engines, engines)
    assert (group["minReplicas"], group["maxReplicas"]) == (least, most)
    assert least <= group["replicas"] <= most
    assert service["spec"]["rayClusterConfig"].get("enableInTreeAutoscaling", False) == (least < most)


def test_the_image_has_the_ray_that_the_cluster_names(service: dict[str, Any]) -> None:
    assert service["spec"]["rayClusterConfig"]["rayVersion"].split(".")[:2] == ray.__version__.split(".")[:2]
