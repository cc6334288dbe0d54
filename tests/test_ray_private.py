"""The private names of Ray that raylm/ray_private.py uses, one test each: what fails here went away with an upgrade."""

from __future__ import annotations

import inspect
import re
from functools import reduce
from importlib import import_module
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray warns when its modules are imported


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("ray.actor", "ActorHandle._actor_id"),
        ("ray._private.worker", "global_worker.actors"),
        ("ray._private.worker", "_global_node"),
        ("ray._private.node", "Node.kill_dashboard"),
        ("ray._private.node", "Node.start_api_server"),
        ("ray._private.node", "Node.webui_url"),
        ("ray._private.ray_constants", "DASHBOARD_ADDRESS"),
        ("ray._private.ray_constants", "KV_NAMESPACE_DASHBOARD"),
        ("ray._private.utils", "get_dashboard_dependency_error"),
        ("ray.experimental.internal_kv", "_internal_kv_put"),
        ("ray.experimental.internal_kv", "_internal_kv_del"),
        ("ray.experimental.internal_kv", "_internal_kv_get"),
        ("ray._common.utils", "import_attr"),
        ("ray._private.state", "actors"),
        ("ray._private.state", "jobs"),
        ("ray.serve._private.api", "call_user_app_builder_with_args_if_necessary"),
        ("ray.serve._private.client", "ServeControllerClient.get_serve_details"),
        ("ray.serve._private.client", "ServeControllerClient.deploy_apps"),
        ("ray.serve._private.client", "ServeControllerClient.delete_apps"),
        ("ray.serve.context", "_get_global_client"),
        ("ray.serve._private.controller", "HAProxyManager"),
        ("ray.serve._private.haproxy", "HAProxyManager.__ray_metadata__.modified_class.__ray_actor_class__"),
        ("ray.serve._private.haproxy", "HAProxyApi._start_and_wait_for_haproxy"),
        ("ray.serve._private.haproxy", "HAProxyConfig.bufsize"),
        ("ray.serve._private.haproxy", "HAProxyConfig.error_file_path"),
    ],
)
def test_a_name_is_there(module: str, name: str) -> None:
    reduce(getattr, name.split("."), import_module(module))


@pytest.mark.parametrize(
    ("module", "attribute"),
    [
        ("ray.serve._private.replica", "self._replica_impl"),
        ("ray.serve._private.replica", "self._shutting_down"),
        ("ray.serve._private.replica", "__serve_build_asgi_app__"),
        ("ray.serve._private.haproxy", "self._haproxy"),
        ("ray._private.node", "self.all_processes"),
    ],
)
def test_an_attribute_of_an_object_is_there(module: str, attribute: str) -> None:
    assert attribute in inspect.getsource(import_module(module))


def test_haproxys_template_has_defaults_for_all_its_frontends() -> None:
    from raylm.ray_private import _DEFAULTS

    assert import_module("ray.serve._private.haproxy").HAPROXY_CONFIG_TEMPLATE.count(_DEFAULTS) == 1


def test_the_environment_variables_of_the_configurations_and_the_launcher_are_read_by_serve() -> None:
    from ray.serve._private import constants

    file = yaml.safe_load((ROOT / "configs" / "llama.yaml").read_text())
    ours = set(file["controller_options"]["runtime_env"]["env_vars"])
    ours |= set(re.findall(r"RAY_SERVE_\w+", (ROOT / "raylm" / "cli" / "serve_process.py").read_text()))
    assert ours
    assert {name for name in ours if f'"{name}"' not in inspect.getsource(constants)} == set()


def test_only_one_module_knows_private_names() -> None:
    private = re.compile(r"\bray(\.\w+)*\._\w+|\bfrom ray(\.[\w.]+)? import _")
    sources = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "raylm").rglob("*.py")}
    assert [name for name, source in sources.items() if private.search(source)] == ["raylm/ray_private.py"]
