"""Names of knobs: dotted, the last part alone, and vLLM's names."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from raylm.config import VLLM_KNOBS, Config, faults, flat_knobs, knob_named, knobs
from raylm.errors import ConfigError

DOTTED = [name for name, *_ in knobs()]


def test_a_last_part_that_several_knobs_have_names_none_of_them() -> None:
    flat = flat_knobs()
    assert flat["max_num_seqs"] == "scheduler.max_num_seqs"
    assert flat["max_model_len"] == "max_model_len"
    assert "replicas" not in flat
    assert flat["dtype"] == "dtype"
    assert {"engine.replicas", "ingress.replicas", "cache.dtype"} == set(DOTTED) - set(flat.values())


def test_vllms_names_mean_knobs_and_hide_none() -> None:
    assert set(VLLM_KNOBS.values()) <= set(DOTTED)
    assert not VLLM_KNOBS.keys() & flat_knobs().keys()


@pytest.mark.parametrize("name", ["cache.num_blocks", "num_blocks", "num_gpu_blocks_override"])
def test_a_knob_has_several_names(name: str) -> None:
    assert knob_named(name) == "cache.num_blocks"


@pytest.mark.parametrize(("name", "knob"), [("kv_cache_dtype", "cache.dtype"), ("dtype", "dtype")])
def test_the_types_of_weights_and_of_the_kv_cache(name: str, knob: str) -> None:
    assert knob_named(name) == knob


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_num_seq", "did you mean 'max_num_seqs'?"),
        ("replicas", "did you mean 'engine.replicas'?"),
        ("gpu_memory_utilization", "the KV pool's size is cache.memory_gib, in GiB."),
        ("gpu_memory_utilisation", "the KV pool's size is cache.memory_gib, in GiB."),
        ("seed", "each request has its own, in its sampling parameters."),
        ("zzzz", "`raylm config` prints the known ones."),
    ],
)
def test_an_unknown_name_is_refused_with_what_serves(name: str, hint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        knob_named(name)
    assert refused.value.message == f"unknown key {name!r}; {hint}"


def test_faults_are_one_line_without_a_link() -> None:
    with pytest.raises(ValidationError) as wrong:
        Config.model_validate(
            {"cache": {"num_blocks": 0, "dtype": "fp8_e5m2"}, "max_model_len": "x", "engine": {"thread": 3}}
        )
    line = faults(wrong.value)
    assert "\n" not in line
    assert "http" not in line
    assert "cache.num_blocks: Input should be greater than or equal to 2" in line
    assert "cache.dtype: Input should be 'auto' or 'fp8'" in line
    assert "engine: unknown key 'thread'; did you mean 'threads'?" in line


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"engine": {"executor": "local"}}, "engine: pipeline_parallel_size: each stage is a process, so the executor"),
        (
            {"engine": {"record_dir": "/r"}},
            "engine: record_dir: steps are not recorded with pipeline_parallel_size over",
        ),
        ({"lora": {"root": "/a"}}, "lora.root: adapters are not served with engine.pipeline_parallel_size over 1"),
        (
            {"scheduler": {"speculative_tokens": 3}},
            "scheduler.speculative_tokens: draft tokens are not served with engine.pipeline_parallel_size over 1",
        ),
        ({"device": "cuda"}, "device: GPUs are not served with engine.pipeline_parallel_size over 1"),
    ],
)
def test_what_stages_do_not_serve_is_refused_by_name(knobs: dict[str, Any], said: str) -> None:
    Config.model_validate(knobs)
    divided = knobs | {"engine": knobs.get("engine", {}) | {"pipeline_parallel_size": 2}}
    with pytest.raises(ValidationError) as refused:
        Config.model_validate(divided)
    assert said in faults(refused.value)


def test_each_stage_has_a_further_step_in_flight() -> None:
    assert Config().steps_in_flight == 2
    stages = {"engine": {"pipeline_parallel_size": 3}}
    assert Config.model_validate(stages).steps_in_flight == 4
    assert Config.model_validate(stages | {"scheduler": {"steps_in_flight": 1}}).steps_in_flight == 3
