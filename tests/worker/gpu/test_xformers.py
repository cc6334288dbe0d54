"""The xformers backend without a GPU: refusals, buckets, and its kernel in an interpreter, in a separate process."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raylm.errors import ConfigError
from raylm.models import AttentionSpec
from raylm.worker.attention import StepLimits, select_backend
from raylm.worker.gpu import split_k, triton_attention, xformers
from raylm.worker.gpu.batch_buckets import bucket, buckets, table_width, table_widths
from raylm.worker.gpu.split_k import Tile, num_splits, processors, queries_per_tile, tile_of
from raylm.worker.gpu.triton_attention import TritonBackend
from raylm.worker.gpu.xformers import XformersBackend

ROOT = Path(__file__).parents[3]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
INSTALLED = {"xformers": "0.0.35", "triton": "3.7.1"}


def spec(**changes: Any) -> AttentionSpec:
    return AttentionSpec(**{"layer": 3, "num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "scale": 0.1} | changes)


@pytest.mark.long
def test_the_kernel_in_tritons_interpreter() -> None:
    """Run interpreted_xformers.py with its planted faults. The interpreter is chosen for a whole process."""
    env = os.environ | {"TRITON_INTERPRET": "1", "XFORMERS_ENABLE_TRITON": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/worker/gpu/interpreted_xformers.py"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine that seems to meet all requirements of the backend. Tests remove one of them."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(split_k, "version", INSTALLED.__getitem__)
    monkeypatch.setattr(xformers, "probe", lambda *args: None)
    monkeypatch.setattr(triton_attention, "probe", lambda *args: None)
    return monkeypatch


def refusals(layer: AttentionSpec, dtype: torch.dtype = torch.bfloat16, device: torch.device = CUDA) -> str:
    return "; ".join(XformersBackend.supports(layer, dtype, device, 16))


def test_what_it_serves(gpu: pytest.MonkeyPatch) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for head_dim in (64, 128, 256):
            assert refusals(spec(head_dim=head_dim), dtype) == ""
    assert select_backend([spec()], torch.bfloat16, CUDA, 64, asked="xformers") is XformersBackend


def test_it_serves_when_it_is_asked_for_or_where_our_kernel_does_not(gpu: pytest.MonkeyPatch) -> None:
    """Our kernel is faster, but does not support heads of 512."""
    assert select_backend([spec()], torch.bfloat16, CUDA, 64) is TritonBackend
    assert select_backend([spec(head_dim=512)], torch.bfloat16, CUDA, 64) is XformersBackend
    with pytest.raises(ConfigError, match=r"engine.attention_backend: xformers does not serve it here .*windows"):
        select_backend([spec(sliding_window=128)], torch.bfloat16, CUDA, 64, asked="xformers")
    with pytest.raises(ConfigError, match=r"engine.attention_backend: sdpa does not serve keys and values in fp8"):
        select_backend([spec()], torch.bfloat16, CUDA, 64, fp8=True, asked="sdpa")


@pytest.mark.parametrize(
    ("layer", "dtype", "said"),
    [
        (spec(head_dim=512, sliding_window=128), torch.bfloat16, "sliding window"),
        (spec(head_dim=640), torch.bfloat16, "no head_dim 640, only 16, 32, 64, 128, 256, 512"),
        (spec(), torch.float32, "no torch.float32"),
    ],
)
def test_models_that_it_refuses_are_served_by_sdpa_and_the_log_says_why(
    gpu: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, layer: AttentionSpec, dtype: torch.dtype, said: str
) -> None:
    with caplog.at_level(logging.WARNING):
        chosen = select_backend([spec(), layer], dtype, CUDA, 16)
    assert chosen.name == "sdpa"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "computed by sdpa, and slower: triton: it has no" in caplog.text
    assert said in caplog.text


def test_soft_capping_is_refused(gpu: pytest.MonkeyPatch) -> None:
    assert refusals(spec(softcap=30.0)) == "it has no soft capping of scores"


def absent(package: str) -> Any:
    def version(name: str) -> str:
        if name == package:
            raise split_k.PackageNotFoundError(name)
        return INSTALLED[name]

    return version


def test_machines_that_it_refuses(gpu: pytest.MonkeyPatch) -> None:
    assert refusals(spec(), device=CPU) == "it computes on NVIDIA GPUs only"
    gpu.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert "compute capability 8.0" in refusals(spec())
    gpu.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    gpu.setattr(split_k, "version", absent("xformers"))
    assert "it needs xformers 0.0.35, and none is installed" in refusals(spec())
    gpu.setattr(split_k, "version", absent("triton"))
    assert "triton before 3.9, and none is installed" in refusals(spec())
    gpu.setattr(split_k, "version", {"xformers": "0.0.36", "triton": "3.9.0"}.__getitem__)
    assert "0.0.36 is installed" in refusals(spec())
    assert "3.9.0 is installed" in refusals(spec())


def test_a_gpu_on_which_its_results_are_wrong_is_refused(
    gpu: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried = []

    def probe(backend: object, layer: AttentionSpec, *args: object) -> str:
        tried.append(layer.layer)
        return "its results are wrong by 0.5 on this device"

    gpu.setattr(xformers, "probe", probe)
    gpu.setattr(triton_attention, "probe", probe)
    assert select_backend([spec(), spec(layer=4)], torch.bfloat16, CUDA, 16).name == "sdpa"
    assert "triton: its results are wrong by 0.5" in caplog.text
    assert "xformers: its results are wrong by 0.5" in caplog.text
    assert set(tried) == {0}


def test_on_a_cpu_it_is_passed_over_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    assert select_backend([spec()], torch.float32, CPU, 16).name in ("cpu", "sdpa")
    assert "xformers" not in caplog.text


@given(count=st.integers(1, 4096))
def test_rungs_are_few_and_near(count: int) -> None:
    size = bucket(count)
    assert count <= size < max(2 * count, count + 64)
    assert bucket(size) == size
    assert buckets(count)[-1] == size
    assert buckets(count) == sorted({bucket(every) for every in range(1, count + 1)})


def test_widths_of_tables() -> None:
    limits = StepLimits(1, 1, max_blocks=10_000, block_size=16)
    assert [table_width(tokens, limits) for tokens in (1, 1024, 1025, 4096, 4097)] == [64, 64, 256, 256, 1024]
    assert table_width(5000, replace(limits, max_blocks=313)) == 313
    assert table_widths(limits) == [64, 256, 1024, 4096, 10_000]
    assert table_widths(replace(limits, max_blocks=256)) == [64, 256]
    assert table_widths(replace(limits, max_blocks=3)) == [3]


@given(programs=st.integers(1, 4096), tokens=st.integers(16, 200_000))
def test_splits_occupy_the_gpu_but_stay_long(programs: int, tokens: int) -> None:
    splits = num_splits(programs, tokens, 132)
    assert splits in (1, 2, 4, 8, 16, 32, 64)
    assert splits == 1 or tokens / splits >= 64
    assert splits == 1 or splits * programs < 4 * 132
    assert processors(CPU) == 108


def test_tiles_fit_the_rows_and_the_blocks() -> None:
    """compiled_kernels.py compiles the kernels with these tiles."""
    assert tile_of(4, 128, 64, 9) == Tile(16, 64, 4)
    assert tile_of(128, 128, 64, 9) == Tile(128, 64, 8)
    assert tile_of(128, 128, 64, 8) == Tile(128, 32, 8)
    assert tile_of(96, 64, 16, 8) == Tile(128, 16, 8)
    assert tile_of(64, 64, 64, 8) == Tile(64, 64, 4)
    assert tile_of(2, 256, 64, 8) == Tile(16, 64, 4)
    assert tile_of(32, 256, 16, 8) == Tile(32, 16, 4)
    assert tile_of(64, 512, 64, 9) == Tile(16, 16, 4)


def test_tiles_hold_128_rows() -> None:
    groups = {1: 128, 2: 64, 4: 32, 7: 16, 8: 16, 64: 16, 256: 16}
    for group, queries in groups.items():
        assert queries_per_tile(spec(num_heads=2 * group)) == queries
    assert queries_per_tile(spec(num_heads=2, head_dim=256)) == 16


BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("xformers", "triton"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
"""
EVERY_MODULE = """
import importlib, pathlib, sys
import raylm
for module in ("xformers", "triton"):
    try:
        importlib.import_module(module)
    except ModuleNotFoundError:
        continue
    sys.exit(f"{module} can be imported")
root = pathlib.Path(raylm.__file__).parent
kernels = {*root.glob("models/gpu/*.py"), *root.glob("worker/gpu/*_kernels.py")}
for file in {*root.rglob("*.py")} - kernels:
    importlib.import_module(".".join(file.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__"))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["-c", EVERY_MODULE], id="modules"),
        pytest.param(["-m", "pytest", "-p", "no:cacheprovider", "tests/ingress/test_real_llm.py"], id="server"),
    ],
)
def test_all_of_raylm_works_without_xformers_and_triton(tmp_path: Path, arguments: list[str]) -> None:
    """All modules except kernels can be imported, and the HTTP application answers with a real engine."""
    (tmp_path / "sitecustomize.py").write_text(BLOCKED)
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
