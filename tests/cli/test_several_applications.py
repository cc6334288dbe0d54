"""Two models and another user's application in one Serve file: each answers under its route prefix."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
import pytest
import yaml

from raylm.checkpoint import EMBEDDED
from tests.serving import ARGS, Server, chat, free_port, serve_file

pytestmark = [pytest.mark.ray, pytest.mark.long]


def test_all_are_served_and_named_at_ready(tmp_path: Path) -> None:
    port = free_port()
    path = serve_file(tmp_path / "serve.yaml", port, ARGS)
    tree = yaml.safe_load(path.read_text())
    shared = ARGS | {"model": str(EMBEDDED)}  # both use one model directory
    tree["applications"] = [
        {
            "name": "a",
            "import_path": "raylm:build_app",
            "route_prefix": "/a",
            "args": shared | {"served_model_name": "A"},
        },
        {
            "name": "b",
            "import_path": "raylm:build_app",
            "route_prefix": "/b",
            "args": shared | {"served_model_name": "B"},
        },
        {"name": "c", "import_path": "tests.cli.somebody_else:app", "route_prefix": "/c"},
    ]
    path.write_text(yaml.safe_dump(tree))
    with Server(path, port) as server:
        server.wait_until(lambda: " try " in server.log.read_text(), "does not say a request")
        lines = server.log.read_text().splitlines()
        ready = [line.partition(" ready ")[2].split() for line in lines if " ready " in line]
        assert [(words[0], words[2]) for words in ready] == [("A", f"{server.url}/a/v1"), ("B", f"{server.url}/b/v1")]
        assert any("running  c at" in line and line.endswith("/c") for line in lines)
        for name in "ab":
            url, body = f"{server.url}/{name}/v1", chat("What is a KV cache?", max_tokens=40, model=name.upper())
            answer = httpx.post(f"{url}/chat/completions", json=body, timeout=300).json()
            assert "attention" in answer["choices"][0]["message"]["content"]
            assert [model["id"] for model in httpx.get(f"{url}/models").json()["data"]] == [name.upper()]
            assert f'model_name="{name.upper()}"' in httpx.get(f"{server.url}/{name}/metrics").text
        assert httpx.get(f"{server.url}/c").text == "theirs"
        assert len(server.processes("EngineCoreActor")) == 2
        assert server.stop(signal.SIGINT) == 0
        assert server.processes() == []


@pytest.mark.long
def test_an_application_that_cannot_be_imported_is_said_in_one_line(tmp_path: Path) -> None:
    port = free_port()
    path = serve_file(tmp_path / "serve.yaml", port, ARGS)
    tree = yaml.safe_load(path.read_text())
    tree["applications"].append({"name": "c", "import_path": "no_such_module:app", "route_prefix": "/c"})
    path.write_text(yaml.safe_dump(tree))
    with pytest.raises(AssertionError) as caught, Server(path, port):
        pass
    written = str(caught.value)
    assert "raylm: applications[1] (c): no_such_module:app: ModuleNotFoundError: No module named" in written
    assert "Traceback" not in written
