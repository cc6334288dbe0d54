"""Extract the parts of RayService's definition that deploy/*.yaml use. Writes rayservice_schema.json.

    python tests/data/extract_rayservice_schema.py ray.io_rayservices.yaml

The definition (https://github.com/ray-project/kuberay, ray-operator/config/crd/bases, Apache licence) has 1 MB. The
extract has the fields of our files, without descriptions. Other fields are refused, so extract again when a file uses a
new field.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
KEPT = {"type", "enum", "pattern", "minimum", "maximum", "minLength", "required", "anyOf"}


def reduced(schema: dict[str, Any], values: list[Any], where: str) -> dict[str, Any]:
    """The parts of ``schema`` that ``values`` use."""
    found: dict[str, Any] = {key: schema[key] for key in schema if key in KEPT}
    objects = [value for value in values if isinstance(value, dict)]
    if "properties" in schema:
        keys = sorted({key for value in objects for key in value})
        if unknown := set(keys) - schema["properties"].keys():
            raise SystemExit(f"{where}: RayService has no {', '.join(sorted(unknown))}")
        found["additionalProperties"] = False
        found["properties"] = {
            key: reduced(schema["properties"][key], [v[key] for v in objects if key in v], f"{where}.{key}")
            for key in keys
        }
    elif isinstance(schema.get("additionalProperties"), dict):
        inner = [item for value in objects for item in value.values()]
        found["additionalProperties"] = reduced(schema["additionalProperties"], inner, f"{where}.*")
    if "items" in schema:
        found["items"] = reduced(schema["items"], [item for value in values for item in value], f"{where}[]")
    return found


def main() -> None:
    """Read the definition named on the command line."""
    definition = yaml.safe_load(Path(sys.argv[1]).read_text())
    (version,) = (version for version in definition["spec"]["versions"] if version["name"] == "v1")
    files = sorted((HERE.parents[1] / "deploy").glob("rayservice*.yaml"))
    files.append(HERE.parents[1] / "deploy" / "gcs-fault-tolerance.yaml")
    documents = [yaml.safe_load(file.read_text()) for file in files]
    schema = reduced(version["schema"]["openAPIV3Schema"], documents, "RayService")
    # Every object has these fields. The definition leaves them to Kubernetes.
    schema["properties"]["apiVersion"] = {"const": f"{definition['spec']['group']}/{version['name']}"}
    schema["properties"]["kind"] = {"const": definition["spec"]["names"]["kind"]}
    schema["$comment"] = "From RayService v1 of KubeRay, https://github.com/ray-project/kuberay, Apache licence 2.0"
    schema["required"] = ["apiVersion", "kind", "metadata", "spec"]
    (HERE / "rayservice_schema.json").write_text(json.dumps(schema, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
