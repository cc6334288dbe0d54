"""A worker's start, its results, steps, shutdown, and configurations that it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from raylm.config import Config, EngineConfig
from raylm.errors import ConfigError
from raylm.messages import NewSequence, SchedulerOutput
from raylm.native import kernels
from raylm.params import SamplingParams
from raylm.worker import Worker, startup
from raylm.worker.cgroup import available_cores, available_memory
from raylm.worker.startup import available_threads, useful_threads
from tests.checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", dtype=torch.bfloat16, tokenizer=False)


def config(path: Path, **changes: Any) -> Config:
    base = {"model": str(path), "cache": {"num_blocks": 8}, "engine": {"threads": 1}}
    return Config.model_validate(base | changes)


def first_step() -> SchedulerOutput:
    new = NewSequence(7, [5, 6, 7], 3, [4], SamplingParams(temperature=0.0), seed=0)
    return SchedulerOutput(0, [], [new], [7], [0], [3], [True], [0], [])


def test_start_tells_what_it_found(path: Path) -> None:
    worker = Worker(config(path))
    info = worker.start()
    assert (info.num_blocks, info.block_size, info.max_model_len, info.vocab_size) == (8, 16, 128, 320)
    assert (info.device, info.dtype, info.attention_backend, info.threads) == ("cpu", "bfloat16", "cpu", 1)
    weights = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    assert 0.9 * weights < info.weights_bytes < weights
    assert info.kv_cache_bytes == 8 * 16 * 2 * 2 * 2 * 16 * 2  # blocks, tokens, layers, k and v, heads, head_dim, bytes
    assert [name for name, _ in info.stages] == [
        "import torch",
        "native kernels",
        "load weights",
        "profile run",
        "allocate KV cache",
    ]
    assert all(seconds >= 0 for _, seconds in info.stages)
    output = worker.execute(first_step())
    assert output.seq_ids == [7]
    assert 0 < output.forward_s <= output.step_s
    worker.shutdown()
    worker.shutdown()


def test_steps_need_a_running_worker(path: Path) -> None:
    worker = Worker(config(path))
    with pytest.raises(RuntimeError, match="not been started"):
        worker.execute(first_step())
    worker.start()
    worker.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        worker.execute(first_step())


def test_the_default_pool_holds_the_sequences_and_a_cache(path: Path) -> None:
    info = Worker(config(path, cache={}, scheduler={"max_num_seqs": 4})).start()
    assert info.max_model_len == 256
    assert info.num_blocks == (4 + 16) * 256 // 16 + 4


def test_the_default_pool_is_a_modest_share_of_what_is_free(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raylm.worker.kv_cache.available_memory", lambda: 1 << 20)
    info = Worker(config(path, cache={}, scheduler={"max_num_seqs": 64})).start()
    assert 0.39 * (1 << 20) < info.kv_cache_bytes <= 0.4 * (1 << 20)


def test_threads_default_to_what_the_weights_are_worth(path: Path) -> None:
    before = torch.get_num_threads()
    try:
        assert Worker(config(path, engine={})).start().threads == kernels().team.threads == 1
        assert Worker(config(path, engine={"threads": 2})).start().threads == kernels().team.threads == 2
        assert torch.get_num_threads() == 1  # the kernels leave little to torch
    finally:
        torch.set_num_threads(before)
    assert available_threads(EngineConfig()) == available_cores()
    assert available_threads(EngineConfig(tensor_parallel_size=2)) == max(1, available_cores() // 2)
    assert available_threads(EngineConfig(tensor_parallel_size=64)) == 1
    assert available_threads(EngineConfig(threads=7, tensor_parallel_size=2)) == 7
    assert [useful_threads(3, size << 20) for size in (1, 127, 128, 10_000)] == [1, 1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"max_model_len": 257}, "max_model_len: 257 exceeds the 256 positions"),
        ({"max_model_len": 129}, "max_model_len: 129 .* fit 128 tokens"),
        ({"cache": {"num_blocks": 1 << 40}}, r"cache\.num_blocks"),
        ({"dtype": "float16"}, "dtype: float16"),
        ({"cache": {"dtype": "fp8"}}, r"cache\.dtype: no attention backend serves keys and values in fp8 here"),
        ({"model": "./no-such-folder"}, "no-such-folder"),
    ],
)
def test_what_cannot_be_served_is_refused_at_start(path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Worker(config(path, **changes)).start()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_an_absent_gpu_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match="device: cuda"):
        Worker(config(path, device="cuda")).start()


def test_draft_tokens_need_what_makes_them(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "SPECULATORS", {})
    with pytest.raises(ConfigError, match=r"^scheduler\.speculative_tokens: raylm\.worker\.speculation is not"):
        Worker(config(path, scheduler={"speculative_tokens": 2})).start()
    assert Worker(config(path)).start().num_blocks == 8


def test_a_gpu_without_its_package_is_slower_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(startup, "GRAPH_FORWARDS", {})
    startup.check_extras(Config(), torch.device("cpu"))
    assert not caplog.text
    startup.check_extras(Config(), torch.device("cuda"))
    assert "slower: raylm.worker.gpu" in caplog.text


def test_neither_import_nor_construction_needs_torch() -> None:
    code = (
        "import sys; from raylm.worker import Worker; from raylm.config import Config; Worker(Config());"
        "assert not {'torch', 'transformers', 'ray'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def cgroup(path: Path, **files: str) -> Path:
    for name, text in files.items():
        (path / name.replace("_", ".")).write_text(text)
    return path


def test_a_container_narrows_cores_and_memory(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  8000 kB\nMemAvailable:   4000 kB\n")
    assert available_memory(meminfo, tmp_path) == 4000 * 1024
    cgroup(tmp_path, memory_max="max\n", cpu_max="max 100000\n")
    assert available_memory(meminfo, tmp_path) == 4000 * 1024
    assert available_cores(tmp_path) == available_cores(tmp_path / "none")
    stat = "anon 5\nfile 300000\ninactive_file 200000\n"
    cgroup(tmp_path, memory_max="1000000\n", memory_current="500000\n", memory_stat=stat, cpu_max="50000 100000\n")
    assert available_memory(meminfo, tmp_path) == 700_000
    assert available_cores(tmp_path) == 1


def test_a_container_of_the_first_version_of_cgroups_narrows_them_too(tmp_path: Path) -> None:
    meminfo, memory, cpu = tmp_path / "meminfo", tmp_path / "memory", tmp_path / "cpu"
    meminfo.write_text("MemAvailable:   4000 kB\n")
    for folder in (memory, cpu):
        folder.mkdir()
    stat = "cache 7\ninactive_file 1\ntotal_inactive_file 200000\n"
    unlimited = {"memory.limit_in_bytes": "9223372036854771712\n", "cpu.cfs_quota_us": "-1\n"}
    limited = {"memory.limit_in_bytes": "1000000\n", "cpu.cfs_quota_us": "50000\n"}
    found = []
    for limits in (unlimited, limited):
        used = {"memory.usage_in_bytes": "500000\n", "memory.stat": stat, "cpu.cfs_period_us": "100000\n"}
        for name, text in (limits | used).items():
            (tmp_path / name.partition(".")[0] / name).write_text(text)
        found.append((available_memory(meminfo, tmp_path), available_cores(tmp_path)))
    assert found == [(4000 * 1024, available_cores(tmp_path / "none")), (700_000, 1)]


def test_a_model_without_a_stated_length_takes_the_pools(path: Path, tmp_path: Path) -> None:
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    stated = json.loads((tmp_path / "config.json").read_text())
    del stated["max_position_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(stated))
    assert Worker(config(tmp_path, cache={"num_blocks": 40})).start().max_model_len == 640
