"""The rules of tests/house.py hold, and its checks can fail."""

from __future__ import annotations

import ast

import pytest

from tests import house


def test_imports_go_down_only() -> None:
    assert house.all_layer_faults() == []


@pytest.mark.parametrize("row", list(house.rows(house.measure())), ids=lambda row: row[0])
def test_figures_hold(row: tuple[str, str, str, bool]) -> None:
    what, measured, bound, holds = row
    assert holds, f"{what}: {measured}, wanted {bound}"


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("engine/scheduler.py", "import ray"),
        ("engine/scheduler.py", "from raylm.frontend import AsyncLLM"),
        ("engine/engine_core.py", "def f():\n    import torch"),
        ("worker/model_runner.py", "import ray"),
        ("worker/worker.py", "from raylm.engine import EngineCore"),
        ("frontend/async_llm.py", "from starlette.requests import Request"),
        ("frontend/async_llm.py", "from raylm.engine.scheduler import Scheduler"),
        ("ingress/openai/chat.py", "import torch.nn"),
        ("ingress/openai/chat.py", "from raylm import app"),
        ("config.py", "from raylm.engine import EngineCore"),
        ("llm.py", "import torch"),
        ("models/loader.py", "from raylm.worker import Worker"),
    ],
)
def test_a_planted_import_is_caught(file: str, source: str) -> None:
    assert house.layer_faults(file, source)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("engine/ray_executor.py", "import ray"),
        ("engine/model_executor.py", "from raylm.worker import Worker"),
        ("worker/sampling/sampler.py", "import torch\nfrom raylm.messages import Logprobs"),
        ("app.py", "from raylm.ingress import Ingress\nfrom ray import serve"),
    ],
)
def test_a_lawful_import_is_not(file: str, source: str) -> None:
    assert house.layer_faults(file, source) == []


def test_nesting_counts_blocks_and_not_elifs() -> None:
    source = "def f(a):\n for x in a:\n  if x: pass\n  elif a:\n   while x: pass"
    assert house.depth(ast.parse(source).body[0]) == 3


def test_circles_count_what_only_the_type_checker_follows() -> None:
    later = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from raylm.a import A"
    assert house.circles({"raylm.a": "from raylm.b import B", "raylm.b": later}) in (["b <- a <- b"], ["a <- b <- a"])
    assert house.circles({"raylm.a": "from raylm import b", "raylm.b": "", "raylm": "from raylm.a import A"}) == []


def test_fields_of_dataclasses_and_models_are_attributes() -> None:
    source = "class A:\n x: int\n y: ClassVar[int] = 1\n def f(self):\n  self.z = 1"
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.ClassDef)
    assert house.attributes(node) == {"x", "z"}


def test_every_part_beside_the_core_is_there() -> None:
    files = [(1, name) for _, name in house.measure().files]
    assert set(house.parts(files)) == {"core", *house.BESIDE_THE_CORE}
